// LAMB's direction on the CPU, with the squared norms of parameter and direction, in one pass.
//
// Squares are summed in float32 by rows of 1,024 elements and in float64 over rows, in an order that neither threads nor instruction
// sets change. Operator: `colofunc/ops/update_lamb.py`.

#include "exact.h"

#include "../common.h"
#include "../rules.h"
#include "squares.h"

#include <type_traits>
#include <vector>

namespace colofunc {
namespace {

template <class Grad>
struct Direction {
  const Lamb& rule;
  float* direction;
  const float* param;
  const Grad* grad;
  float *first, *second;
  double *of_params, *of_directions;
  int64_t numel, begin, end;

  COLOFUNC_INLINE void operator()() const {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * ROW, count = std::min(ROW, numel - at);
      // Half is widened by a call, which no loop of vector instructions has in it.
      if constexpr (std::is_same_v<Grad, Half>) {
        float wide[ROW];
        for (int64_t i = 0; i < count; ++i) wide[i] = widened(grad[at + i]);
        move(direction + at, param + at, wide, first + at, second + at, count);
      } else {
        move(direction + at, param + at, grad + at, first + at, second + at, count);
      }
      of_params[row] = squares_of_row(param + at, count);
      of_directions[row] = squares_of_row(direction + at, count);
    }
  }

  template <class Elements>
  COLOFUNC_INLINE void move(
      float* __restrict d, const float* __restrict p, const Elements* __restrict g, float* __restrict a, float* __restrict b,
      int64_t count) const {
    const Lamb by = rule;
    for (int64_t i = 0; i < count; ++i) {
      float one = a[i], two = b[i];
      d[i] = by.next(p[i], widened(g[i]), one, two);
      a[i] = one;
      b[i] = two;
    }
  }
};

void lamb(
    Tensor direction, Tensor squares, Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, double step, double beta1,
    double beta2, double eps, double weight_decay, bool maximize) {
  const char* what = "lamb_host_";
  const Lamb rule(step, beta1, beta2, eps, weight_decay, maximize);
  STD_TORCH_CHECK(
      squares.is_contiguous() && squares.numel() == 2 && squares.scalar_type() == ScalarType::Double, what, ": squares are two float64");
  float *d = floats(direction, param, what), *p = floats(param, param, what);
  float *a = floats(exp_avg, param, what), *b = floats(exp_avg_sq, param, what);
  const int64_t numel = param.numel(), rows = (numel + ROW - 1) / ROW;
  std::vector<double> of_params(rows), of_directions(rows);
  over_gradient(grad, param, what, [&](const auto* g) {
    using Grad = std::remove_cv_t<std::remove_pointer_t<decltype(g)>>;
    torch::stable::parallel_for(0, rows, ROW_GRAIN, [&](int64_t begin, int64_t end) {
      at_best_level(Direction<Grad>{rule, d, p, g, a, b, of_params.data(), of_directions.data(), numel, begin, end});
    });
  });
  double* sums = static_cast<double*>(squares.data_ptr());
  sums[0] = sums[1] = 0.0;
  for (int64_t row = 0; row < rows; ++row) {
    sums[0] += of_params[row];
    sums[1] += of_directions[row];
  }
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CPU, m) {
  m.impl("lamb_host_", TORCH_BOX(&colofunc::lamb));
}
