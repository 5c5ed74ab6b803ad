// The rules of updates: what one element of a parameter and its states becomes. Shared by the CPU's kernels and the GPU's.
//
// Every operation rounds once: who includes this compiles without contracting products with sums. Formulas and bounds:
// `colofunc/ops/update_narrow.py`, `update_lamb.py`, `update_lion.py`.

#pragma once

#include <cmath>

#if defined(__CUDACC__)
#define COLOFUNC_RULE __host__ __device__ __forceinline__
#else
#define COLOFUNC_RULE inline __attribute__((always_inline))
#endif

namespace colofunc {

// A `Number` is one element, or a vector of them.
struct Adam {
  static constexpr int states = 2;
  float sign, decay, keep, toward_first, keep_second, toward_second, rate, inverse_root, eps;

  COLOFUNC_RULE Adam(double step, double lr, double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize)
      : sign(maximize ? -1.0f : 1.0f),
        decay(decoupled ? 0.0 : weight_decay),
        keep(decoupled ? 1.0 - lr * weight_decay : 1.0),
        toward_first(1.0 - beta1),
        keep_second(beta2),
        toward_second(1.0 - beta2),
        rate(lr / (1.0 - std::pow(beta1, step))),
        inverse_root(1.0 / std::sqrt(1.0 - std::pow(beta2, step))),
        eps(eps) {}

  // g: with the sign and, where it is no product with zero, with decay. A parameter that is infinite is no gradient.
  template <class Number>
  COLOFUNC_RULE void follow(const Number& g, Number& first, Number& second) const {
    first = first + (g - first) * toward_first;
    second = second * keep_second + toward_second * g * g;
  }

  template <class Number>
  COLOFUNC_RULE Number moved(const Number& param, const Number& first, const Number& root_of_second) const {
    return param * keep - rate * first / (root_of_second * inverse_root + eps);
  }

  COLOFUNC_RULE float next(float param, float grad, float& first, float& second) const {
    follow(decay == 0.0f ? grad * sign : grad * sign + param * decay, first, second);
    return moved(param, first, std::sqrt(second));
  }
};

// The direction of LAMB, not the parameter: that of a step of AdamW at a rate of -1 from zero, and decay.
struct Lamb {
  static constexpr int states = 2;
  Adam adam;
  float decay;

  COLOFUNC_RULE Lamb(double step, double beta1, double beta2, double eps, double weight_decay, bool maximize)
      : adam(step, -1.0, beta1, beta2, eps, 0.0, true, maximize), decay(weight_decay) {}

  COLOFUNC_RULE float next(float param, float grad, float& first, float& second) const {
    const float way = adam.next(0.0f, grad, first, second);
    // Not a product with zero: a parameter that is infinite is no direction.
    return decay == 0.0f ? way : way + param * decay;
  }
};

template <bool has_buffer>
struct Sgd {
  static constexpr int states = has_buffer ? 1 : 0;
  float sign, decay, momentum, rate;
  bool nesterov;

  COLOFUNC_RULE Sgd(double lr, double momentum, double weight_decay, bool nesterov, bool maximize)
      : sign(maximize ? -1.0f : 1.0f), decay(weight_decay), momentum(momentum), rate(lr), nesterov(nesterov) {}

  COLOFUNC_RULE float next(float param, float grad, float& buffer, float&) const {
    const float g = decay == 0.0f ? grad * sign : grad * sign + param * decay;
    if constexpr (!has_buffer) return param - rate * g;
    buffer = buffer * momentum + g;
    return param - rate * (nesterov ? g + buffer * momentum : buffer);
  }
};

struct Lion {
  static constexpr int states = 1;
  float sign, keep, keep_toward, toward, keep_mean, mean, rate;

  COLOFUNC_RULE Lion(double lr, double beta1, double beta2, double weight_decay, bool maximize)
      : sign(maximize ? -1.0f : 1.0f),
        keep(1.0 - lr * weight_decay),
        keep_toward(beta1),
        toward(1.0 - beta1),
        keep_mean(beta2),
        mean(1.0 - beta2),
        rate(lr) {}

  COLOFUNC_RULE float next(float param, float grad, float& average, float&) const {
    const float g = grad * sign;
    const float way = average * keep_toward + g * toward;
    average = average * keep_mean + g * mean;
    // Numbers, not members: a choice between loads would be a branch.
    const float up = rate, down = -rate;
    // 0 and NaN as they are: a parameter that stood still at NaN would hide it.
    float step = way > 0.0f ? up : way;
    step = way < 0.0f ? down : step;
    return param * keep - step;
  }
};

}  // namespace colofunc
