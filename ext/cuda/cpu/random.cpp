// Random numbers and dropout on the CPU: every element computes its own number from (key, index).
//
// The numbers are those of `colofunc/ops/draws.py`: bits, uniform and Bernoulli draws bit for bit. Normal numbers use
// Wichura's algorithm in float64, whose relative error of 1e-16 vanishes in float32.
// Source: Wichura, Algorithm AS 241 (1988), PPND16.

#include "words.h"

#include <cmath>
#include <cstring>
#include <optional>
#include <vector>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "eight Bernoulli draws are the bytes of one word, lowest first"
#endif

namespace colofunc {
namespace {

// Sets the stream of the further bits of a Bernoulli draw apart from that of the words.
constexpr uint64_t SECOND = 0xD1B54A32D192ED03;
// Elements that are worked on at a time: their words stay in the first-level cache.
constexpr int64_t BLOCK = 1024;
// Fewest elements of a thread.
constexpr int64_t GRAIN = 32768;

enum Kind : int64_t { BITS, UNIFORM, NORMAL, KEEP };

// One call, as `colofunc/ops/random_kernels.py` describes it: atoms are (count, stride in the global index, stride in x), major
// first in the order of the result's memory. With `rows` and `columns` element (r, c) has the index rows[r] + columns[c].
struct Draw {
  uint64_t key;
  int64_t first;
  std::vector<int64_t> sizes, strides, x_strides;
  const int64_t* rows = nullptr;
  const int64_t* columns = nullptr;
  int byte = 0;
  int64_t bound = 0;
  bool ties = false;
  double scale = 1.0;
};

// ---- where elements lie ----

// A run of elements that lie side by side in the result: its first position, index and place in x.
struct Run {
  int64_t position, index, at, count;
};

// Calls visit(run) for positions begin to end, in runs of at most BLOCK elements along the last atom.
template <class Visit>
COLOFUNC_INLINE void walk(const Draw& draw, int64_t begin, int64_t end, const Visit& visit) {
  const int64_t inner = draw.sizes.back();
  for (int64_t position = begin; position < end;) {
    const int64_t column = position % inner;
    const int64_t count = std::min({inner - column, end - position, BLOCK});
    int64_t index = draw.first + column * draw.strides.back();
    int64_t at = column * draw.x_strides.back();
    int64_t rest = position / inner;
    for (size_t k = draw.sizes.size() - 1; k-- > 0;) {
      const int64_t coordinate = rest % draw.sizes[k];
      rest /= draw.sizes[k];
      index += coordinate * draw.strides[k];
      at += coordinate * draw.x_strides[k];
    }
    visit(Run{position, index, at, count});
    position += count;
  }
}

// ---- numbers: one word for one element ----

// A whole number below 2^52 as a double. Instruction sets before AVX-512 have no such conversion for vectors.
COLOFUNC_INLINE double exact(uint64_t number) {
  return __builtin_bit_cast(double, number | 0x4330000000000000) - 0x1p52;
}

template <class Out>
struct Uniform {
  static constexpr int bits = 24;
};
template <>
struct Uniform<double> {
  static constexpr int bits = 53;
};
template <>
struct Uniform<Half> {
  static constexpr int bits = 11;
};
template <>
struct Uniform<BFloat16> {
  static constexpr int bits = 8;
};

template <class Out>
COLOFUNC_INLINE void write_uniform(const uint64_t* __restrict words, Out* __restrict out, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    if constexpr (Uniform<Out>::bits == 53) {
      out[j] = (exact(words[j] >> 32) * 0x1p21 + exact((words[j] >> 11) & 0x1FFFFF)) * 0x1p-53;
    } else {
      const auto number = static_cast<int32_t>(words[j] >> (64 - Uniform<Out>::bits));
      constexpr float unit = 1.0f / (1 << Uniform<Out>::bits);
      out[j] = static_cast<Out>(static_cast<float>(number) * unit);
    }
  }
}

// ---- normal numbers ----

// Coefficients of quotients of polynomials, highest power first, for the centre, the tails and the far tails.
constexpr double CENTRE[2][8] = {
    {2509.0809287301227, 33430.57558358813, 67265.7709270087, 45921.95393154987, 13731.69376550946, 1971.5909503065513,
     133.14166789178438, 3.3871328727963665},
    {5226.495278852854, 28729.085735721943, 39307.89580009271, 21213.794301586597, 5394.196021424751, 687.1870074920579,
     42.31333070160091, 1.0}};
constexpr double TAIL[2][8] = {
    {0.0007745450142783414, 0.022723844989269184, 0.2417807251774506, 1.2704582524523684, 3.6478483247632045,
     5.769497221460691, 4.630337846156546, 1.4234371107496835},
    {1.0507500716444169e-09, 0.0005475938084995345, 0.015198666563616457, 0.14810397642748008, 0.6897673349851,
     1.6763848301838038, 2.053191626637759, 1.0}};
constexpr double FAR_TAIL[2][8] = {
    {2.0103343992922881e-07, 2.7115555687434876e-05, 0.0012426609473880784, 0.026532189526576124, 0.29656057182850487,
     1.7848265399172913, 5.463784911164114, 6.657904643501103},
    {2.0442631033899397e-15, 1.421511758316446e-07, 1.8463183175100548e-05, 0.0007868691311456133, 0.014875361290850615,
     0.1369298809227358, 0.599832206555888, 1.0}};

// log(t) for a normal t below 1: t = 2^k m with m within sqrt(1/2) and sqrt(2), and log(m) = 2 atanh((m - 1) / (m + 1)), whose series
// needs eleven terms for a relative error of 1e-17.
COLOFUNC_INLINE double log_below_one(double t) {
  constexpr uint64_t root_half = 0x3FE6A09E667F3BCD;
  constexpr uint64_t bias = 1024;
  const uint64_t bits = __builtin_bit_cast(uint64_t, t);
  const uint64_t biased = (bits - root_half + (bias << 52)) >> 52;
  const double m = __builtin_bit_cast(double, bits - ((biased - bias) << 52));
  const double s = (m - 1.0) / (m + 1.0);
  const double z = s * s;
  double series = 1.0 / 21.0;
  for (int k = 9; k >= 0; --k) series = series * z + 1.0 / (2 * k + 1);
  return (exact(biased) - bias) * 0.6931471805599453 + 2.0 * s * series;
}

COLOFUNC_INLINE double centre(double q) {
  const double r = 0.180625 - q * q;
  double above = CENTRE[0][0], below = CENTRE[1][0];
  for (int k = 1; k < 8; ++k) {
    above = above * r + CENTRE[0][k];
    below = below * r + CENTRE[1][k];
  }
  return q * above / below;
}

COLOFUNC_INLINE double tail(double q) {
  const double far = std::sqrt(-log_below_one(0.5 - std::fabs(q)));
  const bool near = far <= 5.0;
  const double r = far - (near ? 1.6 : 5.0);
  double above = near ? TAIL[0][0] : FAR_TAIL[0][0], below = near ? TAIL[1][0] : FAR_TAIL[1][0];
  for (int k = 1; k < 8; ++k) {
    above = above * r + (near ? TAIL[0][k] : FAR_TAIL[0][k]);
    below = below * r + (near ? TAIL[1][k] : FAR_TAIL[1][k]);
  }
  return std::copysign(above / below, q);
}

// Half precision is rounded from float32, as torch does.
template <class Out>
COLOFUNC_INLINE Out rounded(double number) {
  if constexpr (std::is_same_v<Out, double>) return number;
  return static_cast<Out>(static_cast<float>(number));
}

// The inverse distribution function at 1/2 + q, where q is an odd multiple of 2^-53. The tails, 15 of 100 elements, need a logarithm:
// they are gathered and computed by themselves.
template <class Out>
COLOFUNC_INLINE void write_normal(const uint64_t* __restrict words, Out* __restrict out, int64_t count) {
  double q[BLOCK];
  double outside[BLOCK];
  int32_t place[BLOCK];
  for (int64_t j = 0; j < count; ++j) {
    q[j] = (exact(words[j] >> 12) - (0x1p51 - 0.5)) * 0x1p-52;
    out[j] = rounded<Out>(centre(q[j]));
  }
  int64_t tails = 0;
  for (int64_t j = 0; j < count; ++j) {
    place[tails] = static_cast<int32_t>(j);
    outside[tails] = q[j];
    tails += std::fabs(q[j]) > 0.425;
  }
  for (int64_t j = 0; j < tails; ++j) outside[j] = tail(outside[j]);
  for (int64_t j = 0; j < tails; ++j) out[place[j]] = rounded<Out>(outside[j]);
}

template <class Out>
struct FillNumbers {
  const Draw& draw;
  Kind kind;
  Out* out;
  int64_t begin, end;

