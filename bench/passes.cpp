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

// Of y[token] += weight * rows[choice], with gradient g of y: rows of `width` numbers.
void combine_backward(float* __restrict drows, float* __restrict dweight, const float* __restrict g, const float* __restrict rows,
                      const float* __restrict weight, const int64_t* __restrict token, long choices, long width) {
  for (long choice = 0; choice < choices; ++choice) {
    const float* from = g + token[choice] * width;
    const float* row = rows + choice * width;
    float* to = drows + choice * width;
    float sums[LANES] = {};
    for (long i = 0; i < width; i += LANES) {
      for (long lane = 0; lane < LANES; ++lane) {
        sums[lane] += from[i + lane] * row[i + lane];
        to[i + lane] = from[i + lane] * weight[choice];
      }
    }
    float total = 0.0f;
    for (float one : sums) total += one;
    dweight[choice] = total;
  }
}

// A row's largest is 127.
void quantize(int8_t* __restrict numbers, float* __restrict scales, const float* __restrict x, long rows, long width) {
  for (long row = 0; row < rows; ++row) {
    const float* from = x + row * width;
    float most[LANES] = {};
    for (long i = 0; i < width; i += LANES) {
      for (long lane = 0; lane < LANES; ++lane) most[lane] = std::fmax(most[lane], std::fabs(from[i + lane]));
    }
    float largest = 0.0f;
    for (float one : most) largest = std::fmax(largest, one);
    scales[row] = largest / 127.0f;
    for (long i = 0; i < width; ++i) {
      numbers[row * width + i] = static_cast<int8_t>(std::nearbyint(largest > 0.0f ? from[i] / scales[row] : 0.0f));
    }
  }
}

void dequantize(float* __restrict out, const int8_t* __restrict numbers, const float* __restrict scales, long rows, long width) {
  for (long row = 0; row < rows; ++row) {
    for (long i = 0; i < width; ++i) out[row * width + i] = numbers[row * width + i] * scales[row];
  }
}

}  // extern "C"
