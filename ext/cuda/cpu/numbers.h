// Operands of updates on the CPU: what they may be, and a gradient of any width as float32.

#pragma once

#include "../common.h"

#include <cstring>

namespace colofunc {

COLOFUNC_INLINE float widened(float x) {
  return x;
}

// Written out, so that loops with it become vector instructions.
COLOFUNC_INLINE float widened(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.x) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

COLOFUNC_INLINE float widened(Half x) {
  return static_cast<float>(x);
}

inline void check(const Tensor& x, const Tensor& param, const char* what) {
  STD_TORCH_CHECK(x.is_contiguous() && x.numel() == param.numel(), what, ": not contiguous, or not of the parameter's size");
}

inline float* floats(const Tensor& x, const Tensor& param, const char* what) {
  check(x, param, what);
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, what, ": neither parameter nor states may be other than float32");
  return static_cast<float*>(x.data_ptr());
}

// A gradient of one of the types that `over_gradient` takes, for kernels that widen some elements at a time anyway: they are compiled once.
struct Gradient {
  const void* elements;
  ScalarType type;

  COLOFUNC_INLINE void widen(int64_t begin, int64_t count, float* __restrict wide) const {
    if (type == ScalarType::BFloat16) {
      const BFloat16* __restrict of = static_cast<const BFloat16*>(elements) + begin;
      for (int64_t i = 0; i < count; ++i) wide[i] = widened(of[i]);
    } else if (type == ScalarType::Half) {
      const Half* __restrict of = static_cast<const Half*>(elements) + begin;
      for (int64_t i = 0; i < count; ++i) wide[i] = widened(of[i]);
    } else {
      std::memcpy(wide, static_cast<const float*>(elements) + begin, count * sizeof(float));
    }
  }
};

inline Gradient gradient(const Tensor& grad, const Tensor& param, const char* what) {
  check(grad, param, what);
  const ScalarType type = grad.scalar_type();
  const bool known = type == ScalarType::BFloat16 || type == ScalarType::Half || type == ScalarType::Float;
  STD_TORCH_CHECK(known, what, ": a gradient is float32, bfloat16 or float16");
  return Gradient{grad.data_ptr(), type};
}

// `use(elements)` with the gradient's elements in their own type.
template <class Use>
void over_gradient(const Tensor& grad, const Tensor& param, const char* what, const Use& use) {
  check(grad, param, what);
  switch (grad.scalar_type()) {
    case ScalarType::BFloat16: return use(static_cast<const BFloat16*>(grad.data_ptr()));
    case ScalarType::Half: return use(static_cast<const Half*>(grad.data_ptr()));
    case ScalarType::Float: return use(static_cast<const float*>(grad.data_ptr()));
    default: STD_TORCH_CHECK(false, what, ": a gradient is float32, bfloat16 or float16");
  }
}

}  // namespace colofunc
