// Words of random bits: an element's word is a mix of the key and of its index in the global tensor.
//
// The words are those of `colofunc/ops/draws.py`. Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators (2014),
// figure 16, with Stafford's mix 13.

#pragma once

#include "../common.h"

#include <algorithm>

namespace colofunc {

constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15;

COLOFUNC_INLINE uint64_t mixed(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

COLOFUNC_INLINE void fill_words(uint64_t* __restrict words, uint64_t start, uint64_t step, int64_t count) {
  for (int64_t j = 0; j < count; ++j) words[j] = mixed(start + static_cast<uint64_t>(j) * step);
}

// Where the elements of a local tensor lie in the global one, as `colofunc/ops/indices.py` has it: element r * count + c has the index
// rows[r] + c * stride.
struct Places {
  uint64_t key;
  const int64_t* rows;
  int64_t count, stride;

  // The words of `number` elements from `begin` on.
  COLOFUNC_INLINE void words(uint64_t* __restrict out, int64_t begin, int64_t number) const {
    for (int64_t at = begin; at < begin + number;) {
      const int64_t column = at % count;
      const int64_t run = std::min(count - column, begin + number - at);
      const uint64_t first = key + static_cast<uint64_t>(rows[at / count]) * GAMMA;
      const uint64_t step = static_cast<uint64_t>(stride) * GAMMA;
      fill_words(out + (at - begin), first + static_cast<uint64_t>(column) * step, step, run);
      at += run;
    }
  }
};

}  // namespace colofunc
