// AdamW as the references in Python compute it, operation by operation, and numbers rounded to bfloat16 by a draw.
//
// Formulas: `colofunc/ops/update_rounded.py`, `update_packed.py`, `rounding.py`. To be included behind `exact.h`.

#pragma once

#include "../common.h"
#include "words.h"

#include <cmath>
#include <cstring>

namespace colofunc {

struct RoundedAdam {
  float sign, keep, decay, keep_first, toward_first, keep_second, toward_second, rate, root, eps;

  // rate, root and keep are numbers of float32 already.
  RoundedAdam(
      double rate, double root, double keep, double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize)
      : sign(maximize ? -1.0f : 1.0f),
        keep(decoupled && weight_decay != 0.0 ? keep : 1.0),
        decay(decoupled ? 0.0 : weight_decay),
        keep_first(beta1),
        toward_first(1.0 - beta1),
        keep_second(beta2),
        toward_second(1.0 - beta2),
        rate(rate),
        root(root),
        eps(eps) {}

  COLOFUNC_INLINE float next(float param, float grad, float& mean, float& square) const {
    float g = grad * sign;
    // Not a product with zero: a parameter that is infinite is no gradient.
    g = decay == 0.0f ? g : g + param * decay;
    mean = mean * keep_first + g * toward_first;
    square = square * keep_second + g * g * toward_second;
    return param * keep - mean * rate / (std::sqrt(square) / root + eps);
  }
};

// x rounded to one of its two neighbours. draw: 0 to 2^16 - 1.
COLOFUNC_INLINE BFloat16 drawn(float x, uint32_t draw) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const bool is_finite = (bits & 0x7F800000) != 0x7F800000;
  const bool is_number = (bits & 0x7FFFFFFF) <= 0x7F800000;
  const uint32_t other = is_number ? bits : 0x7FC00000;
  BFloat16 result;
  result.x = static_cast<uint16_t>((is_finite ? bits + draw : other) >> 16);
  return result;
}

inline Places places_of(int64_t key, const Tensor& rows, int64_t count, int64_t stride, int64_t numel, const char* what) {
  const bool fits = rows.scalar_type() == ScalarType::Long && rows.is_contiguous() && count > 0 && rows.numel() * count == numel;
  STD_TORCH_CHECK(fits, what, ": rows and columns are not the places of all elements");
  return Places{static_cast<uint64_t>(key), static_cast<const int64_t*>(rows.data_ptr()), count, stride};
}

}  // namespace colofunc
