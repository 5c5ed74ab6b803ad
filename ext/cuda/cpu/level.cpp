// Which instruction set the kernels use. Tests lower it, so that one machine runs every path.

#include "../common.h"

#include <algorithm>
#include <atomic>

namespace colofunc {
namespace {

int best() {
#if COLOFUNC_LEVELS > 1
  __builtin_cpu_init();
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx512 && avx2) return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
  if (avx2) return 1;
#endif
  return 0;
}

std::atomic<int> current{best()};

}  // namespace

int level() {
  return current.load(std::memory_order_relaxed);
}

}  // namespace colofunc

// Limits the level and returns the one that is now in use.
extern "C" __attribute__((visibility("default"))) int colofunc_limit_level(int most) {
  colofunc::current = std::min(most, colofunc::best());
  return colofunc::current;
}
