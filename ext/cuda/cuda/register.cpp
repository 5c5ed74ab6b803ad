// The operators' kernels for GPUs: what operands may be, the stream they run on, and their registration with torch.

#include "../common.h"
#include "../packed_operands.h"
#include "launch.h"

#include <torch/csrc/stable/accelerator.h>

#include <optional>

namespace colofunc {
namespace {

using torch::stable::accelerator::DeviceGuard;

// The current stream of a tensor's device.
cudaStream_t stream_of(const Tensor& x) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

void check_started(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, what, ": ", cudaGetErrorString(error));
}

Kind kind_of(const Tensor& x, const char* what) {
  switch (x.scalar_type()) {
    case ScalarType::Float: return Kind::FLOAT;
    case ScalarType::Half: return Kind::HALF;
    case ScalarType::BFloat16: return Kind::BFLOAT16;
    default: STD_TORCH_CHECK(false, what, ": not float32, float16 or bfloat16");
  }
}

void check_beside(const Tensor& x, const Tensor& other, const char* what) {
  STD_TORCH_CHECK(x.is_cuda() && x.get_device_index() == other.get_device_index(), what, ": tensors lie on several devices");
}

// ---- updates ----

float* floats(const Tensor& x, const Tensor& param, const char* what) {
  STD_TORCH_CHECK(x.is_contiguous() && x.numel() == param.numel(), what, ": not contiguous, or not of the parameter's size");
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, what, ": neither parameter nor states may be other than float32");
  check_beside(x, param, what);
  return static_cast<float*>(x.data_ptr());
}

// A count or a rate, which may lie on the host.
Number number(const Tensor& x, const Tensor& param, const char* what) {
  STD_TORCH_CHECK(x.numel() == 1, what, ": step and lr have one element");
  Number::Format format = Number::FLOAT;
  switch (x.scalar_type()) {
    case ScalarType::Float: format = Number::FLOAT; break;
    case ScalarType::Double: format = Number::DOUBLE; break;
    case ScalarType::Long: format = Number::LONG; break;
    default: STD_TORCH_CHECK(false, what, ": step and lr are float32, float64 or int64");
  }
  const void* at = x.data_ptr();
  if (!x.is_cpu()) {
    check_beside(x, param, what);
    return Number{at, format, 0.0};
  }
  switch (format) {
    case Number::FLOAT: return Number{nullptr, format, *static_cast<const float*>(at)};
    case Number::DOUBLE: return Number{nullptr, format, *static_cast<const double*>(at)};
    default: return Number{nullptr, format, static_cast<double>(*static_cast<const int64_t*>(at))};
  }
}

Operands operands_of(
    const Tensor& param, const Tensor& grad, const Tensor* first, const Tensor* second, const Tensor* step, const Tensor* lr,
    const std::optional<Tensor>& finite, bool takes_wide, const char* what) {
  Operands found{};
  found.param = found.out = floats(param, param, what);
  found.first = first == nullptr ? nullptr : floats(*first, param, what);
  found.second = second == nullptr ? nullptr : floats(*second, param, what);
  STD_TORCH_CHECK(grad.is_contiguous() && grad.numel() == param.numel(), what, ": not contiguous, or not of the parameter's size");
  check_beside(grad, param, what);
  const bool wide = grad.scalar_type() == ScalarType::Float;
  const bool narrow = grad.scalar_type() == ScalarType::BFloat16 || grad.scalar_type() == ScalarType::Half;
  STD_TORCH_CHECK(narrow || (wide && takes_wide), what, ": a gradient is ", takes_wide ? "float32, " : "", "bfloat16 or float16");
  found.grad = grad.data_ptr();
  found.kind = kind_of(grad, what);
  found.count = param.numel();
  if (step != nullptr) found.step = number(*step, param, what);
  if (lr != nullptr) found.lr = number(*lr, param, what);
  if (finite) {
    STD_TORCH_CHECK(finite->scalar_type() == ScalarType::Bool && finite->numel() == 1, what, ": finite is one bool");
    check_beside(*finite, param, what);
    found.finite = static_cast<const bool*>(finite->data_ptr());
  }
  return found;
}

void adamw(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor step, Tensor lr, double beta1, double beta2, double eps,
    double weight_decay, bool decoupled, bool maximize, std::optional<Tensor> finite) {
  const char* what = "adamw_device_";
  const Operands operands = operands_of(param, grad, &exp_avg, &exp_avg_sq, &step, &lr, finite, false, what);
  const DeviceGuard guard(param.get_device_index());
  check_started(update_adamw(operands, beta1, beta2, eps, weight_decay, decoupled, maximize, stream_of(param)), what);
}

void sgd(
    Tensor param, Tensor grad, std::optional<Tensor> buffer, Tensor lr, double momentum, double weight_decay, bool nesterov,
    bool maximize, std::optional<Tensor> finite) {
  const char* what = "sgd_device_";
  const Operands operands = operands_of(param, grad, buffer ? &*buffer : nullptr, nullptr, nullptr, &lr, finite, false, what);
  const DeviceGuard guard(param.get_device_index());
  check_started(update_sgd(operands, momentum, weight_decay, nesterov, maximize, stream_of(param)), what);
}

void lamb(
    Tensor direction, Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor step, double beta1, double beta2, double eps,
    double weight_decay, bool maximize, std::optional<Tensor> finite) {
  const char* what = "lamb_device_";
  Operands operands = operands_of(param, grad, &exp_avg, &exp_avg_sq, &step, nullptr, finite, true, what);
  operands.out = floats(direction, param, what);
  const DeviceGuard guard(param.get_device_index());
  check_started(update_lamb(operands, beta1, beta2, eps, weight_decay, maximize, stream_of(param)), what);
}

