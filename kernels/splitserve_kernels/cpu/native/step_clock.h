// How long the parts of a step take, as one of its threads sees it.
#pragma once

#include <chrono>
#include <cstdint>

namespace splitserve {

// STEP_PARTS in library.py has their names.
enum StepPart {
  kPlan,
  kNorms,
  kQkv,
  kKvWrite,
  kAttention,
  kAttentionOutput,
  kGateUp,
  kDown,
  kHead,
};

// Adds up nanoseconds by part. `part_ns`: one for each part; null if nobody wants to know.
class StepClock {
 public:
  explicit StepClock(int64_t* part_ns) : part_ns_(part_ns), last_ns_(part_ns ? now_ns() : 0) {}

  // What went by since the last lap was `part`.
  void lap(StepPart part) {
    if (!part_ns_) return;
    const int64_t now = now_ns();
    part_ns_[part] += now - last_ns_;
    last_ns_ = now;
  }

 private:
  static int64_t now_ns() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  }

  int64_t* part_ns_;
  int64_t last_ns_;
};

}  // namespace splitserve
