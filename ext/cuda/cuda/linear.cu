// Products with weights in 8 or 4 bits on a GPU: few rows of x times the transpose of a packed matrix (n, k).
//
// Memory decides how long this takes: the weight is read once, at its packed size, 16 bytes a lane, and widened in registers. Tensor cores
// multiply: sixteen rows of the weight are one operand, eight rows of x the other, in bfloat16 or float16, and sums are in float32. The
// order of a sum is free, so a lane takes the columns that it has read; nothing goes through shared memory but the sums of warps.
//
//     int8   whole numbers are exact in both types; a row's scale multiplies its sum
//     int4   a number less its group's zero is exact; the group's scale multiplies the sum over its 128 columns
//     x in float32   is three numbers of bfloat16 whose sum it is, exactly: three products
//
// Formats, the reference and the bound of the error: `colofunc/ops/quantized.py`. Layout of operands: PTX ISA, mma.m16n8k16.

#include "launch.h"
#include "numbers.cuh"

namespace colofunc {
namespace {

constexpr int WARPS = 8;
constexpr int THREADS = 32 * WARPS;
// Rows of the weight that a block works on, and of x that one operand holds.
constexpr int TILE_ROWS = 16;
constexpr int X_ROWS = 8;
// Bytes of a row of the weight that a lane reads at a time; four lanes share a row.
constexpr int LANE_BYTES = 16;
// Chunks of the weight that are under way while one is multiplied.
constexpr int AHEAD = 2;
// Numbers that a lane multiplies at a time: two steps of the tensor cores.
constexpr int NUMBERS = 8;

// ---- the types in which tensor cores multiply: two numbers in a word ----

struct InHalf {
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }

  // Two numbers of 4 bits, at bits 0 and 16, less `zero`: 1024 + number has just these bits in its last places.
  static __device__ __forceinline__ uint32_t less(uint32_t numbers, float zero) {
    const uint32_t bits = numbers | 0x64006400;
    const __half2 exact = __hsub2(reinterpret_cast<const __half2&>(bits), __float2half2_rn(1024.0f));
    const __half2 both = __hsub2(exact, __float2half2_rn(zero));
    return reinterpret_cast<const uint32_t&>(both);
  }

  static __device__ __forceinline__ void multiply(float* sums, const uint32_t* w, const uint32_t* x) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]));
  }
};

struct InBfloat16 {
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(both);
  }

  // As above; 128 + number.
  static __device__ __forceinline__ uint32_t less(uint32_t numbers, float zero) {
    const uint32_t bits = numbers | 0x43004300;
    const __nv_bfloat162 exact = __hsub2(reinterpret_cast<const __nv_bfloat162&>(bits), __float2bfloat162_rn(128.0f));
    const __nv_bfloat162 both = __hsub2(exact, __float2bfloat162_rn(zero));
    return reinterpret_cast<const uint32_t&>(both);
  }

  static __device__ __forceinline__ void multiply(float* sums, const uint32_t* w, const uint32_t* x) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(x[0]), "r"(x[1]));
  }
};

// ---- x: eight numbers of a row, as pairs; with `PARTS` terms each, the large ones first ----

template <class T>
struct Rows {
  using Type = InBfloat16;
  static constexpr int PARTS = 1;
};
template <>
struct Rows<__half> {
  using Type = InHalf;
  static constexpr int PARTS = 1;
};
template <>
struct Rows<float> {
  using Type = InBfloat16;
  static constexpr int PARTS = 3;
};

// Numbers from `from` on, of which `count` are there and the others zero.
template <class T>
__device__ __forceinline__ Several<T, NUMBERS> read(const T* from, int64_t count, bool together) {
  Several<T, NUMBERS> found{};
  if (count >= NUMBERS && together) {
    constexpr int WORDS = sizeof(found) / 16;
#pragma unroll
    for (int i = 0; i < WORDS; ++i) reinterpret_cast<uint4*>(&found)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
  } else {
#pragma unroll
    for (int i = 0; i < NUMBERS; ++i) {
      if (i < count) found.values[i] = from[i];
    }
  }
  return found;
}

// What is left of a float32 number behind its first 8 bits. Of one that is not finite nothing is: its first term says all.
__device__ __forceinline__ float first_term(float x) {
  return isfinite(x) ? __uint_as_float(__float_as_uint(x) & 0xFFFF0000) : x;
}

__device__ __forceinline__ float behind(float x, float term) {
  return isfinite(x) ? x - term : 0.0f;
}