void lion(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor lr, double beta1, double beta2, double weight_decay, bool maximize,
    std::optional<Tensor> finite) {
  const char* what = "lion_device_";
  const Operands operands = operands_of(param, grad, &exp_avg, nullptr, nullptr, &lr, finite, true, what);
  const DeviceGuard guard(param.get_device_index());
  check_started(update_lion(operands, beta1, beta2, weight_decay, maximize, stream_of(param)), what);
}

// ---- products with packed weights ----

void packed_linear_on_gpu(
    Tensor out, Tensor x, Tensor data, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> bias) {
  const char* what = "packed_linear_";
  check_packed(out, x, data, scale, zero, bias);
  for (const Tensor* other : {&out, &data, &scale, zero ? &*zero : &x, bias ? &*bias : &x}) check_beside(*other, x, what);
  const Product product{
      x.size(0), data.size(0), x.size(1), x.data_ptr(), static_cast<const uint8_t*>(data.data_ptr()), data.stride(0),
      static_cast<const float*>(scale.data_ptr()), scale.stride(0),
      zero ? static_cast<const uint8_t*>(zero->data_ptr()) : nullptr, zero ? zero->stride(0) : 0,
      bias ? bias->data_ptr() : nullptr, out.data_ptr(), kind_of(x, what)};
  const DeviceGuard guard(x.get_device_index());
  check_started(packed_linear(product, stream_of(x)), what);
}

// ---- experts ----

void sorted_choices(Tensor order, Tensor key, Tensor place, Tensor ends, Tensor counts, Tensor index) {
  const char* what = "sort_choices_";
  for (const Tensor* x : {&order, &key, &place, &ends, &counts, &index}) {
    STD_TORCH_CHECK(x->is_contiguous(), what, ": tensors are contiguous");
    check_beside(*x, index, what);
  }
  for (const Tensor* x : {&order, &key, &place}) {
    STD_TORCH_CHECK(x->scalar_type() == ScalarType::Long && x->numel() == index.numel(), what, ": results are int64, of the index's size");
  }
  const bool wide = index.scalar_type() == ScalarType::Long;
  STD_TORCH_CHECK(wide || index.scalar_type() == ScalarType::Int, what, ": an index is int64 or int32");
  STD_TORCH_CHECK(index.numel() < INT32_MAX, what, ": more than 2^31 choices");
  STD_TORCH_CHECK(ends.scalar_type() == ScalarType::Long && ends.numel() < 8192, what, ": ends are int64, of fewer than 8192 experts");
  const int64_t needed = (ends.numel() + 1) * (tiles_of_choices(index.numel()) + 1);
  STD_TORCH_CHECK(counts.scalar_type() == ScalarType::Int && counts.numel() >= needed, what, ": counts are int32, ", needed, " of them");
  const auto whole = [](const Tensor& x) { return static_cast<int64_t*>(x.data_ptr()); };
  const Choices choices{
      index.data_ptr(), wide, index.numel(), static_cast<int>(ends.numel()), whole(order), whole(key), whole(place), whole(ends),
      static_cast<int*>(counts.data_ptr())};
  const DeviceGuard guard(index.get_device_index());
  check_started(sort_choices(choices, stream_of(index)), what);
}

void added_choices(Tensor total, Tensor rows, Tensor place, std::optional<Tensor> weight, int64_t first) {
  const char* what = "add_choices_";
  for (const Tensor* x : {&total, &rows, &place, weight ? &*weight : &place}) {
    STD_TORCH_CHECK(x->dim() == 2 && x->is_contiguous(), what, ": tensors are contiguous matrices");
    check_beside(*x, total, what);
  }
  STD_TORCH_CHECK(total.scalar_type() == ScalarType::Float && place.scalar_type() == ScalarType::Long, what, ": a total is float32, places int64");
  STD_TORCH_CHECK(total.size(0) == place.size(0) && total.size(1) == rows.size(1), what, ": total (tokens, d), rows (s, d), place (tokens, k)");
  STD_TORCH_CHECK(!weight || weight->numel() == place.numel(), what, ": a weight for each place");
  STD_TORCH_CHECK(total.size(0) < INT32_MAX, what, ": more than 2^31 tokens");
  const Sums sums{
      static_cast<float*>(total.data_ptr()), rows.data_ptr(), kind_of(rows, what), static_cast<const int64_t*>(place.data_ptr()),
      weight ? weight->data_ptr() : nullptr, weight ? kind_of(*weight, what) : Kind::FLOAT, total.size(0), total.size(1), first, rows.size(0),
      static_cast<int>(place.size(1))};
  const DeviceGuard guard(total.get_device_index());
  check_started(add_choices(sums, stream_of(total)), what);
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CUDA, m) {
  m.impl("adamw_device_", TORCH_BOX(&colofunc::adamw));
  m.impl("sgd_device_", TORCH_BOX(&colofunc::sgd));
  m.impl("lamb_device_", TORCH_BOX(&colofunc::lamb));
  m.impl("lion_device_", TORCH_BOX(&colofunc::lion));
  m.impl("packed_linear_", TORCH_BOX(&colofunc::packed_linear_on_gpu));
  m.impl("sort_choices_", TORCH_BOX(&colofunc::sorted_choices));
  m.impl("add_choices_", TORCH_BOX(&colofunc::added_choices));
}

// Why the current device cannot run these kernels; nullptr where it can.
extern "C" __attribute__((visibility("default"))) const char* colofunc_device_lacks() {
  const cudaError_t error = colofunc::loaded();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
