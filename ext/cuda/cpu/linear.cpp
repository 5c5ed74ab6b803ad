// Products with weights in 8 or 4 bits on the CPU: x (m, k) times the transpose of a packed matrix (n, k).
//
// Packed numbers are widened in registers, so the weight is read once and at its packed size. Products are summed in float32.
// Formats, the reference and the bound of the error: `colofunc/ops/quantized.py`.
//
// Widened numbers lie in another order than packed ones (`packed.h`). Not they are put in order but x, once in a call (`pack`), as any
// order of a sum will do.

#include "../common.h"
#include "../packed.h"
#include "../packed_operands.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

namespace colofunc {
namespace {

// Bytes of a line of the cache.
constexpr int64_t LINE = 64;
// Rows of the weight that are worked on at a time.
constexpr int64_t BLOCK_ROWS = 8;
// Bytes of a panel of x, or of a widened block of the weight: half of the smallest first-level cache.
constexpr int64_t PANEL_BYTES = 16384;
// While a row is read, this many rows further on is fetched from memory.
constexpr int64_t ROWS_AHEAD = 2;
// Fewest multiplications of a thread.
constexpr int64_t GRAIN = 1 << 18;

struct Problem {
  int64_t m, n, k;
  const uint8_t* data;
  int64_t data_stride;  // in bytes
  const float* scale;
  int64_t scale_stride;
  bool int4;
  const uint8_t* zero;  // int4 only
  int64_t zero_stride;
  ScalarType dtype;  // of x, bias and out
  const void* x;
  const void* bias;  // or nullptr
  void* out;
};

// ---- formats ----

// One of the two formats in an arithmetic. A unit is a vector of words: UNIT numbers, which become VECTORS vectors.
template <class Arithmetic_, bool INT4_>
struct Packed {
  using Arithmetic = Arithmetic_;
  using Number = typename Arithmetic::Number;
  using Vector = typename Arithmetic::Vector;
  static constexpr bool INT4 = INT4_;
  static constexpr int PER_WORD = INT4 ? 8 : 4;
  static constexpr int64_t UNIT = Arithmetic::LANES * PER_WORD;
  static constexpr int64_t UNIT_BYTES = 4 * Arithmetic::LANES;
  static constexpr int VECTORS = UNIT * sizeof(Number) / sizeof(Vector);
  static constexpr int64_t PER_VECTOR = UNIT / VECTORS;

  static COLOFUNC_INLINE const uint8_t* packed(const Problem& problem, int64_t row, int64_t k) {
    return problem.data + row * problem.data_stride + (INT4 ? k / 2 : k);
  }

  // The unit from column `k` on of a row. Of the last one only what is left is read; x is zero beyond it.
  static COLOFUNC_INLINE void widen(const Problem& problem, int64_t row, int64_t k, Vector* w) {
    const uint8_t* data = packed(problem, row, k);
    if constexpr (INT4) {
      const int64_t group = k / GROUP;
      const float scale = problem.scale[row * problem.scale_stride + group];
      Arithmetic::widen4(data, scale, problem.zero[row * problem.zero_stride + group], w);
    } else if (k + UNIT <= problem.k) {
      Arithmetic::widen8(data, w);
    } else {
      uint8_t rest[UNIT_BYTES] = {};
      std::memcpy(rest, data, problem.k - k);
      Arithmetic::widen8(rest, w);
    }
  }
};

// ---- x ----

// Memory for numbers that are read as whole vectors: these are not to lie in two lines of the cache.
template <class Number>
struct Lines {
  explicit Lines(int64_t count) : bytes(count * sizeof(Number) + LINE) {}
  Number* get() {
    const auto address = reinterpret_cast<uintptr_t>(bytes.data());
    return reinterpret_cast<Number*>((address + LINE - 1) / LINE * LINE);
  }
  std::vector<char> bytes;
};

// How a call is cut: `rows` rows of x, `width` columns, whole units of them, in runs of `run` columns; zeros beyond x itself.
struct Cut {
  int64_t rows, width, run;

