// What a program asks of the processor, besides arithmetic.
#pragma once

#include <immintrin.h>

#include <cstdint>

// A clock of a few nanoseconds per tick or less.
inline uint64_t ticks() { return __rdtsc(); }

// In a loop that waits for another thread.
inline void relax() { _mm_pause(); }

// Brings a cache line near. GCC takes a function that only prefetches by its built-in for one without effect, and drops
// its calls.
inline void fetch(const void* line) { asm volatile("prefetcht1 %0" : : "m"(*(const char*)line)); }
