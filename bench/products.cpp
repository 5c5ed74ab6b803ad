// How fast this processor multiplies bfloat16 numbers that are in registers, for a row of `bench/native.py`.

#include <immintrin.h>

extern "C" {

// `times` times 16 instructions that wait for nothing, each of 32 products and sums. Returns something that depends on them.
__attribute__((target("avx512f,avx512bf16"))) float multiply(long times) {
  __m512 sums[16];
#pragma GCC unroll 16
  for (int k = 0; k < 16; ++k) sums[k] = _mm512_set1_ps(static_cast<float>(k));
  const __m512bh x = (__m512bh)_mm512_set1_epi16(0x3f80), w = (__m512bh)_mm512_set1_epi16(0x3c00);
  for (long i = 0; i < times; ++i) {
#pragma GCC unroll 16
    for (int k = 0; k < 16; ++k) {
      sums[k] = _mm512_dpbf16_ps(sums[k], x, w);
      asm volatile("" : "+v"(sums[k]));
    }
  }
  __m512 total = sums[0];
#pragma GCC unroll 16
  for (int k = 1; k < 16; ++k) total = _mm512_add_ps(total, sums[k]);
  return _mm512_reduce_add_ps(total);
}

}  // extern "C"
