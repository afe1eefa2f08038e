// Memory that a thread reuses from call to call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

class Scratch {
 public:
  // At least `bytes` bytes, aligned to a cache line. Earlier contents and pointers become invalid.
  char* of(int64_t bytes) {
    if (int64_t(memory.size()) < bytes + 64) memory.resize(bytes + 64);
    return (char*)(((uintptr_t)memory.data() + 63) / 64 * 64);
  }

 private:
  std::vector<char> memory;
};