  // Where row `row` of the run from column `k` on lies in packed x: all rows of a run lie together.
  int64_t at(int64_t row, int64_t k) const {
    return k * rows + row * length(k);
  }

  int64_t length(int64_t k) const {
    return std::min(run, width - k);
  }
};

// x in the order of the widened weight.
template <class Format, class T>
void pack(const Problem& problem, const Cut& cut, typename Format::Number* packed) {
  using Number = typename Format::Number;
  int place[Format::UNIT];
  for (int j = 0; j < Format::UNIT; ++j) place[j] = Format::Arithmetic::template place<Format::PER_WORD>(j);
  for (int64_t row = 0; row < problem.m; ++row) {
    for (int64_t k = 0; k < problem.k; k += Format::UNIT) {
      const T* from = static_cast<const T*>(problem.x) + row * problem.k + k;
      Number* to = packed + cut.at(row, k / cut.run * cut.run) + k % cut.run;
      const int64_t left = problem.k - k;
      for (int j = 0; j < Format::UNIT; ++j) {
        if (place[j] >= left) continue;
        if constexpr (std::is_same_v<Number, float>) {
          to[j] = static_cast<float>(from[place[j]]);
        } else {
          to[j] = from[place[j]].x;
        }
      }
    }
  }
}

// ---- the product ----

// Rows `begin` to `end` of the weight, in blocks. sums[row of x][row of the block] goes on from one run of columns to the next.
template <class Format, int FEW>
struct Rows {
  using Arithmetic = typename Format::Arithmetic;
  using Float = typename Arithmetic::Float;
  using Vector = typename Format::Vector;
  using Number = typename Format::Number;

  const Problem& problem;
  const Number* x;
  const Cut& cut;
  int64_t begin, end;

  // Rows of the weight that are widened in registers side by side, so that a number of x is read once for both.
  static constexpr int BESIDE = FEW == 8 && Format::VECTORS <= 4 ? 2 : 1;

  // FEW rows of x with N rows of the weight, which are widened in registers.
  template <int N>
  COLOFUNC_INLINE void few(int64_t row, int64_t k, float* sums) const {
    constexpr int CHAINS = std::max(1, std::min(4 / FEW, Format::VECTORS));  // independent sums, as additions take a while
    Float found[N][FEW][CHAINS] = {};
    const Number* from = x + cut.at(0, k);
    const int64_t length = cut.length(k);
    for (int64_t at = 0; at < length; at += Format::UNIT) {
      Vector w[N][Format::VECTORS];
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) {
        Format::widen(problem, row + n, k + at, w[n]);
        __builtin_prefetch(Format::packed(problem, row + n + ROWS_AHEAD, k + at));
      }
#pragma GCC unroll 8
      for (int v = 0; v < Format::VECTORS; ++v) {
#pragma GCC unroll 8
        for (int m = 0; m < FEW; ++m) {
          const Vector numbers = load<Vector>(from + m * length + at + v * Format::PER_VECTOR);
#pragma GCC unroll 2
          for (int n = 0; n < N; ++n) Arithmetic::dot(found[n][m][v % CHAINS], numbers, w[n][v]);
        }
      }
    }
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
#pragma GCC unroll 8
      for (int m = 0; m < FEW; ++m) {
#pragma GCC unroll 4
        for (int c = 1; c < CHAINS; ++c) found[n][m][0] += found[n][m][c];
        sums[m * BLOCK_ROWS + n] += sum(found[n][m][0]);
      }
    }
  }

