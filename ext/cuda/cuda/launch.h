// Starts of the kernels for GPUs, without a name of torch: what nvcc compiles takes a seconds' fraction so, and not several.
//
// Pointers are of the device's memory. Every start is on a stream of the current device and waits for nothing.

#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace colofunc {

// Of x and out, or of a gradient.
enum class Kind : int { FLOAT, HALF, BFLOAT16 };

// Whether the current device can run these kernels: a library of another architecture, or for a newer driver, says why not.
cudaError_t loaded();

// ---- updates ----

// A number that the host knows (`at` is nullptr), or that lies on the device in one of these formats.
struct Number {
  enum Format : int { FLOAT, DOUBLE, LONG };
  const void* at;
  Format format;
  double value;
};

// What all updates share. Of `count` elements each; `first` and `second` are nullptr where a rule has no such state. `out` is `param`, or
// where LAMB's direction goes.
struct Operands {
  float *param, *out, *first, *second;
  const void* grad;
  Kind kind;  // of the gradient
  int64_t count;
  Number step, lr;
  const bool* finite;  // on the device: whether the update happens; nullptr: it does
};

cudaError_t update_adamw(
    const Operands& operands, double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
    cudaStream_t stream);
cudaError_t update_sgd(
    const Operands& operands, double momentum, double weight_decay, bool nesterov, bool maximize, cudaStream_t stream);
cudaError_t update_lamb(
    const Operands& operands, double beta1, double beta2, double eps, double weight_decay, bool maximize, cudaStream_t stream);
cudaError_t update_lion(
    const Operands& operands, double beta1, double beta2, double weight_decay, bool maximize, cudaStream_t stream);

// ---- products with packed weights ----

// x (m, k) and out (m, n) are contiguous; data (n, k) in int8, or (n, k/2) with scale and zero (n, k/128); strides in elements.
struct Product {
  int64_t m, n, k;
  const void* x;
  const uint8_t* data;
  int64_t data_stride;
  const float* scale;
  int64_t scale_stride;
  const uint8_t* zero;  // nullptr: int8
  int64_t zero_stride;
  const void* bias;  // or nullptr
  void* out;
  Kind kind;  // of x, bias and out
};

cudaError_t packed_linear(const Product& product, cudaStream_t stream);

// ---- experts ----

// index (choices) of experts, each of which is in 0 .. experts - 1 or nobody. Sorted by expert, nobody last, and else as they were:
// `order` and `key`, the choice and the expert of each place. `place`: of each choice, -1 of nobody's. `ends` (experts): behind each expert's
// last place. `counts` is memory for (experts + 1) * (tiles + 1) numbers.
struct Choices {
  const void* index;
  bool wide;  // int64, else int32
  int64_t count;
  int experts;
  int64_t *order, *key, *place, *ends;
  int* counts;
};

int64_t tiles_of_choices(int64_t count);
cudaError_t sort_choices(const Choices& choices, cudaStream_t stream);

// total (tokens, d) += weight (tokens, k) * rows (s, d) at `place` (tokens, k) - first, in ascending order of places; others do not count.
struct Sums {
  float* total;
  const void* rows;
  Kind kind;  // of rows
  const int64_t* place;
  const void* weight;  // or nullptr: ones
  Kind weight_kind;
  int64_t tokens, d, first, s;
  int k;
};

cudaError_t add_choices(const Sums& sums, cudaStream_t stream);

}  // namespace colofunc
