// Calls functions of a shared library for another process, which may have another instruction set (qemu_library.py).
//
//   run_library LIBRARY FD ADDRESS BYTES
//
// The file FD is mapped at ADDRESS, so that pointers into it mean the same in both processes. Each line of the input is
// a call, a name, a float, and 24 integers or pointers; each line of the output its result.

#include <dlfcn.h>
#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>
#include <utility>

constexpr int kWords = 24;

// The calling convention of 64-bit ARM numbers integers and floats separately, and a function ignores surplus
// arguments. So one type serves functions of any signature with at most one float.
template <size_t... I>
int64_t call(void* function, float number, const int64_t* words, std::index_sequence<I...>) {
  return ((int64_t(*)(float, decltype(words[I] + 0)...))function)(number, words[I]...);
}

int main(int, char** arguments) {
  void* library = dlopen(arguments[1], RTLD_NOW);
  if (!library) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  void* at = (void*)std::stoull(arguments[3]);
  const int flags = MAP_SHARED | MAP_FIXED_NOREPLACE;
  if (mmap(at, std::stoull(arguments[4]), PROT_READ | PROT_WRITE, flags, std::stoi(arguments[2]), 0) != at)
    return std::perror("mmap"), 1;
  std::string name;
  float number;
  while (std::cin >> name >> number) {
    int64_t words[kWords];
    for (int64_t& word : words) std::cin >> word;
    void* function = dlsym(library, name.c_str());
    if (!function) return std::fprintf(stderr, "%s\n", dlerror()), 1;
    std::cout << call(function, number, words, std::make_index_sequence<kWords>()) << std::endl;
  }
}
