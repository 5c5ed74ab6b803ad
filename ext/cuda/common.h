// What every kernel includes: the stable part of LibTorch, and loops that are compiled for several instruction sets.
//
// Only names of the stable ABI are used (TORCH_TARGET_VERSION, torch 2.10), so that one library serves every later torch and
// every Python. Source: https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html

#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/Half.h>

#include <cstdint>

namespace colofunc {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A function that takes on the instruction set of its caller, which only an inlined one does.
#define COLOFUNC_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__)
#define COLOFUNC_LEVELS 4
#define COLOFUNC_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512")))
#define COLOFUNC_AVX2 __attribute__((target("avx2,fma")))
#else
#define COLOFUNC_LEVELS 1
#endif

// The instruction set in use: 0 is what the compiler takes for granted, 1 AVX2, 2 AVX-512, 3 AVX-512 with products of bfloat16.
int level();

#if COLOFUNC_LEVELS > 1
template <class Loop>
COLOFUNC_AVX512 void with_avx512(const Loop& loop) {
  loop();
}

template <class Loop>
COLOFUNC_AVX2 void with_avx2(const Loop& loop) {
  loop();
}
#endif

// Runs `loop()`, whose call operator is always inlined, as compiled for the best instruction set that this machine has.
template <class Loop>
void at_best_level(const Loop& loop) {
#if COLOFUNC_LEVELS > 1
  if (level() >= 2) return with_avx512(loop);
  if (level() == 1) return with_avx2(loop);
#endif
  loop();
}

}  // namespace colofunc
