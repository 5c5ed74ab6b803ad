// The sum of a tensor's squares on the CPU, in one pass: in float32 by rows of 1,024 elements, in float64 over rows. Operator: `colofunc/ops/squares.py`.

#include "exact.h"

#include "squares.h"

#include <type_traits>
#include <vector>

namespace colofunc {
namespace {

template <class Element>
struct Rows {
  const Element* x;
  double* sums;
  int64_t numel, begin, end;

  COLOFUNC_INLINE void operator()() const {
    for (int64_t row = begin; row < end; ++row) sums[row] = squares_of_row(x + row * ROW, std::min(ROW, numel - row * ROW));
  }
};

void squares(Tensor out, Tensor x) {
  const char* what = "squares_host_";
  STD_TORCH_CHECK(out.numel() == 1 && out.scalar_type() == ScalarType::Double, what, ": the sum is one float64");
  const int64_t numel = x.numel(), rows = (numel + ROW - 1) / ROW;
  std::vector<double> sums(rows);
  over_gradient(x, x, what, [&](const auto* elements) {
    using Element = std::remove_cv_t<std::remove_pointer_t<decltype(elements)>>;
    torch::stable::parallel_for(0, rows, ROW_GRAIN, [&](int64_t begin, int64_t end) {
      at_best_level(Rows<Element>{elements, sums.data(), numel, begin, end});
    });
  });
  double total = 0.0;
  for (double one : sums) total += one;
  *static_cast<double*>(out.data_ptr()) = total;
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CPU, m) {
  m.impl("squares_host_", TORCH_BOX(&colofunc::squares));
}
