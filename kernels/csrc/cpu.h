// Processor instructions other than arithmetic.
//
//   ticks   a clock; a tick is about 0.4 ns
//   relax   in a loop that waits for another thread
//   fetch   prefetches a cache line. GCC drops calls of functions whose only content is __builtin_prefetch, so this is
//           assembly
#pragma once

#include <cstdint>

#if defined(__aarch64__)

// The counter runs at 24 MHz to 1 GHz; its value is scaled so that a tick is 0.4 to 0.6 ns.
inline uint64_t ticks() {
  uint64_t count, frequency;
  asm volatile("mrs %0, cntvct_el0" : "=r"(count));
  asm("mrs %0, cntfrq_el0" : "=r"(frequency));
  return count * (2500000000 / frequency);
}
// Most processors ignore the yield instruction; isb takes some tens of cycles.
inline void relax() { asm volatile("isb" : : : "memory"); }
inline void fetch(const void* line) { asm volatile("prfm pldl2keep, [%0]" : : "r"(line)); }

#else

#include <immintrin.h>

inline uint64_t ticks() { return __rdtsc(); }
inline void relax() { _mm_pause(); }
// The operand is a register. A memory operand counts as a read, and GCC would store a loop's accumulators before it.
inline void fetch(const void* line) { asm volatile("prefetcht1 (%0)" : : "r"(line)); }

#endif