// pairs[part][j]: numbers j and j + 4 where `apart`, else 2 j and 2 j + 1.
template <class T, bool apart>
__device__ __forceinline__ void pairs_of(const Several<T, NUMBERS>& x, uint32_t (&pairs)[Rows<T>::PARTS][4]) {
  if constexpr (Rows<T>::PARTS == 1) {  // as they lie in memory, or the low or high halves of two words
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      pairs[0][j] = apart ? __byte_perm(words[j / 2], words[j / 2 + 2], j % 2 == 0 ? 0x5410 : 0x7632) : words[j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float low = x.values[apart ? j : 2 * j], high = x.values[apart ? j + 4 : 2 * j + 1];
#pragma unroll
      for (int part = 0; part < Rows<T>::PARTS; ++part) {
        const float a = first_term(low), b = first_term(high);
        pairs[part][j] = Rows<T>::Type::pair(a, b);
        low = behind(low, a);
        high = behind(high, b);
      }
    }
  }
}

// ---- the weight ----

// Sixteen bytes of a row, of which `count` are there and the others zero.
__device__ __forceinline__ uint4 read_packed(const uint8_t* from, int64_t count, bool together) {
  if (count >= LANE_BYTES && together) return __ldg(reinterpret_cast<const uint4*>(from));
  alignas(16) uint8_t bytes[LANE_BYTES] = {};
#pragma unroll
  for (int i = 0; i < LANE_BYTES; ++i) {
    if (i < count) bytes[i] = from[i];
  }
  return *reinterpret_cast<const uint4*>(bytes);
}

__device__ __forceinline__ uint32_t word(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Eight numbers from number `at` of a lane on, as pairs: of int8 (0, 1), (2, 3), ..., of int4 (0, 4), (1, 5), ...
template <class Type, bool INT4>
__device__ __forceinline__ void pairs_of_weight(const uint4& words, int at, float zero, uint32_t (&pairs)[4]) {
  if constexpr (INT4) {
    const uint32_t numbers = word(words, at / 8);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = Type::less((numbers >> (4 * j)) & 0x000F000F, zero);
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t numbers = word(words, at / 4 + j / 2) >> (j % 2 * 16);
      pairs[j] = Type::pair(static_cast<float>(static_cast<int8_t>(numbers)), static_cast<float>(static_cast<int8_t>(numbers >> 8)));
    }
  }
}

// ---- the product ----

// A block has TILE_ROWS rows of the weight and X_ROWS * OPERANDS rows of x; its warps share the columns.
template <class T, bool INT4, int OPERANDS>
struct Block {
  using Type = typename Rows<T>::Type;
  static constexpr int PARTS = Rows<T>::PARTS;
  static constexpr int PER_BYTE = INT4 ? 2 : 1;
  static constexpr int LANE_COLUMNS = LANE_BYTES * PER_BYTE;
  static constexpr int COLUMNS = 4 * LANE_COLUMNS;  // of a chunk; of int4 a group
  // Small terms of x have sums of their own, whose roundings are small.
  static constexpr int SUMS = PARTS > 1 ? 2 : 1;

  const Product& of;
  int64_t row, x_row;  // the first ones
  int place, quarter;  // a lane has rows `place` and `place` + 8 of the weight, row `place` of x, and a quarter of a chunk's columns
  bool together, x_together;

  __device__ Block(const Product& product)
      : of(product),
        row(static_cast<int64_t>(blockIdx.x) * TILE_ROWS),
        x_row(static_cast<int64_t>(blockIdx.y) * X_ROWS * OPERANDS),
        place(threadIdx.x % 32 / 4),
        quarter(threadIdx.x % 4),
        together(reinterpret_cast<uintptr_t>(product.data) % 16 == 0 && product.data_stride % 16 == 0),
        x_together(reinterpret_cast<uintptr_t>(product.x) % 16 == 0 && product.k * sizeof(T) % 16 == 0) {}

  __device__ __forceinline__ void fetch(int64_t k, uint4 (&words)[2]) const {
    const int64_t at = k / PER_BYTE + quarter * LANE_BYTES;
    const int64_t left = of.k / PER_BYTE - at;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t its = row + place + 8 * half;
      words[half] = read_packed(of.data + its * of.data_stride + at, its < of.n ? left : 0, together);
    }
  }

  // One chunk of the weight with all rows of x.
  __device__ __forceinline__ void multiply(int64_t k, const uint4 (&words)[2], float (&sums)[OPERANDS][4]) const {
    float found[OPERANDS][SUMS][4] = {};
    float zero[2] = {}, scale[2] = {1.0f, 1.0f};
    if constexpr (INT4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t its = row + place + 8 * half;
        if (its >= of.n) continue;
        zero[half] = of.zero[its * of.zero_stride + k / COLUMNS];
        scale[half] = of.scale[its * of.scale_stride + k / COLUMNS];
      }
    }
    const T* x = static_cast<const T*>(of.x) + k + quarter * LANE_COLUMNS;
    const int64_t left = of.k - k - quarter * LANE_COLUMNS;
