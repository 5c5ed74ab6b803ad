// Vectors of 32-bit words, and two ways to compute with packed numbers: widened to float32, and to pairs of bfloat16.
//
// A word holds four bytes of an int8 weight or eight nibbles of an int4 one. Widened, byte 0 of each word lies in one vector, byte 1 in the
// next, and so on: `place` says where a number was, so that the other operand is brought into that order.

#pragma once

#include "common.h"

#include <cstring>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "byte 0 of a word is its lowest"
#endif

namespace colofunc {

// ---- vectors of 32-bit words ----

template <int LANES>
struct Vectors {
  typedef float Float __attribute__((vector_size(4 * LANES)));
  typedef int32_t Int __attribute__((vector_size(4 * LANES)));
};

template <class Vector>
COLOFUNC_INLINE Vector load(const void* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof(vector));
  return vector;
}

template <class Vector>
COLOFUNC_INLINE void store(void* to, const Vector& vector) {
  std::memcpy(to, &vector, sizeof(vector));
}

// Four sums whose sum is that of the vector.
COLOFUNC_INLINE Vectors<4>::Float quarter(const Vectors<4>::Float& v) {
  return v;
}

COLOFUNC_INLINE Vectors<4>::Float quarter(const Vectors<8>::Float& v) {
  return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}

COLOFUNC_INLINE Vectors<4>::Float quarter(const Vectors<16>::Float& v) {
  return quarter(
      __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
}

template <class Float>
COLOFUNC_INLINE float sum(const Float& v) {
  const Vectors<4>::Float q = quarter(v);
  return (q[0] + q[1]) + (q[2] + q[3]);
}

// The sums of four vectors.
template <class Float>
COLOFUNC_INLINE Vectors<4>::Float sums_of(const Float* v) {
  const Vectors<4>::Float a = quarter(v[0]), b = quarter(v[1]), c = quarter(v[2]), d = quarter(v[3]);
  const Vectors<4>::Float ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Vectors<4>::Float cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// ---- arithmetic: in float32 ----

// Numbers are float32. A word of an int8 weight gives four vectors, one of int4 eight.
template <int LANES_>
struct InFloat {
  static constexpr int LANES = LANES_;
  static constexpr int TILE_ROWS = LANES == 16 ? 6 : 3;  // of x; as many sums as there are registers for
  using Number = float;
  using Float = typename Vectors<LANES>::Float;
  using Int = typename Vectors<LANES>::Int;
  using Vector = Float;

  // Where the number at `position` of a widened word's vectors was in the weight.
  template <int PER_WORD>
  static int place(int position) {
    return position % LANES * PER_WORD + position / LANES;
  }

  static COLOFUNC_INLINE void dot(Float& to, const Vector& x, const Vector& w) {
    to += x * w;
  }

  static COLOFUNC_INLINE void widen8(const uint8_t* data, Vector* w) {
    const Int words = load<Int>(data);
    w[0] = __builtin_convertvector((words << 24) >> 24, Float);
    w[1] = __builtin_convertvector((words << 16) >> 24, Float);
    w[2] = __builtin_convertvector((words << 8) >> 24, Float);
    w[3] = __builtin_convertvector(words >> 24, Float);
  }

  static COLOFUNC_INLINE void widen4(const uint8_t* data, float scale, float zero, Vector* w) {
    const Int words = load<Int>(data);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) w[j] = (__builtin_convertvector((words >> (4 * j)) & 15, Float) - zero) * scale;
  }
};

// ---- arithmetic: pairs of bfloat16, where the processor multiplies them (AVX512-BF16) ----

#if COLOFUNC_LEVELS > 1
// Numbers are bfloat16, two in a word: a vector holds 32. Products are exact and are summed in float32.
struct InPairs {
  static constexpr int LANES = 16;
  static constexpr int TILE_ROWS = 6;
  using Number = uint16_t;
  using Float = Vectors<16>::Float;
  using Int = Vectors<16>::Int;
  using Vector = Int;

  // Of a word, two bytes lie in one vector, 16 numbers apart; the nibbles of each half of it lie in four vectors.
  template <int PER_WORD>
  static int place(int position) {
    const int vector = position / 32, number = position % 32;
    if (PER_WORD == 4) return number % 16 * 4 + vector * 2 + number / 16;
    return number * 4 + vector;
  }

  // Three instructions for which C++ has no operator.
  static COLOFUNC_INLINE void dot(Float& to, const Vector& x, const Vector& w) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(to) : "v"(w), "vm"(x));
  }

  static COLOFUNC_INLINE Vector rounded(const Float& low, const Float& high) {
    Vector numbers;
    asm("vcvtne2ps2bf16 %1, %2, %0" : "=v"(numbers) : "vm"(low), "v"(high));
    return numbers;
  }

  // Of each place, 16 bits, the lowest five count.
  static COLOFUNC_INLINE Vector looked_up(const Vector& table, const Vector& places) {
    Vector found;
    asm("vpermw %2, %1, %0" : "=v"(found) : "v"(places), "v"(table));
    return found;
  }

  // Whole numbers up to 256 are exact in bfloat16.
  static COLOFUNC_INLINE void widen8(const uint8_t* data, Vector* w) {
    Float wide[4];
    InFloat<16>::widen8(data, wide);
    w[0] = rounded(wide[0], wide[1]);
    w[1] = rounded(wide[2], wide[3]);
  }

  // The sixteen numbers of a group, rounded to bfloat16, are a table. They stand in it twice, so that the fifth bit of a place, which
  // is of the next number, does not count.
  static COLOFUNC_INLINE void widen4(const uint8_t* data, float scale, float zero, Vector* w) {
    typedef uint16_t Halves __attribute__((vector_size(64)));
    const Float numbers = (Float{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} - zero) * scale;
    const Vector table = rounded(numbers, numbers);
    const Halves words = load<Halves>(data);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) w[j] = looked_up(table, reinterpret_cast<Vector>(words >> (4 * j)));
  }
};
#endif

}  // namespace colofunc
