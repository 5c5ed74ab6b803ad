// Updates on a GPU by a gradient narrower than the parameter, Lion's and LAMB's direction by any: one pass that reads and writes everything once.
//
// A rate and a count of steps that lie on the device are read there, so the host waits for nothing. Rules: `rules.h`; this file is
// compiled without contracting products with sums, so that the bits are those of the CPU's kernel for the same rate.

#include <new>

#include "../rules.h"
#include "launch.h"
#include "numbers.cuh"

namespace colofunc {
namespace {

constexpr int THREADS = 256;
// Elements of a thread at a time, 16 bytes of the parameter.
constexpr int PER_THREAD = 4;
constexpr int BLOCKS_PER_MULTIPROCESSOR = 8;

__device__ double number(const Number& given) {
  if (given.at == nullptr) return given.value;
  switch (given.format) {
    case Number::FLOAT: return *static_cast<const float*>(given.at);
    case Number::DOUBLE: return *static_cast<const double*>(given.at);
    default: return static_cast<double>(*static_cast<const int64_t*>(given.at));
  }
}

// ---- a rule, of numbers that the host knows and numbers that it does not ----

struct MakeAdam {
  using Rule = Adam;
  double beta1, beta2, eps, weight_decay;
  bool decoupled, maximize;
  __device__ Rule operator()(double step, double lr) const {
    return Rule(step, lr, beta1, beta2, eps, weight_decay, decoupled, maximize);
  }
};

template <bool has_buffer>
struct MakeSgd {
  using Rule = Sgd<has_buffer>;
  double momentum, weight_decay;
  bool nesterov, maximize;
  __device__ Rule operator()(double, double lr) const {
    return Rule(lr, momentum, weight_decay, nesterov, maximize);
  }
};

struct MakeLamb {
  using Rule = Lamb;
  double beta1, beta2, eps, weight_decay;
  bool maximize;
  __device__ Rule operator()(double step, double) const {
    return Rule(step, beta1, beta2, eps, weight_decay, maximize);
  }
};

struct MakeLion {
  using Rule = Lion;
  double beta1, beta2, weight_decay;
  bool maximize;
  __device__ Rule operator()(double, double lr) const {
    return Rule(lr, beta1, beta2, weight_decay, maximize);
  }
};

// ---- the pass ----

// Elements i * COUNT and the COUNT - 1 behind it.
template <int COUNT, class Rule, class Narrow>
__device__ __forceinline__ void move(const Rule& rule, const Operands& of, int64_t i) {
  using Wide = Several<float, COUNT>;
  Wide p = reinterpret_cast<const Wide*>(of.param)[i], a{}, b{};
  const auto g = static_cast<const Several<Narrow, COUNT>*>(of.grad)[i];
  if constexpr (Rule::states > 0) a = reinterpret_cast<const Wide*>(of.first)[i];
  if constexpr (Rule::states > 1) b = reinterpret_cast<const Wide*>(of.second)[i];
#pragma unroll
  for (int j = 0; j < COUNT; ++j) p.values[j] = rule.next(p.values[j], widened(g.values[j]), a.values[j], b.values[j]);
  reinterpret_cast<Wide*>(of.out)[i] = p;
  if constexpr (Rule::states > 0) reinterpret_cast<Wide*>(of.first)[i] = a;
  if constexpr (Rule::states > 1) reinterpret_cast<Wide*>(of.second)[i] = b;
}

template <int COUNT, class Make, class Narrow>
__global__ void __launch_bounds__(THREADS) pass(const Make make, const Operands of) {
  using Rule = typename Make::Rule;
  __shared__ alignas(Rule) unsigned char shared[sizeof(Rule)];
  if (of.finite != nullptr && !*of.finite) return;
  // Powers in float64 are dear: one thread of a block works them out.
  if (threadIdx.x == 0) new (shared) Rule(make(number(of.step), number(of.lr)));
  __syncthreads();
  const Rule rule = *reinterpret_cast<const Rule*>(shared);
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * THREADS + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * THREADS;
  for (int64_t i = begin; i < of.count / COUNT; i += step) move<COUNT, Rule, Narrow>(rule, of, i);
  if (COUNT > 1 && begin < of.count % COUNT) move<1, Rule, Narrow>(rule, of, of.count / COUNT * COUNT + begin);
}

template <class Make>
cudaError_t start(const Make& make, const Operands& of, cudaStream_t stream) {
  if (of.count == 0) return cudaSuccess;
  int processors = 0;
  if (const cudaError_t error = multiprocessors(&processors)) return error;
  const int64_t wanted = (of.count / PER_THREAD + THREADS - 1) / THREADS + 1;
  const int64_t most = static_cast<int64_t>(processors) * BLOCKS_PER_MULTIPROCESSOR;
  const auto blocks = static_cast<unsigned>(wanted < most ? wanted : most);
  return by_kind(of.kind, [&](auto narrow) {
    using Narrow = decltype(narrow);
    const bool together = aligned(of.param, 16) && aligned(of.out, 16) && aligned(of.first, 16) && aligned(of.second, 16) &&
        aligned(of.grad, PER_THREAD * sizeof(Narrow));
    if (together) {
      pass<PER_THREAD, Make, Narrow><<<blocks, THREADS, 0, stream>>>(make, of);
    } else {
      pass<1, Make, Narrow><<<blocks, THREADS, 0, stream>>>(make, of);
    }
    return cudaGetLastError();
  });
}

}  // namespace

cudaError_t update_adamw(
    const Operands& operands, double beta1, double beta2, double eps, double weight_decay, bool decoupled, bool maximize,
    cudaStream_t stream) {
  return start(MakeAdam{beta1, beta2, eps, weight_decay, decoupled, maximize}, operands, stream);
}

cudaError_t update_sgd(
    const Operands& operands, double momentum, double weight_decay, bool nesterov, bool maximize, cudaStream_t stream) {
  if (operands.first == nullptr) return start(MakeSgd<false>{momentum, weight_decay, nesterov, maximize}, operands, stream);
  return start(MakeSgd<true>{momentum, weight_decay, nesterov, maximize}, operands, stream);
}

cudaError_t update_lamb(
    const Operands& operands, double beta1, double beta2, double eps, double weight_decay, bool maximize, cudaStream_t stream) {
  return start(MakeLamb{beta1, beta2, eps, weight_decay, maximize}, operands, stream);
}

cudaError_t update_lion(
    const Operands& operands, double beta1, double beta2, double weight_decay, bool maximize, cudaStream_t stream) {
  return start(MakeLion{beta1, beta2, weight_decay, maximize}, operands, stream);
}

}  // namespace colofunc