  // TILE_ROWS rows of x with four rows of a widened block. Meanwhile memory from `ahead` on is fetched, a line in 1 << `shift` steps.
  COLOFUNC_INLINE void tile(
      const Number* from, const Vector* block, int64_t count, const uint8_t* ahead, int shift, float* sums) const {
    constexpr int M = Arithmetic::TILE_ROWS, N = 4;
    Float found[M][N] = {};
    for (int64_t v = 0; v < count; ++v) {
      Vector w[N];
      __builtin_prefetch(ahead + (v >> shift) * LINE, 0, 2);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) w[n] = block[n * count + v];
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const Vector numbers = load<Vector>(from + (m * count + v) * Format::PER_VECTOR);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) Arithmetic::dot(found[m][n], numbers, w[n]);
      }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      float* to = sums + m * BLOCK_ROWS;
      store(to, load<Vectors<4>::Float>(to) + sums_of(found[m]));
    }
  }

  // All rows of x with rows `row` to `row + count` of the weight, the run from column `k` on.
  COLOFUNC_INLINE void many(int64_t row, int64_t count, int64_t k, Vector* block, float* sums) const {
    const int64_t length = cut.length(k), vectors = length / Format::PER_VECTOR;
    for (int64_t n = 0; n < count; ++n) {
      Vector* to = block + n * vectors;
      for (int64_t at = 0; at < length; at += Format::UNIT, to += Format::VECTORS) Format::widen(problem, row + n, k + at, to);
    }
    // The next block is fetched in parts, one beside each tile.
    const bool last = k + length == cut.width;
    const int64_t next_row = last ? row + BLOCK_ROWS : row, next_k = last ? 0 : k + length;
    const int64_t tiles = cut.rows / Arithmetic::TILE_ROWS * 2;
    const int shift = tiles < 8 ? 0 : (tiles < 16 ? 1 : 2);
    const int64_t per_row = std::max<int64_t>(1, length / Format::UNIT * Format::UNIT_BYTES / LINE);
    int64_t line = 0;
    for (int64_t m = 0; m < cut.rows; m += Arithmetic::TILE_ROWS) {
      for (int64_t n = 0; n < count; n += 4) {
        const uint8_t* ahead = Format::packed(problem, next_row + line / per_row, next_k) + line % per_row * LINE;
        tile(x + cut.at(m, k), block + n * vectors, vectors, ahead, shift, sums + m * BLOCK_ROWS + n);
        line += vectors >> shift;
      }
    }
  }

  template <class T>
  COLOFUNC_INLINE void write_as(int64_t row, int64_t count, const float* sums) const {
    const T* bias = static_cast<const T*>(problem.bias);
    float scale[BLOCK_ROWS], added[BLOCK_ROWS];
    for (int64_t n = 0; n < count; ++n) {
      scale[n] = Format::INT4 ? 1.0f : problem.scale[(row + n) * problem.scale_stride];
      added[n] = bias == nullptr ? 0.0f : static_cast<float>(bias[row + n]);
    }
    for (int64_t m = 0; m < problem.m; ++m) {
      T* out = static_cast<T*>(problem.out) + m * problem.n + row;
      for (int64_t n = 0; n < count; ++n) out[n] = static_cast<T>(sums[m * BLOCK_ROWS + n] * scale[n] + added[n]);
    }
  }

  COLOFUNC_INLINE void write(int64_t row, int64_t count, const float* sums) const {
    if (problem.dtype == ScalarType::Float) return write_as<float>(row, count, sums);
    if (problem.dtype == ScalarType::Half) return write_as<Half>(row, count, sums);
    write_as<BFloat16>(row, count, sums);
  }

  COLOFUNC_INLINE void operator()() const {
    alignas(64) Vector block[FEW > 0 ? 1 : PANEL_BYTES / sizeof(Vector)] = {};
    std::vector<float> sums(cut.rows * BLOCK_ROWS);
    for (int64_t row = begin; row < end; row += BLOCK_ROWS) {
      const int64_t count = std::min(BLOCK_ROWS, end - row);
      std::fill(sums.begin(), sums.end(), 0.0f);
      for (int64_t k = 0; k < cut.width; k += cut.run) {
        if constexpr (FEW > 0) {
          int64_t n = 0;
          for (; n + BESIDE <= count; n += BESIDE) few<BESIDE>(row + n, k, sums.data() + n);
          for (; n < count; ++n) few<1>(row + n, k, sums.data() + n);
        } else {
          many(row, count, k, block, sums.data());
        }
      }
      write(row, count, sums.data());
    }
  }
};

