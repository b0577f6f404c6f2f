// What a thread does while it waits for the others of its region.
#pragma once

#include <algorithm>
#include <omp.h>

#include "gemm.h"

namespace splitserve {

// Brings near the weights that are needed next, while a thread waits for others: the memory has
// nothing else to do then.
template <class T>
class WeightsAhead {
 public:
  // The next matrix is `linear`; each thread begins with a panel of its own.
  void expect(const Linear& linear) {
    const size_t size = linear.kinds || linear.scales ? 1 : sizeof(T);
    const size_t panel = size_t(linear.num_inputs) * kPanel * size / (linear.kinds ? 2 : 1);
    const size_t index = omp_get_thread_num() % num_panels(linear.num_outputs);
    const size_t start = linear.kinds ? linear.starts[index] : index * panel;
    next_ = static_cast<const char*>(linear.panels) + start;
    end_ = next_ + std::min(panel, kMostBytes);
  }

  // A little of it; nothing when enough is there.
  void fetch() {
    for (int i = 0; i < kLines && next_ < end_; ++i, next_ += kLineBytes) {
      __builtin_prefetch(next_, 0, 2);
    }
  }

 private:
  static constexpr int kLines = 4, kLineBytes = 64;
  // What fits in a core's cache beside what a task works on.
  static constexpr size_t kMostBytes = size_t{96} << 10;
  const char *next_ = nullptr, *end_ = nullptr;
};

}  // namespace splitserve
