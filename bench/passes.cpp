// What one pass over memory costs, for rows of `bench/native_passes.py`: plain loops, which the compiler makes vector instructions of.

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

constexpr long ROW = 1024, LANES = 64;

float widened(float x) {
  return x;
}

float widened(uint16_t bfloat16) {
  const uint32_t bits = static_cast<uint32_t>(bfloat16) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

// The sum of squares, of rows in float32 and over rows in float64. `count` is a multiple of LANES.
template <class Element>
double squares(const Element* x, long count) {
  double total = 0.0;
  for (long at = 0; at < count; at += ROW) {
    const long end = at + ROW < count ? at + ROW : count;
    float sums[LANES] = {};
    for (long i = at; i < end; i += LANES) {
      for (long lane = 0; lane < LANES; ++lane) sums[lane] += widened(x[i + lane]) * widened(x[i + lane]);
    }
    for (float one : sums) total += one;
  }
  return total;
}

}  // namespace

extern "C" {

double squares_float32(const float* x, long count) {
  return squares(x, count);
}

double squares_bfloat16(const uint16_t* x, long count) {
  return squares(x, count);
}

void scale(float* __restrict out, const float* __restrict x, float factor, long count) {
  for (long i = 0; i < count; ++i) out[i] = x[i] * factor;
}

// (out, lse) of one block of keys come into those of the blocks before: rows of `width` numbers.
void merge(float* __restrict out, float* __restrict lse, const float* __restrict part, const float* __restrict m, long rows, long width) {
  for (long row = 0; row < rows; ++row) {
    const float top = std::fmax(lse[row], m[row]);
    if (std::isinf(top)) continue;
    const float of_out = std::exp(lse[row] - top), of_part = std::exp(m[row] - top), sum = of_out + of_part;
    const float keep = of_out / sum, take = of_part / sum;
    float* to = out + row * width;
    const float* from = part + row * width;
    for (long i = 0; i < width; ++i) to[i] = to[i] * keep + from[i] * take;
    lse[row] = top + std::log(sum);
  }
}

}  // extern "C"
