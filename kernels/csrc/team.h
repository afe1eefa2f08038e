// The threads that share a call's work: libgomp's, torch's own, meeting at barriers of ours.
//
// libgomp's barriers sleep almost at once when a process has more of its threads than cores, as a pod has where several
// Python threads use torch; a step of 30 layers meets 300 times, and to be woken costs more than the work between.
// These spin for as long as a layer's operators take. Where the other thread has lost its core to another process, they
// call sched_yield for 2 ms before they sleep: sleeping after 0.1 ms made tokens 7 to 33 % slower beside a gateway and a
// client on the same cores.
#pragma once

#include <immintrin.h>
#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

// Grows while calls work; a thread that watches for hangs reads it. Only the first thread of a team counts, so that the
// others need not wait for its cache line; calls from two engines of a process may lose counts to each other.
inline std::atomic<int64_t> work_done{0};

inline void count_work() {
  work_done.store(work_done.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

class Team {
 public:
  // What a team's threads share.
  class State {
    friend class Team;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> phase{0};
    alignas(64) std::atomic<int64_t> next{0};
  };

  Team(State& state, int index, int count) : state(state), index(index), count(count) {}

  // Until all threads are here.
  void wait() {
    if (count == 1) {
      state.next.store(0, std::memory_order_relaxed);
      return;
    }
    const int phase = state.phase.load(std::memory_order_relaxed);
    if (state.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      state.arrived.store(0, std::memory_order_relaxed);
      state.next.store(0, std::memory_order_relaxed);
      state.phase.store(phase + 1, std::memory_order_release);
      state.phase.notify_all();
      return;
    }
    for (int i = 0; i < kSpins; ++i) {
      if (state.phase.load(std::memory_order_acquire) != phase) return;
      _mm_pause();
    }
    for (int i = 0; i < kYields; ++i) {
      if (state.phase.load(std::memory_order_acquire) != phase) return;
      sched_yield();
    }
    while (state.phase.load(std::memory_order_acquire) == phase) state.phase.wait(phase, std::memory_order_acquire);
  }

  // Calls work(i) for this thread's share of 0 .. size - 1, which are neighbours. The same size gives the same shares.
  template <class Work>
  void share(int64_t size, Work work) const {
    for (int64_t i = size * index / count; i < size * (index + 1) / count; ++i) {
      work(i);
      if (index == 0) count_work();
    }
  }

  // The same, each i for the thread that asks first; a wait() lies between any two of these.
  template <class Work>
  void race(int64_t size, Work work) {
    for (int64_t i; (i = state.next.fetch_add(1, std::memory_order_relaxed)) < size;) {
      work(i);
      if (index == 0) count_work();
    }
  }

 private:
  // About 0.1 ms, and 2 ms if nobody takes the core.
  static constexpr int kSpins = 5000;
  static constexpr int kYields = 4000;

  State& state;
  const int index, count;
};

// Calls work(team) on num_threads threads; returns when all are done.
template <class Work>
void with_team(int num_threads, Work work) {
  Team::State state;
#pragma omp parallel num_threads(num_threads)
  {
    Team team(state, omp_get_thread_num(), omp_get_num_threads());
    work(team);
  }
}
