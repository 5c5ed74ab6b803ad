// AdamW whose moments are kept in 8 bits, in one pass: a block of them is wide at a time.
//
// Every operation rounds once, in the order of the reference, whose bits these are: `colofunc/ops/update_packed.py`, which has the code
// and its tables.

#include "exact.h"

#include "../common.h"
#include "numbers.h"
#include "rounded.h"
#include "words.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <type_traits>

namespace colofunc {
namespace {

// Fewest elements of a thread.
constexpr int64_t GRAIN = 16384;
// Most elements of a block.
constexpr int64_t MOST = 128;
// Shares are looked up by their bits behind 7 of the mantissa, in octaves below 1.
constexpr int32_t CUT = 16, OCTAVES = 27, STEPS = (OCTAVES << 7) + 1, FIRST = (127 - OCTAVES) << 7;

// The tables of a code, one behind the other.
template <bool SIGNED>
struct Code {
  static constexpr int32_t LEVELS = SIGNED ? 128 : 256;
  static constexpr int32_t ZERO = SIGNED ? LEVELS - 1 : 0;
  static constexpr int64_t NUMBERS = ZERO + LEVELS + 2 * STEPS + 2 * LEVELS;
  const float *shares, *code, *next, *levels, *per_gap;

  explicit Code(const Tensor& tables) {
    STD_TORCH_CHECK(
        tables.scalar_type() == ScalarType::Float && tables.is_contiguous() && tables.numel() == NUMBERS,
        "adamw8_host_: these are not the tables of the code");
    shares = static_cast<const float*>(tables.data_ptr());
    code = shares + ZERO + LEVELS;
    next = code + STEPS;
    levels = next + STEPS;
    per_gap = levels + LEVELS;
  }

  using Byte = std::conditional_t<SIGNED, int8_t, uint8_t>;

  COLOFUNC_INLINE void widen(const Byte* __restrict codes, float scale, float* __restrict numbers, int64_t size) const {
    const float* __restrict of = shares;
    for (int64_t i = 0; i < size; ++i) numbers[i] = of[codes[i] + ZERO] * scale;
  }

  // Returns the scale.
  COLOFUNC_INLINE float pack(const float* __restrict numbers, const float* __restrict upward, Byte* __restrict codes, int64_t size) const {
    const float* __restrict from = code;
    const float* __restrict above = next;
    const float* __restrict level = levels;
    const float* __restrict gap = per_gap;
    int32_t bits[MOST];
    std::memcpy(bits, numbers, size * sizeof(float));
    // Without its sign a number's bits grow as it does, and those of NaN are above all others.
    int32_t largest = 0;
    for (int64_t i = 0; i < size; ++i) largest = std::max(largest, bits[i] & 0x7FFFFFFF);
    float scale;
    std::memcpy(&scale, &largest, sizeof(scale));
    const float unit = scale == 0.0f ? 1.0f : scale;
    for (int64_t i = 0; i < size; ++i) {
      const float share = std::fabs(numbers[i]) / unit;
      int32_t at;
      std::memcpy(&at, &share, sizeof(at));
      at = std::min(std::max((at >> CUT) - FIRST, 0), STEPS - 1);
      int32_t found = static_cast<int32_t>(from[at]) + (share >= above[at] ? 1 : 0);
      const float part = (share - level[found]) * gap[found];
      found += part > upward[i] ? 1 : 0;
      if constexpr (SIGNED) {
        found = bits[i] < 0 ? -found : found;
      } else {
        found = std::max(found, numbers[i] > 0.0f ? 1 : 0);
      }
      codes[i] = static_cast<Byte>(found);
    }
    return scale;
  }
};

// param: of floats, or of bfloat16. places: of the draws; nullptr where the parameter is rounded to the nearest number.
struct Packed {
  const RoundedAdam& rule;
  const Places* places;
  const Code<true>& signed_code;
  const Code<false>& code;
  float* param;
  BFloat16* narrow_param;
  Gradient grad;
  int8_t* first;
  uint8_t* second;
  float *first_scale, *second_scale;
  const float *upward, *halfway;
  int64_t size, begin, end;

