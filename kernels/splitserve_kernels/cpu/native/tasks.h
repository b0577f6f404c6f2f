// Many small tasks, phase after phase, on the threads of one OpenMP region.
//
// OpenMP is torch's own pool, so nothing is added to the machine's threads. Within a region a
// thread takes the next task when it is free. A phase ends when its tasks are done, not when all
// threads have come: one that the system has put to sleep between two tasks holds nobody up. With a
// static division of the work and a barrier after each operation, a single foreign process on one
// of two cores makes a step fifty times slower.
#pragma once

#include <atomic>
#include <memory>
#include <omp.h>
#include <sched.h>

#include "step_clock.h"

namespace splitserve {

struct alignas(64) Phase {
  std::atomic<int> next{0};
  std::atomic<int> num_done{0};
  std::atomic<int64_t> end_ns{0};
};

// What all threads of a region share. Each of them calls `run` for the same phases in the same
// order. `is_timed`: to be asked for `end_ns`.
class Phases {
 public:
  explicit Phases(int count, bool is_timed = false)
      : phases_(new Phase[count]), is_timed_(is_timed) {}

  // Runs task(0) .. task(num_tasks - 1) in any order on any thread; all are done on return. A
  // thread that has nothing else to do calls idle() meanwhile, again and again.
  template <class Task, class Idle = void (*)()>
  void run(int index, int num_tasks, Task task, Idle idle = [] {}) {
    Phase& phase = phases_[index];
    int num_mine = 0;
    for (int i; (i = phase.next.fetch_add(1, std::memory_order_relaxed)) < num_tasks; ++num_mine) {
      task(i);
    }
    if (num_mine && is_timed_) raise_to(phase.end_ns, now_ns());
    if (num_mine) phase.num_done.fetch_add(num_mine, std::memory_order_acq_rel);
    for (int spins = 0; phase.num_done.load(std::memory_order_acquire) < num_tasks; ++spins) {
      if (spins < kSpins) {
        idle();
        pause();
      } else {
        sched_yield();
      }
    }
  }

  // When the last task of a phase that was run ended, whichever thread did it; 0 if it had none.
  int64_t end_ns(int index) const { return phases_[index].end_ns.load(std::memory_order_relaxed); }

 private:
  static constexpr int kSpins = 4096;

  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static void raise_to(std::atomic<int64_t>& latest, int64_t value) {
    int64_t seen = latest.load(std::memory_order_relaxed);
    while (seen < value && !latest.compare_exchange_weak(seen, value, std::memory_order_relaxed)) {
    }
  }

  std::unique_ptr<Phase[]> phases_;
  bool is_timed_;
};

}  // namespace splitserve
