// Sums of squares on the CPU, in an order that neither threads nor instruction sets change.

#pragma once

#include "numbers.h"

#include <algorithm>

namespace colofunc {

// Elements that are summed in float32.
constexpr int64_t ROW = 1024;
// Fewest rows of a thread.
constexpr int64_t ROW_GRAIN = 32;
// Sums that run side by side: of as many elements as four of the widest registers hold, so that none waits for the sum before.
constexpr int64_t LANES = 64;

// Of at most ROW elements.
template <class Element>
COLOFUNC_INLINE double squares_of_row(const Element* __restrict x, int64_t count) {
  float sums[LANES] = {};
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (int64_t lane = 0; lane < LANES; ++lane) {
      const float one = widened(x[i + lane]);
      sums[lane] += one * one;
    }
  }
  for (; i < count; ++i) sums[i % LANES] += widened(x[i]) * widened(x[i]);
  double sum = 0.0;
  for (float one : sums) sum += one;
  return sum;
}

}  // namespace colofunc
