// Experts on a GPU: choices sorted by expert, and what experts gave summed for each token.
//
// Sorting is counting: warps count the experts of a tile of choices each, prefix sums over tiles say where the tile's first choice of an
// expert stands, and warps deal their tile out, in order. Sums are gathered: a block of threads has a token, finds its choices, puts them
// in the order of experts and adds their rows; nothing is written twice and the order is always the same.

#include "launch.h"
#include "numbers.cuh"

namespace colofunc {
namespace {

constexpr int WARP = 32;
constexpr unsigned ALL = 0xFFFFFFFF;
// Choices of a warp.
constexpr int64_t TILE = 256;

__device__ __forceinline__ int expert_of(const Choices& of, int64_t choice) {
  const int64_t given =
      of.wide ? static_cast<const int64_t*>(of.index)[choice] : static_cast<const int32_t*>(of.index)[choice];
  return given >= 0 && given < of.experts ? static_cast<int>(given) : of.experts;  // the last is nobody
}

__device__ __forceinline__ int64_t lesser(int64_t a, int64_t b) {
  return a < b ? a : b;
}

// Of each expert, counts of all tiles and then their sum lie side by side.
__device__ __forceinline__ int& count_of(const Choices& of, int expert, int64_t tile, int64_t tiles) {
  return of.counts[expert * (tiles + 1) + tile];
}

// One tile: counts[expert][tile].
__global__ void count(const Choices of, int64_t tiles) {
  extern __shared__ int counted[];
  for (int expert = threadIdx.x; expert <= of.experts; expert += WARP) counted[expert] = 0;
  __syncwarp();
  const int64_t begin = blockIdx.x * TILE, end = lesser(begin + TILE, of.count);
  for (int64_t choice = begin + threadIdx.x; choice < end; choice += WARP) atomicAdd(&counted[expert_of(of, choice)], 1);
  __syncwarp();
  for (int expert = threadIdx.x; expert <= of.experts; expert += WARP) count_of(of, expert, blockIdx.x, tiles) = counted[expert];
}

__device__ __forceinline__ int sum_up_to(int number) {
#pragma unroll
  for (int step = 1; step < WARP; step *= 2) {
    const int before = __shfl_up_sync(ALL, number, step);
    if (threadIdx.x >= step) number += before;
  }
  return number;
}

// One expert: a tile's count becomes the sum of those of the tiles before it, and behind the last one stands that of all.
__global__ void add_up(const Choices of, int64_t tiles) {
  int before = 0;
  for (int64_t first = 0; first < tiles; first += WARP) {
    const int64_t tile = first + threadIdx.x;
    const int own = tile < tiles ? count_of(of, blockIdx.x, tile, tiles) : 0;
    const int with = sum_up_to(own);
    if (tile < tiles) count_of(of, blockIdx.x, tile, tiles) = before + with - own;
    before += __shfl_sync(ALL, with, WARP - 1);
  }
  if (threadIdx.x == 0) count_of(of, blockIdx.x, tiles, tiles) = before;
}

// One tile: places of its choices.
__global__ void deal(const Choices of, int64_t tiles) {
  extern __shared__ int next[];  // of each expert, the place of this tile's next choice
  int before = 0;
  for (int first = 0; first <= of.experts; first += WARP) {
    const int expert = first + threadIdx.x;
    const int own = expert <= of.experts ? count_of(of, expert, tiles, tiles) : 0;
    const int with = sum_up_to(own);
    if (expert <= of.experts) next[expert] = before + with - own + count_of(of, expert, blockIdx.x, tiles);
    if (expert < of.experts && blockIdx.x == 0) of.ends[expert] = before + with;
    before += __shfl_sync(ALL, with, WARP - 1);
  }
  __syncwarp();
  const int64_t begin = blockIdx.x * TILE, end = lesser(begin + TILE, of.count);
  for (int64_t first = begin; first < end; first += WARP) {
    const int64_t choice = first + threadIdx.x;
    const bool is_one = choice < end;
    const int expert = is_one ? expert_of(of, choice) : -1;
    const unsigned alike = __match_any_sync(ALL, expert);
    const int rank = __popc(alike & ((1u << threadIdx.x) - 1));
    const int place = is_one ? next[expert] + rank : 0;
    __syncwarp();
    if (is_one) {
      if (rank == 0) next[expert] += __popc(alike);
      of.order[place] = choice;
      of.key[place] = expert;
      of.place[choice] = expert < of.experts ? place : -1;
    }
    __syncwarp();
  }
}

// ---- sums over choices ----

constexpr int THREADS = 256;
// Elements of a thread at a time.
constexpr int PER_THREAD = 4;
// Choices of a token that are put in order at a time.
constexpr int MOST_CHOICES = 64;

__device__ __forceinline__ float weight_of(const Sums& of, int64_t choice) {
  switch (of.weight_kind) {
    case Kind::FLOAT: return static_cast<const float*>(of.weight)[choice];
    case Kind::HALF: return widened(static_cast<const __half*>(of.weight)[choice]);
    default: return widened(static_cast<const __nv_bfloat16*>(of.weight)[choice]);
  }
}

// Elements i * COUNT and the COUNT - 1 behind it of a token.
template <int COUNT, class T>
__device__ __forceinline__ void add(const Sums& of, const int64_t* rows, const float* weights, int found, int64_t i) {
  auto* total = reinterpret_cast<Several<float, COUNT>*>(of.total + blockIdx.x * of.d) + i;
  Several<float, COUNT> sum = *total;
#pragma unroll 4
  for (int j = 0; j < found; ++j) {
    const auto row = reinterpret_cast<const Several<T, COUNT>*>(static_cast<const T*>(of.rows) + rows[j] * of.d)[i];
#pragma unroll
    for (int c = 0; c < COUNT; ++c) {
      // Not a product with one: it is the same, but of numbers that are not finite.
      const float number = widened(row.values[c]);
      sum.values[c] += of.weight == nullptr ? number : number * weights[j];
    }
  }
  *total = sum;
}

// One token.
template <int COUNT, class T>
__global__ void __launch_bounds__(THREADS) add_token(const Sums of) {
  __shared__ int64_t places[MOST_CHOICES], rows[MOST_CHOICES];
  __shared__ float weights[MOST_CHOICES];
  const int64_t first_choice = static_cast<int64_t>(blockIdx.x) * of.k;
  if (threadIdx.x < of.k) {
    const int64_t row = of.place[first_choice + threadIdx.x] - of.first;
    places[threadIdx.x] = row >= 0 && row < of.s ? row : -1;
  }
  __syncthreads();
  int found = 0;
  for (int j = 0; j < of.k; ++j) found += places[j] >= 0;
  if (threadIdx.x < of.k && places[threadIdx.x] >= 0) {
    int rank = 0;
    for (int j = 0; j < of.k; ++j) rank += places[j] >= 0 && places[j] < places[threadIdx.x];
    rows[rank] = places[threadIdx.x];
    weights[rank] = of.weight == nullptr ? 1.0f : weight_of(of, first_choice + threadIdx.x);
  }
  __syncthreads();
  if (found == 0) return;
  for (int64_t i = threadIdx.x; i < of.d / COUNT; i += THREADS) add<COUNT, T>(of, rows, weights, found, i);
}

}  // namespace

cudaError_t loaded() {
  cudaFuncAttributes found;
  return cudaFuncGetAttributes(&found, count);
}

int64_t tiles_of_choices(int64_t count) {
  return (count + TILE - 1) / TILE;
}

cudaError_t sort_choices(const Choices& choices, cudaStream_t stream) {
  const int64_t tiles = tiles_of_choices(choices.count);
  if (tiles == 0) return cudaMemsetAsync(choices.ends, 0, choices.experts * sizeof(int64_t), stream);
  const auto blocks = static_cast<unsigned>(tiles);
  const size_t shared = (choices.experts + 1) * sizeof(int);
  count<<<blocks, WARP, shared, stream>>>(choices, tiles);
  add_up<<<choices.experts + 1, WARP, 0, stream>>>(choices, tiles);
  deal<<<blocks, WARP, shared, stream>>>(choices, tiles);
  return cudaGetLastError();
}

cudaError_t add_choices(const Sums& sums, cudaStream_t stream) {
  if (sums.tokens == 0 || sums.d == 0 || sums.s == 0 || sums.k == 0) return cudaSuccess;
  if (sums.k > MOST_CHOICES) return cudaErrorInvalidValue;
  return by_kind(sums.kind, [&](auto number) {
    using T = decltype(number);
    const bool together = sums.d % PER_THREAD == 0 && aligned(sums.total, 16) && aligned(sums.rows, PER_THREAD * sizeof(T));
    const auto blocks = static_cast<unsigned>(sums.tokens);
    if (together) {
      add_token<PER_THREAD, T><<<blocks, THREADS, 0, stream>>>(sums);
    } else {
      add_token<1, T><<<blocks, THREADS, 0, stream>>>(sums);
    }
    return cudaGetLastError();
  });
}

}  // namespace colofunc