#pragma unroll
    for (int at = 0; at < LANE_COLUMNS; at += NUMBERS) {
      uint32_t low[4], high[4];
      pairs_of_weight<Type, INT4>(words[0], at, zero[0], low);
      pairs_of_weight<Type, INT4>(words[1], at, zero[1], high);
#pragma unroll
      for (int o = 0; o < OPERANDS; ++o) {
        const int64_t its = x_row + o * X_ROWS + place;
        uint32_t pairs[PARTS][4];
        pairs_of<T, INT4>(read(x + its * of.k + at, its < of.m ? left - at : 0, x_together), pairs);
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          const uint32_t w[4] = {low[2 * step], high[2 * step], low[2 * step + 1], high[2 * step + 1]};
#pragma unroll
          for (int part = 0; part < PARTS; ++part) Type::multiply(found[o][part == 0 ? 0 : 1], w, pairs[part] + 2 * step);
        }
      }
    }
#pragma unroll
    for (int o = 0; o < OPERANDS; ++o) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float sum = found[o][0][j];
        if constexpr (SUMS > 1) sum += found[o][1][j];
        sums[o][j] += sum * scale[j / 2];
      }
    }
  }

  // What all warps have found, one number of the result for each of the first threads.
  __device__ __forceinline__ void write(const float (&sums)[OPERANDS][4]) const {
    __shared__ float shared[WARPS][OPERANDS * 4][32];
#pragma unroll
    for (int j = 0; j < OPERANDS * 4; ++j) shared[threadIdx.x / 32][j][threadIdx.x % 32] = sums[j / 4][j % 4];
    __syncthreads();
    const int j = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (j >= OPERANDS * 4) return;
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) sum += shared[warp][j][lane];
    const int64_t n = row + lane / 4 + (j % 4 >= 2 ? 8 : 0);
    const int64_t m = x_row + j / 4 * X_ROWS + lane % 4 * 2 + j % 2;
    if (n >= of.n || m >= of.m) return;
    const float scale = INT4 ? 1.0f : of.scale[n * of.scale_stride];
    const float bias = of.bias == nullptr ? 0.0f : widened(static_cast<const T*>(of.bias)[n]);
    static_cast<T*>(of.out)[m * of.n + n] = rounded<T>(sum * scale + bias);
  }

  __device__ __forceinline__ void run() const {
    constexpr int64_t STEP = static_cast<int64_t>(WARPS) * COLUMNS;
    float sums[OPERANDS][4] = {};
    uint4 words[AHEAD][2];
    const int64_t begin = static_cast<int64_t>(threadIdx.x / 32) * COLUMNS;
#pragma unroll
    for (int ahead = 0; ahead < AHEAD; ++ahead) {
      if (begin + ahead * STEP < of.k) fetch(begin + ahead * STEP, words[ahead]);
    }
    for (int64_t k = begin; k < of.k;) {
#pragma unroll
      for (int ahead = 0; ahead < AHEAD; ++ahead) {
        if (k >= of.k) break;
        const uint4 now[2] = {words[ahead][0], words[ahead][1]};
        if (k + AHEAD * STEP < of.k) fetch(k + AHEAD * STEP, words[ahead]);
        multiply(k, now, sums);
        k += STEP;
      }
    }
    write(sums);
  }
};

static_assert(X_ROWS * 2 * TILE_ROWS <= THREADS, "a thread writes one number of the result");

template <class T, bool INT4, int OPERANDS>
__global__ void __launch_bounds__(THREADS) multiply(const Product product) {
  Block<T, INT4, OPERANDS>(product).run();
}

template <class T, bool INT4>
cudaError_t start(const Product& of, cudaStream_t stream) {
  constexpr int64_t MOST = 65535;  // blocks along y
  const int64_t tiles = (of.n + TILE_ROWS - 1) / TILE_ROWS;
  if (of.m <= X_ROWS) {
    multiply<T, INT4, 1><<<static_cast<unsigned>(tiles), THREADS, 0, stream>>>(of);
    return cudaGetLastError();
  }
  // A warp's operand that is 0 beyond x costs nothing that memory does not hide.
  const int64_t rows = 2 * X_ROWS;
  for (int64_t first = 0; first < of.m; first += rows * MOST) {
    Product some = of;
    some.m = of.m - first < rows * MOST ? of.m - first : rows * MOST;
    some.x = static_cast<const T*>(of.x) + first * of.k;
    some.out = static_cast<T*>(of.out) + first * of.n;
    const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>((some.m + rows - 1) / rows));
    multiply<T, INT4, 2><<<grid, THREADS, 0, stream>>>(some);
    if (const cudaError_t error = cudaGetLastError()) return error;
  }
  return cudaSuccess;
}

}  // namespace

cudaError_t packed_linear(const Product& product, cudaStream_t stream) {
  if (product.m == 0 || product.n == 0) return cudaSuccess;
  return by_kind(product.kind, [&](auto number) {
    using T = decltype(number);
    return product.zero == nullptr ? start<T, false>(product, stream) : start<T, true>(product, stream);
  });
}

}  // namespace colofunc