  COLOFUNC_INLINE void operator()() const {
    const uint64_t step = static_cast<uint64_t>(draw.strides.back()) * GAMMA;
    walk(draw, begin, end, [&](const Run& run) __attribute__((always_inline)) {
      uint64_t words[BLOCK];
      fill_words(words, static_cast<uint64_t>(run.index) * GAMMA + draw.key, step, run.count);
      Out* part = out + run.position;
      if constexpr (std::is_same_v<Out, int64_t>) {
        std::memcpy(part, words, run.count * sizeof(uint64_t));
      } else if (kind == NORMAL) {
        write_normal(words, part, run.count);
      } else {
        write_uniform(words, part, run.count);
      }
    });
  }
};

// ---- Bernoulli draws: one word for eight elements ----

// Decides elements whose byte is the threshold's, once in 256, by 31 further bits of their own.
struct Ties {
  const Draw& draw;

  bool won(int64_t index) const {
    uint64_t z = static_cast<uint64_t>(index) * GAMMA + (draw.key ^ SECOND);
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;  // the top bits are right without the last round
    return static_cast<int64_t>(z) < draw.bound;
  }

  template <class IndexOf>
  void decide(const uint8_t* found, uint8_t* keep, int64_t count, const IndexOf& index_of) const {
    const uint8_t* at = found;
    const uint8_t* end = found + count;
    while ((at = static_cast<const uint8_t*>(std::memchr(at, draw.byte, end - at))) != nullptr) {
      keep[at - found] = won(index_of(at - found));
      if (++at == end) return;
    }
  }
};

COLOFUNC_INLINE void compare(const uint8_t* __restrict found, uint8_t* __restrict keep, int byte, int64_t count) {
  if (byte > 255) {
    std::memset(keep, 1, count);
    return;
  }
  const auto threshold = static_cast<uint8_t>(byte);
  for (int64_t j = 0; j < count; ++j) keep[j] = found[j] < threshold;
}

template <class Out>
COLOFUNC_INLINE Out kept(Out x, uint8_t keep, double scale) {
  // Times one or zero first: a number that is not finite stays so.
  if constexpr (std::is_same_v<Out, double>) {
    return x * static_cast<double>(keep) * scale;
  } else {
    return static_cast<Out>(static_cast<float>(x) * static_cast<float>(keep) * static_cast<float>(scale));
  }
}

template <class Out>
struct FillKept {
  const Draw& draw;
  const Out* x;  // what is kept, or nullptr: ones
  Out* out;
  int64_t begin, end;

