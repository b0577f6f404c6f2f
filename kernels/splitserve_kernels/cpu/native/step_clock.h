// How long the parts of a step take.
#pragma once

#include <chrono>
#include <cstdint>

namespace splitserve {

inline int64_t now_ns() {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

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
  kDraw,
};

// Adds up nanoseconds by part. `part_ns`: one for each part; null if nobody wants to know.
class StepClock {
 public:
  explicit StepClock(int64_t* part_ns) : part_ns_(part_ns), last_ns_(part_ns ? now_ns() : 0) {}

  bool is_running() const { return part_ns_; }

  // What went by between the last lap and `at_ns` was `part`.
  void lap(StepPart part, int64_t at_ns) {
    if (at_ns <= last_ns_) return;
    part_ns_[part] += at_ns - last_ns_;
    last_ns_ = at_ns;
  }

 private:
  int64_t* part_ns_;
  int64_t last_ns_;
};

}  // namespace splitserve