int64_t whole(int64_t count, int64_t of) {
  return (count + of - 1) / of * of;
}

template <class Format, int FEW>
void multiply(const Problem& problem) {
  using Number = typename Format::Number;
  constexpr int64_t panel_rows = FEW > 0 ? FEW : BLOCK_ROWS;
  constexpr int64_t run = PANEL_BYTES / static_cast<int64_t>(sizeof(Number)) / panel_rows / Format::UNIT * Format::UNIT;
  const Cut cut{whole(problem.m, FEW > 0 ? FEW : Format::Arithmetic::TILE_ROWS), whole(problem.k, Format::UNIT), run};
  Lines<Number> packed(cut.rows * cut.width);
  if constexpr (std::is_same_v<Number, float>) {
    if (problem.dtype == ScalarType::Float) pack<Format, float>(problem, cut, packed.get());
    if (problem.dtype == ScalarType::Half) pack<Format, Half>(problem, cut, packed.get());
  }
  if (problem.dtype == ScalarType::BFloat16) pack<Format, BFloat16>(problem, cut, packed.get());
  const int64_t blocks = whole(problem.n, BLOCK_ROWS) / BLOCK_ROWS;
  const int64_t grain = std::max<int64_t>(1, GRAIN / (BLOCK_ROWS * cut.rows * cut.width + 1));
  torch::stable::parallel_for(0, blocks, grain, [&](int64_t begin, int64_t end) {
    const Rows<Format, FEW> work{problem, packed.get(), cut, begin * BLOCK_ROWS, std::min(problem.n, end * BLOCK_ROWS)};
#if COLOFUNC_LEVELS > 1
    if constexpr (Format::Arithmetic::LANES == 16) return with_avx512(work);
    if constexpr (Format::Arithmetic::LANES == 8) return with_avx2(work);
#endif
    work();
  });
}

template <class Format>
void by_rows(const Problem& problem) {
  if (problem.m == 1) return multiply<Format, 1>(problem);
  if constexpr (Format::Arithmetic::LANES == 16) {  // where there are registers for more sums
    if (problem.m == 2) return multiply<Format, 2>(problem);
    if (problem.m <= 4) return multiply<Format, 4>(problem);
    if (problem.m <= 8) return multiply<Format, 8>(problem);
  }
  multiply<Format, 0>(problem);
}

template <class Arithmetic>
void by_format(const Problem& problem) {
  if (problem.int4) return by_rows<Packed<Arithmetic, true>>(problem);
  by_rows<Packed<Arithmetic, false>>(problem);
}

void by_level(const Problem& problem) {
#if COLOFUNC_LEVELS > 1
  if (level() == 3 && problem.dtype == ScalarType::BFloat16) return by_format<InPairs>(problem);
  if (level() >= 2) return by_format<InFloat<16>>(problem);
  if (level() == 1) return by_format<InFloat<8>>(problem);
#endif
  by_format<InFloat<4>>(problem);
}

// ---- the operator ----

void packed_linear(
    Tensor out, Tensor x, Tensor data, Tensor scale, std::optional<Tensor> zero, std::optional<Tensor> bias) {
  check_packed(out, x, data, scale, zero, bias);
  if (out.numel() == 0) return;
  const Problem problem{
      x.size(0), data.size(0), x.size(1), static_cast<const uint8_t*>(data.data_ptr()), data.stride(0),
      static_cast<const float*>(scale.data_ptr()), scale.stride(0),
      zero.has_value(), zero ? static_cast<const uint8_t*>(zero->data_ptr()) : nullptr, zero ? zero->stride(0) : 0,
      x.scalar_type(), x.data_ptr(), bias ? bias->data_ptr() : nullptr, out.data_ptr()};
  by_level(problem);
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CPU, m) {
  m.impl("packed_linear_", TORCH_BOX(&colofunc::packed_linear));
}
