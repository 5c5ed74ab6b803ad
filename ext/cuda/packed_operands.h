// What operands of a product with a packed weight may be, on any device. Formats: `colofunc/ops/quantized.py`.

#pragma once

#include "common.h"

#include <optional>

namespace colofunc {

// Numbers of a row of an int4 weight that share a scale and a zero.
constexpr int64_t GROUP = 128;

inline void check(bool right, const char* what) {
  STD_TORCH_CHECK(right, "packed_linear_: ", what);
}

inline void check_parts(const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero) {
  const bool int4 = zero.has_value();
  const int64_t k = x.size(1);
  check(data.dim() == 2 && data.stride(1) == 1, "data is a matrix whose columns lie side by side");
  check(data.scalar_type() == (int4 ? ScalarType::Byte : ScalarType::Char), "data is int8, or uint8 where there is a zero");
  check(scale.scalar_type() == ScalarType::Float, "scale is float32");
  check(scale.size(0) == data.size(0), "scale has as many rows as data");
  if (!int4) {
    check(scale.dim() == 1 && data.size(1) == k, "an int8 weight has data (n, k) and scale (n)");
    return;
  }
  check(k % GROUP == 0 && data.size(1) * 2 == k, "an int4 weight has data (n, k/2) and groups of 128 columns");
  check(scale.dim() == 2 && scale.size(1) == k / GROUP && scale.stride(1) == 1, "scale is (n, k/128), columns side by side");
  check(zero->scalar_type() == ScalarType::Byte && zero->dim() == 2 && zero->stride(1) == 1, "zero is uint8, columns side by side");
  check(zero->size(0) == data.size(0) && zero->size(1) == k / GROUP, "zero is (n, k/128)");
}

inline void check_packed(
    const Tensor& out, const Tensor& x, const Tensor& data, const Tensor& scale, const std::optional<Tensor>& zero,
    const std::optional<Tensor>& bias) {
  check(x.dim() == 2 && x.is_contiguous(), "x is a contiguous matrix");
  check_parts(x, data, scale, zero);
  check(out.dim() == 2 && out.is_contiguous() && out.size(0) == x.size(0) && out.size(1) == data.size(0), "out is (m, n)");
  const ScalarType dtype = x.scalar_type();
  check(
      dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16, "x is float32, float16 or bfloat16");
  check(out.scalar_type() == dtype, "out has the dtype of x");
  if (bias) {
    check(bias->dim() == 1 && bias->size(0) == data.size(0) && bias->is_contiguous(), "bias is (n), contiguous");
    check(bias->scalar_type() == dtype, "bias has the dtype of x");
  }
}

}  // namespace colofunc