  // Bytes and decisions of a run of consecutive indices.
  COLOFUNC_INLINE void decide_shared(const Run& run, uint8_t* keep) const {
    uint64_t words[BLOCK / 8 + 1];
    const int64_t start = run.index & 7;
    const uint64_t first = static_cast<uint64_t>(run.index >> 3) * GAMMA + draw.key;
    fill_words(words, first, GAMMA, (start + run.count + 7) / 8);
    const uint8_t* found = reinterpret_cast<const uint8_t*>(words) + start;
    compare(found, keep, draw.byte, run.count);
    if (draw.ties) Ties{draw}.decide(found, keep, run.count, [&](int64_t j) { return run.index + j; });
  }

  // The same where indices are apart: each element makes its word.
  COLOFUNC_INLINE void decide_apart(const Run& run, uint8_t* keep) const {
    int64_t indices[BLOCK];
    uint8_t found[BLOCK];
    const int64_t step = draw.strides.back();
    if (draw.columns != nullptr) {
      const int64_t inner = draw.sizes.back();
      const int64_t row = draw.rows[run.position / inner] + draw.first;
      const int64_t* columns = draw.columns + run.position % inner;
      for (int64_t j = 0; j < run.count; ++j) indices[j] = row + columns[j];
    } else {
      for (int64_t j = 0; j < run.count; ++j) indices[j] = run.index + j * step;
    }
    for (int64_t j = 0; j < run.count; ++j) {
      const uint64_t word = mixed(static_cast<uint64_t>(indices[j] >> 3) * GAMMA + draw.key);
      found[j] = static_cast<uint8_t>(word >> ((indices[j] & 7) * 8));
    }
    compare(found, keep, draw.byte, run.count);
    if (draw.ties) Ties{draw}.decide(found, keep, run.count, [&](int64_t j) { return indices[j]; });
  }

