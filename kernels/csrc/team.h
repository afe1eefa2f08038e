// The threads that share a call's work: libgomp's, torch's own, each taking what is left until all of it is done.
//
// No thread waits for another one, only for the work. Where a process that computes has lost a core to another one, such
// as a gateway on the same machine, the threads that have cores do all of it, and the one that comes back finds nothing
// left of the operators in between. With shares of equal size and barriers a step stood still for as long as any of its
// threads had no core.
//
// That holds where a thread loses its core between two pieces of work, so threads offer their core often
// (sched_yield); processes that wait for such an offer, rather than take the core at once, are of the policy SCHED_BATCH
// (services/common/tandem_service/priority.py). A piece that was begun is waited for.
//
// libgomp's barriers sleep almost at once when a process has more of its threads than cores, as a pod has where several
// Python threads use torch; a step of 30 layers has 300 operators, and to be woken costs more than one of them. So threads
// spin for as long as operators take, then call sched_yield for 2 ms before they sleep: sleeping after 0.1 ms made tokens
// 7 to 33 % slower beside a gateway and a client on the same cores.
#pragma once

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cpu.h"

// Grows while calls work; a thread that watches for hangs reads it. Only the first thread of a team counts, so that the
// others need not wait for its cache line; calls from two engines of a process may lose counts to each other.
inline std::atomic<int64_t> work_done{0};

inline void count_work() {
  work_done.store(work_done.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
}

class Team {
 public:
  // What a team's threads share. Pieces of work are numbered from the call's first to its last; a
  // call has less than 2^31.
  class State {
    friend class Team;
    alignas(64) std::atomic<int32_t> taken{0};
    alignas(64) std::atomic<int32_t> done{0};
    alignas(64) std::atomic<int32_t> passed{0};
  };

  Team(State& state, int index, int count) : state(state), index(index), count(count) {}

  int size() const { return count; }

  // Calls work(i) for each i of 0 .. size - 1, each on the thread that asks first; returns when all are taken. All threads
  // of a team call it for the same work in the same order.
  template <class Work>
  void share(int64_t size, Work work) {
    const int32_t first = end;
    end += int32_t(size);
    if (count == 1) {
      for (int64_t i = 0; i < size; ++i) run(work, i);
      return;
    }
    const int32_t least = std::max<int32_t>(int32_t(size) / (16 * count), 1);
    int32_t unsaid = 0, next = state.taken.load(std::memory_order_relaxed);
    while (next < end) {
      // Less and less, so that all threads end at about the same time.
      const int32_t until = std::min(next + std::max(least, (end - next) * 3 / (4 * count)), end);
      if (!state.taken.compare_exchange_weak(next, until, std::memory_order_relaxed)) continue;
      for (int32_t i = next; i < until; ++i) run(work, i - first);
      unsaid += until - next;
      if (ticks() - offered > kLong) {
        say_done(unsaid);
        unsaid = 0;
        offer_core();
      }
      next = state.taken.load(std::memory_order_relaxed);
    }
    if (unsaid) say_done(unsaid);
  }

  // Until all that was shared so far is done.
  void wait() {
    if (count == 1 || is_done()) return;
    if (ticks() - offered > kShort) offer_core();
    for (int i = 0; i < kSpins; ++i) {
      if (is_done()) return;
      relax();
    }
    for (int i = 0; i < kYields; ++i) {
      if (is_done()) return;
      sched_yield();
    }
    for (int32_t done; (done = state.done.load(std::memory_order_acquire)) < end;)
      state.done.wait(done, std::memory_order_acquire);
  }

  // A thread may come to a share after the others have done all of its work, and still has to know its size. Where the
  // size depends on data, each thread says that it has read them, and nobody writes there again before all have.
  void pass() {
    ++passes;
    if (count > 1) state.passed.fetch_add(1, std::memory_order_release);
  }

  // Until all threads have passed as often as this one.
  void wait_for_passes() {
    for (int i = 0; count > 1 && state.passed.load(std::memory_order_acquire) < count * passes; ++i) {
      if (i < kSpins) relax();
      else sched_yield();
    }
  }

 private:
  // About 0.1 ms, and 2 ms if nobody takes the core.
  static constexpr int kSpins = 5000;
  static constexpr int kYields = 4000;
  // Ticks between two offers of the core, about 0.04 and 0.2 ms: while there is nothing to do, and else. An offer that
  // nobody takes costs a microsecond.
  static constexpr uint64_t kShort = 100000, kLong = 500000;

  bool is_done() const { return state.done.load(std::memory_order_acquire) >= end; }

  template <class Work>
  void run(Work& work, int64_t i) {
    work(i);
    if (index == 0) count_work();
  }

  void say_done(int32_t number) {
    state.done.fetch_add(number, std::memory_order_acq_rel);
    state.done.notify_all();
  }

  void offer_core() {
    sched_yield();
    offered = ticks();
  }

  State& state;
  const int index, count;
  // The number after the last piece that was shared so far.
  int32_t end = 0;
  int32_t passes = 0;
  uint64_t offered = ticks();
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
