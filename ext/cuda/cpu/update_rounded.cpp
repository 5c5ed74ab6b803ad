// AdamW of a parameter in bfloat16, whose writes are rounded by a draw, in one pass.
//
// Every operation rounds once, in the order of the reference, whose bits these are: `colofunc/ops/update_rounded.py`.

#include "exact.h"

#include "../common.h"
#include "numbers.h"
#include "rounded.h"
#include "words.h"

#include <algorithm>
#include <cmath>

namespace colofunc {
namespace {

// Fewest elements of a thread.
constexpr int64_t GRAIN = 16384;
// Elements whose words are made at a time: they stay in the first-level cache.
constexpr int64_t BLOCK = 1024;

struct Rounds {
  const RoundedAdam& rule;
  const Places& places;
  BFloat16 *param, *first, *second;
  Gradient grad;
  int64_t begin, end;

  COLOFUNC_INLINE void operator()() const {
    const RoundedAdam by = rule;
    uint64_t words[BLOCK];
    float wide[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
      const int64_t count = std::min(BLOCK, end - at);
      places.words(words, at, count);
      grad.widen(at, count, wide);
      BFloat16* __restrict p = param + at;
      BFloat16* __restrict a = first + at;
      BFloat16* __restrict b = second + at;
      for (int64_t i = 0; i < count; ++i) {
        float mean = widened(a[i]), square = widened(b[i]);
        const float moved = by.next(widened(p[i]), wide[i], mean, square);
        const uint64_t word = words[i];
        p[i] = drawn(moved, static_cast<uint32_t>(word) & 0xFFFF);
        a[i] = drawn(mean, static_cast<uint32_t>(word >> 16) & 0xFFFF);
        b[i] = drawn(square, static_cast<uint32_t>(word >> 32) & 0xFFFF);
      }
    }
  }
};

BFloat16* halves(const Tensor& x, const Tensor& param) {
  check(x, param, "adamw_rounded_host_");
  STD_TORCH_CHECK(
      x.scalar_type() == ScalarType::BFloat16, "adamw_rounded_host_: neither parameter nor states may be other than bfloat16");
  return static_cast<BFloat16*>(x.data_ptr());
}

void adamw_rounded(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, double rate, double root, double keep, double beta1, double beta2,
    double eps, double weight_decay, bool decoupled, bool maximize, int64_t key, Tensor rows, int64_t count,
    int64_t stride) {
  const RoundedAdam rule(rate, root, keep, beta1, beta2, eps, weight_decay, decoupled, maximize);
  const Places places = places_of(key, rows, count, stride, param.numel(), "adamw_rounded_host_");
  BFloat16 *p = halves(param, param), *a = halves(exp_avg, param), *b = halves(exp_avg_sq, param);
  const Gradient narrow = gradient(grad, param, "adamw_rounded_host_");
  torch::stable::parallel_for(0, param.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    at_best_level(Rounds{rule, places, p, a, b, narrow, begin, end});
  });
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CPU, m) {
  m.impl("adamw_rounded_host_", TORCH_BOX(&colofunc::adamw_rounded));
}