  COLOFUNC_INLINE void operator()() const {
    const RoundedAdam by = rule;
    float wide[MOST], moved[MOST], mean[MOST], square[MOST];
    for (int64_t block = begin; block < end; ++block) {
      const int64_t at = block * size;
      grad.widen(at, size, wide);
      signed_code.widen(first + at, first_scale[block], mean, size);
      code.widen(second + at, second_scale[block], square, size);
      if (param != nullptr) {
        std::memcpy(moved, param + at, size * sizeof(float));
      } else {
        for (int64_t i = 0; i < size; ++i) moved[i] = widened(narrow_param[at + i]);
      }
      for (int64_t i = 0; i < size; ++i) moved[i] = by.next(moved[i], wide[i], mean[i], square[i]);
      write(moved, at);
      first_scale[block] = signed_code.pack(mean, halfway, first + at, size);
      second_scale[block] = code.pack(square, upward, second + at, size);
    }
  }

  COLOFUNC_INLINE void write(const float* __restrict moved, int64_t at) const {
    if (param != nullptr) {
      std::memcpy(param + at, moved, size * sizeof(float));
    } else if (places == nullptr) {
      for (int64_t i = 0; i < size; ++i) narrow_param[at + i] = BFloat16(moved[i]);
    } else {
      uint64_t words[MOST];
      places->words(words, at, size);
      BFloat16* __restrict p = narrow_param + at;
      for (int64_t i = 0; i < size; ++i) p[i] = drawn(moved[i], static_cast<uint32_t>(words[i]) & 0xFFFF);
    }
  }
};

template <class Element>
Element* elements(const Tensor& x, ScalarType dtype, int64_t numel) {
  STD_TORCH_CHECK(
      x.scalar_type() == dtype && x.is_contiguous() && x.numel() == numel, "adamw8_host_: an operand is not contiguous, of another size or dtype");
  return static_cast<Element*>(x.data_ptr());
}

void adamw8(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_scale, Tensor exp_avg_sq, Tensor exp_avg_sq_scale, Tensor upward,
    Tensor signed_tables, Tensor tables, double rate, double root, double keep, double beta1, double beta2, double eps,
    double weight_decay, bool decoupled, bool maximize, std::optional<int64_t> key, Tensor rows, int64_t count, int64_t stride) {
  const RoundedAdam rule(rate, root, keep, beta1, beta2, eps, weight_decay, decoupled, maximize);
  const int64_t numel = param.numel(), blocks = exp_avg_scale.numel(), size = upward.numel();
  STD_TORCH_CHECK(size > 0 && size <= MOST && blocks * size == numel, "adamw8_host_: a block has at most 128 elements, all of one size");
  const Code<true> signed_code(signed_tables);
  const Code<false> code(tables);
  int8_t* first = elements<int8_t>(exp_avg, ScalarType::Char, numel);
  uint8_t* second = elements<uint8_t>(exp_avg_sq, ScalarType::Byte, numel);
  float* first_scale = elements<float>(exp_avg_scale, ScalarType::Float, blocks);
  float* second_scale = elements<float>(exp_avg_sq_scale, ScalarType::Float, blocks);
  const float* up = elements<float>(upward, ScalarType::Float, size);
  float halfway[MOST];
  std::fill(halfway, halfway + MOST, 0.5f);
  std::optional<Places> places;
  if (key) places = places_of(*key, rows, count, stride, numel, "adamw8_host_");
  const Places* drawn_at = places ? &*places : nullptr;
  const bool is_narrow = param.scalar_type() == ScalarType::BFloat16;
  STD_TORCH_CHECK(is_narrow || !key, "adamw8_host_: only a parameter in bfloat16 is rounded by draws");
  float* p = is_narrow ? nullptr : elements<float>(param, ScalarType::Float, numel);
  BFloat16* narrow = is_narrow ? elements<BFloat16>(param, ScalarType::BFloat16, numel) : nullptr;
  const Gradient gradients = gradient(grad, param, "adamw8_host_");
  torch::stable::parallel_for(0, blocks, std::max<int64_t>(1, GRAIN / size), [&](int64_t begin, int64_t end) {
    at_best_level(Packed{
        rule, drawn_at, signed_code, code, p, narrow, gradients, first, second, first_scale, second_scale, up, halfway, size, begin, end});
  });
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CPU, m) {
  m.impl("adamw8_host_", TORCH_BOX(&colofunc::adamw8));
}
