// What a program asks of the processor, besides arithmetic.
//
//   ticks   a clock; a tick is about 0.4 ns
//   relax   in a loop that waits for another thread
//   fetch   brings a cache line near; GCC takes a function that only prefetches by its built-in for one without effect, and
//           drops its calls
#pragma once

#include <cstdint>

#if defined(__aarch64__)

// Its counter has 24 MHz to 1 GHz: a tick is 0.4 to 0.6 ns.
inline uint64_t ticks() {
  uint64_t count, frequency;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  asm("mrs %0, cntfrq_el0" : "=r"(frequency));
  return count * (2500000000 / frequency);
}
// Most processors ignore the instruction yield; isb takes some tens of cycles.
inline void relax() { asm volatile("isb" : : : "memory"); }
inline void fetch(const void* line) { asm volatile("prfm pldl2keep, [%0]" : : "r"(line)); }

#else

#include <immintrin.h>

inline uint64_t ticks() { return __rdtsc(); }
inline void relax() { _mm_pause(); }
// The address stands in a register: before an operand in memory, which counts as read, GCC would store a loop's
// accumulators.
inline void fetch(const void* line) { asm volatile("prefetcht1 (%0)" : : "r"(line)); }

#endif
