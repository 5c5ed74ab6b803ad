// Optimizer updates on the CPU in one pass, by a gradient as wide as the parameter or narrower.
//
// Without contracted products: these loops wait for memory, and one rounding more costs nothing. Operators, formulas and bounds:
// `colofunc/ops/update_narrow.py`, `update_lion.py`.
//
// AdamW and SGD ask by themselves whether they can take their operands, and say so: in Python these questions take as long as the call.

#include "exact.h"

#include "../common.h"
#include "../packed.h"
#include "../rules.h"
#include "numbers.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <type_traits>

namespace colofunc {
namespace {

// Fewest elements of a thread.
constexpr int64_t GRAIN = 32768;
// Elements of a gradient that are widened at a time: they stay in the first-level cache.
constexpr int64_t BLOCK = 1024;

// ---- AdamW by vectors ----

#if COLOFUNC_LEVELS > 1
typedef Vectors<16>::Float Float16;

COLOFUNC_INLINE Float16 root(const Float16& x) {
  float lanes[16];
  store(lanes, x);
  for (float& lane : lanes) lane = std::sqrt(lane);
  return load<Float16>(lanes);
}

COLOFUNC_INLINE Float16 sixteen(const float* from) {
  return load<Float16>(from);
}

// A conversion by the compiler is five instructions in place of one.
COLOFUNC_INLINE Float16 sixteen(const BFloat16* from) {
  typedef uint16_t Halves __attribute__((vector_size(32)));
  Vectors<16>::Int wide;
  asm("vpmovzxwd %1, %0" : "=v"(wide) : "vm"(load<Halves>(from)));
  return reinterpret_cast<Float16>(wide << 16);
}

// Three instructions for which C++ has no operator.
COLOFUNC_INLINE Float16 plus_product(Float16 sum, const Float16& a, const Float16& b) {
  asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
  return sum;
}

COLOFUNC_INLINE Float16 minus_product(Float16 sum, const Float16& a, const Float16& b) {
  asm("vfnmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "vm"(b));
  return sum;
}

COLOFUNC_INLINE Float16 near_inverse_root(const Float16& x) {
  Float16 y;
  asm("vrsqrt14ps %1, %0" : "=v"(y) : "vm"(x));
  return y;
}

// Whether what `multiplied_root` computes with is neither too small for float32's normal numbers nor infinite: x is in [2^-70, infinity).
COLOFUNC_INLINE bool in_reach(const Float16& x) {
  constexpr int32_t LEAST = 0x1c800000, INFINITE = 0x7f800000;
  typedef Vectors<16>::Int Int;
  const Int above = reinterpret_cast<Int>(x) - LEAST, span = Int{} + (INFINITE - LEAST);
  uint32_t out_of_reach;
  asm("vpcmpnltud %2, %1, %%k1\n\tkmovw %%k1, %0" : "=r"(out_of_reach) : "v"(above), "vm"(span) : "k1");
  return out_of_reach == 0;
}

// The bits of `root` for numbers in reach, without the divider.
//
// One step of Newton's takes an inverse root that is right to 14 bits to a root and half an inverse root that are off by a place at
// most; how far the root's square is from x is then exact in float32, and so the last step rounds right. Every mantissa of both kinds of
// exponent is tried (tests/test_update_narrow.py). Source: Markstein, IA-64 and Elementary Functions (2000), chapter 9.
COLOFUNC_INLINE Float16 multiplied_root(const Float16& x) {
  const Float16 half = Float16{} + 0.5f;
  const Float16 inverse = near_inverse_root(x);
  const Float16 near_root = x * inverse, near_half = inverse * half;
  const Float16 error = minus_product(half, near_root, near_half);
  const Float16 nearer = plus_product(near_root, error, near_root), half_inverse = plus_product(near_half, error, near_half);
  return plus_product(nearer, minus_product(x, nearer, nearer), half_inverse);
}

// Vectors that are worked on side by side: as many as there are registers for.
constexpr int BURST = 8;
constexpr int64_t BURST_NUMBERS = 16 * BURST;

// Of so many vectors the root of one is multiplied, which takes what multiplies as long as the divider is busy with the others.
constexpr int ONE_OF = 4;

COLOFUNC_INLINE bool is_multiplied(int vector) {
  return vector % ONE_OF == 1;
}

// Returns how many elements were updated, whole bursts of them. PLAIN: a gradient has neither another sign nor decay.
//
// Roots and quotients take ten cycles each. A loop over single vectors has them wait for the loads and sums in front of them; eight that
// wait for nothing of each other keep the divider busy, and what is read of each operand lies in two lines of the memory's rows.
template <bool PLAIN, class Grad>
COLOFUNC_INLINE int64_t in_bursts(
    const Adam& by, float* __restrict p, const Grad* __restrict g, float* __restrict a, float* __restrict b, int64_t count) {
  int64_t i = 0;
  for (; i + BURST_NUMBERS <= count; i += BURST_NUMBERS) {
    Float16 grad[BURST], first[BURST], second[BURST];
#pragma GCC unroll 8
    for (int v = 0; v < BURST; ++v) {
      const int64_t at = i + 16 * v;
      grad[v] = sixteen(g + at);
      if constexpr (!PLAIN) {
        grad[v] = grad[v] * by.sign;
        if (by.decay != 0.0f) grad[v] = grad[v] + load<Float16>(p + at) * by.decay;
      }
      first[v] = load<Float16>(a + at);
      second[v] = load<Float16>(b + at);
    }
    bool all_in_reach = true;
#pragma GCC unroll 8
    for (int v = 0; v < BURST; ++v) {
      by.follow(grad[v], first[v], second[v]);
      store(a + i + 16 * v, first[v]);
      store(b + i + 16 * v, second[v]);
      if (is_multiplied(v)) all_in_reach &= in_reach(second[v]);
    }
    if (all_in_reach) {
#pragma GCC unroll 8
      for (int v = 0; v < BURST; ++v) second[v] = is_multiplied(v) ? multiplied_root(second[v]) : root(second[v]);
    } else {
#pragma GCC unroll 8
      for (int v = 0; v < BURST; ++v) second[v] = root(second[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < BURST; ++v) {
      const int64_t at = i + 16 * v;
      store(p + at, by.moved(load<Float16>(p + at), first[v], second[v]));
    }
  }
  return i;
}
#endif

// ---- any rule ----

// `first` and `second` are nullptr where a rule has no such state. BURSTS: AdamW with AVX-512.
template <class Rule, class Narrow, bool BURSTS>
struct Update {
  const Rule& rule;
  float *param, *first, *second;
  const Narrow* grad;
  int64_t begin, end;

  template <class Grad>
  COLOFUNC_INLINE void block(float* __restrict p, const Grad* __restrict g, float* __restrict a, float* __restrict b, int64_t count) const {
    const Rule by = rule;
    int64_t i = 0;
#if COLOFUNC_LEVELS > 1
    if constexpr (BURSTS) {
      const bool plain = by.decay == 0.0f && by.sign == 1.0f;
      i = plain ? in_bursts<true>(by, p, g, a, b, count) : in_bursts<false>(by, p, g, a, b, count);
    }
#endif
    for (; i < count; ++i) {
      float one = Rule::states > 0 ? a[i] : 0.0f;
      float two = Rule::states > 1 ? b[i] : 0.0f;
      p[i] = by.next(p[i], widened(g[i]), one, two);
      if constexpr (Rule::states > 0) a[i] = one;
      if constexpr (Rule::states > 1) b[i] = two;
    }
  }

  COLOFUNC_INLINE void operator()() const {
    // Half is widened by a call, which no loop of vector instructions has in it.
    if constexpr (!std::is_same_v<Narrow, Half>) {
      return block(
          param + begin, grad + begin, first == nullptr ? nullptr : first + begin, second == nullptr ? nullptr : second + begin, end - begin);
    }
    float wide[BLOCK];
    for (int64_t at = begin; at < end; at += BLOCK) {
      const int64_t count = std::min(BLOCK, end - at);
      const Narrow* __restrict narrow = grad + at;
      for (int64_t i = 0; i < count; ++i) wide[i] = static_cast<float>(narrow[i]);
      block(param + at, wide, first == nullptr ? nullptr : first + at, second == nullptr ? nullptr : second + at, count);
    }
  }
};

template <class Rule>
void run(const Rule& rule, const Tensor& param, const Tensor& grad, const Tensor* first, const Tensor* second, const char* what) {
  float* p = floats(param, param, what);
  float* a = first == nullptr ? nullptr : floats(*first, param, what);
  float* b = second == nullptr ? nullptr : floats(*second, param, what);
  over_gradient(grad, param, what, [&](const auto* narrow) {
    using Narrow = std::remove_cv_t<std::remove_pointer_t<decltype(narrow)>>;
    torch::stable::parallel_for(0, param.numel(), GRAIN, [&](int64_t begin, int64_t end) {
#if COLOFUNC_LEVELS > 1
      if constexpr (std::is_same_v<Rule, Adam>) {
        if (level() >= 2) return with_avx512(Update<Rule, Narrow, true>{rule, p, a, b, narrow, begin, end});
      }
#endif
      at_best_level(Update<Rule, Narrow, false>{rule, p, a, b, narrow, begin, end});
    });
  });
}

bool is_plain(const Tensor& x, const Tensor& param) {
  return x.is_cpu() && x.is_contiguous() && x.dim() == param.dim() && x.numel() == param.numel() &&
      std::equal(x.sizes().begin(), x.sizes().end(), param.sizes().begin());
}

bool is_state(const Tensor& x, const Tensor& param) {
  return x.scalar_type() == ScalarType::Float && is_plain(x, param);
}

bool is_gradient(const Tensor& x, const Tensor& param) {
  const ScalarType dtype = x.scalar_type();
  const bool known = dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half;
  return known && is_plain(x, param);
}

// A count, a rate or a flag in the memory of the host.
std::optional<double> number(const Tensor& x) {
  if (!x.is_cpu() || x.numel() != 1) return std::nullopt;
  switch (x.scalar_type()) {
    case ScalarType::Float: return *static_cast<const float*>(x.data_ptr());
    case ScalarType::Double: return *static_cast<const double*>(x.data_ptr());
    case ScalarType::Long: return static_cast<double>(*static_cast<const int64_t*>(x.data_ptr()));
    case ScalarType::Bool: return *static_cast<const bool*>(x.data_ptr()) ? 1.0 : 0.0;
    default: return std::nullopt;
  }
}

bool adamw(
    Tensor param, Tensor grad, Tensor exp_avg, Tensor exp_avg_sq, Tensor step, Tensor lr, double beta1, double beta2, double eps,
    double weight_decay, bool decoupled, bool maximize, std::optional<Tensor> finite) {
  const std::optional<double> count = number(step), rate = number(lr), happens = finite ? number(*finite) : 1.0;
  if (!count || !rate || !happens) return false;
  if (!is_state(param, param) || !is_state(exp_avg, param) || !is_state(exp_avg_sq, param) || !is_gradient(grad, param)) return false;
  if (*happens == 0.0) return true;
  const Adam rule(*count, *rate, beta1, beta2, eps, weight_decay, decoupled, maximize);
  run(rule, param, grad, &exp_avg, &exp_avg_sq, "adamw_host_");
  return true;
}

bool sgd(
    Tensor param, Tensor grad, std::optional<Tensor> buffer, Tensor lr, double momentum, double weight_decay, bool nesterov,
    bool maximize, std::optional<Tensor> finite) {
  const std::optional<double> rate = number(lr), happens = finite ? number(*finite) : 1.0;
  if (!rate || !happens) return false;
  if (!is_state(param, param) || (buffer && !is_state(*buffer, param)) || !is_gradient(grad, param)) return false;
  if (*happens == 0.0) return true;
  if (buffer) {
    run(Sgd<true>(*rate, momentum, weight_decay, nesterov, maximize), param, grad, &*buffer, nullptr, "sgd_host_");
  } else {
    run(Sgd<false>(*rate, momentum, weight_decay, nesterov, maximize), param, grad, nullptr, nullptr, "sgd_host_");
  }
  return true;
}

void lion(
    Tensor param, Tensor grad, Tensor exp_avg, double lr, double beta1, double beta2, double weight_decay, bool maximize) {
  run(Lion(lr, beta1, beta2, weight_decay, maximize), param, grad, &exp_avg, nullptr, "lion_host_");
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CPU, m) {
  m.impl("adamw_host_", TORCH_BOX(&colofunc::adamw));
  m.impl("sgd_host_", TORCH_BOX(&colofunc::sgd));
  m.impl("lion_host_", TORCH_BOX(&colofunc::lion));
}