  COLOFUNC_INLINE void write(const Run& run, const uint8_t* __restrict keep) const {
    Out* __restrict part = out + run.position;
    if (x == nullptr) {
      for (int64_t j = 0; j < run.count; ++j) part[j] = static_cast<Out>(keep[j]);
      return;
    }
    if constexpr (!std::is_integral_v<Out>) {
      const Out* __restrict source = x + run.at;
      const int64_t step = draw.x_strides.back();
      if (step == 1) {
        for (int64_t j = 0; j < run.count; ++j) part[j] = kept(source[j], keep[j], draw.scale);
      } else {
        for (int64_t j = 0; j < run.count; ++j) part[j] = kept(source[j * step], keep[j], draw.scale);
      }
    }
  }

  COLOFUNC_INLINE void operator()() const {
    const bool shared = draw.columns == nullptr && draw.strides.back() == 1;
    walk(draw, begin, end, [&](const Run& run) __attribute__((always_inline)) {
      uint8_t keep[BLOCK];
      if (shared) {
        decide_shared(run, keep);
      } else {
        decide_apart(run, keep);
      }
      write(run, keep);
    });
  }
};

// ---- the operator ----

template <class Out>
void fill_as(const Draw& draw, Kind kind, const Tensor* x, Tensor& result) {
  Out* out = static_cast<Out*>(result.data_ptr());
  const Out* source = x == nullptr ? nullptr : static_cast<const Out*>(x->data_ptr());
  torch::stable::parallel_for(0, result.numel(), GRAIN, [&](int64_t begin, int64_t end) {
    if (kind == KEEP) {
      at_best_level(FillKept<Out>{draw, source, out, begin, end});
    } else if constexpr (!std::is_integral_v<Out> || std::is_same_v<Out, int64_t>) {
      at_best_level(FillNumbers<Out>{draw, kind, out, begin, end});
    }
  });
}

void random_fill(
    Tensor out, std::optional<Tensor> x, std::optional<Tensor> rows, std::optional<Tensor> columns, int64_t kind, int64_t key,
    int64_t first, std::vector<int64_t> sizes, std::vector<int64_t> strides, std::vector<int64_t> x_strides, int64_t byte,
    int64_t bound, bool ties, double scale) {
  STD_TORCH_CHECK(
      !sizes.empty() && sizes.size() == strides.size() && sizes.size() == x_strides.size(),
      "random_fill_: sizes, strides and x_strides are one or more numbers for each atom");
  STD_TORCH_CHECK(!x || x->scalar_type() == out.scalar_type(), "random_fill_: x has another dtype than out");
  if (out.numel() == 0) return;
  Draw draw{static_cast<uint64_t>(key), first, std::move(sizes), std::move(strides), std::move(x_strides)};
  draw.rows = rows ? static_cast<const int64_t*>(rows->data_ptr()) : nullptr;
  draw.columns = columns ? static_cast<const int64_t*>(columns->data_ptr()) : nullptr;
  draw.byte = static_cast<int>(byte);
  draw.bound = bound;
  draw.ties = ties;
  draw.scale = scale;
  const Tensor* source = x ? &*x : nullptr;
  const auto kind_of = static_cast<Kind>(kind);
  switch (out.scalar_type()) {
    case ScalarType::Double: return fill_as<double>(draw, kind_of, source, out);
    case ScalarType::Float: return fill_as<float>(draw, kind_of, source, out);
    case ScalarType::Half: return fill_as<Half>(draw, kind_of, source, out);
    case ScalarType::BFloat16: return fill_as<BFloat16>(draw, kind_of, source, out);
    case ScalarType::Long: return fill_as<int64_t>(draw, kind_of, nullptr, out);
    case ScalarType::Bool: return fill_as<uint8_t>(draw, kind_of, nullptr, out);
    default: STD_TORCH_CHECK(false, "random_fill_: no kernel for this dtype of out");
  }
}

}  // namespace
}  // namespace colofunc

STABLE_TORCH_LIBRARY_IMPL(colofunc, CPU, m) {
  m.impl("random_fill_", TORCH_BOX(&colofunc::random_fill));
}
