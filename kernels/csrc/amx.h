// The tiles of AMX: eight registers of up to 16 rows of 64 bytes, and products of two of them added to a third.
//
// They are written in assembly: GCC 12's _tile_loadconfig may drop stores to the configuration before it. With
// TANDEM_EMULATED they are plain C++ that gives the same bits, for tests on processors without them.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

#if defined(__AMX_INT8__) || defined(TANDEM_EMULATED)
constexpr bool kHasTiles = true;
#else
constexpr bool kHasTiles = false;
#endif

constexpr int kTileBytes = 64;  // of a row, at most

// What ldtilecfg reads.
struct TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  constexpr TileConfig& shape(int tile, int num_rows, int num_bytes) {
    rows[tile] = uint8_t(num_rows);
    row_bytes[tile] = uint16_t(num_bytes);
    return *this;
  }
};
static_assert(sizeof(TileConfig) == 64);

#if defined(TANDEM_EMULATED)

struct EmulatedTile {
  int rows, bytes;
  alignas(64) uint8_t data[16][kTileBytes];
};
inline thread_local EmulatedTile emulated_tiles[8];

// Tiles of this thread while the object lives. Tiles in use would make every switch of threads slower.
class Tiles {
 public:
  explicit Tiles(const TileConfig& config) {
    for (int t = 0; t < 8; ++t) {
      emulated_tiles[t].rows = config.rows[t];
      emulated_tiles[t].bytes = config.row_bytes[t];
    }
  }
  ~Tiles() {
    for (EmulatedTile& tile : emulated_tiles) tile.rows = tile.bytes = 0;
  }
  Tiles(const Tiles&) = delete;
};

template <int Tile>
inline void tile_zero() {
  std::memset(emulated_tiles[Tile].data, 0, sizeof emulated_tiles[Tile].data);
}
// Rows lie `stride` bytes apart.
template <int Tile>
inline void tile_load(const void* from, int64_t stride) {
  EmulatedTile& tile = emulated_tiles[Tile];
  tile_zero<Tile>();
  for (int r = 0; r < tile.rows; ++r) std::memcpy(tile.data[r], (const char*)from + r * stride, tile.bytes);
}
template <int Tile>
inline void tile_store(void* to, int64_t stride) {
  const EmulatedTile& tile = emulated_tiles[Tile];
  for (int r = 0; r < tile.rows; ++r) std::memcpy((char*)to + r * stride, tile.data[r], tile.bytes);
}

// sums [m, n] += a [m, k, 4] x b [k, n, 4], a of signed and b of unsigned bytes.
template <int Sums, int A, int B>
inline void tile_dot_int8() {
  EmulatedTile &c = emulated_tiles[Sums], &a = emulated_tiles[A], &b = emulated_tiles[B];
  for (int m = 0; m < a.rows; ++m) {
    VecInt sum;
    std::memcpy(&sum, c.data[m], sizeof sum);
    for (int k = 0; k < a.bytes / 4; ++k) {
      int32_t by;
      VecInt codes;
      std::memcpy(&by, a.data[m] + 4 * k, 4);
      std::memcpy(&codes, b.data[k], sizeof codes);
      sum = add_products(sum, codes, by);
    }
    std::memcpy(c.data[m], &sum, sizeof sum);
  }
}

// Even and odd elements of depth are summed apart, each by fused multiply-adds from zero, and their sum is added to c.
// Denormals count as zeros everywhere. Equal to TDPBF16PS of Emerald Rapids in 5 million sums.
__attribute__((noinline)) inline void emulate_dot_bf16(EmulatedTile& c, const EmulatedTile& a, const EmulatedTile& b) {
  for (int m = 0; m < a.rows; ++m) {
    Vec sum, even{}, odd{};
    std::memcpy(&sum, c.data[m], sizeof sum);
    for (int k = 0; k < a.bytes / 4; ++k) {
      int32_t by;
      VecInt pairs;
      std::memcpy(&by, a.data[m] + 4 * k, 4);
      std::memcpy(&pairs, b.data[k], sizeof pairs);
      const VecInt by_even = VecInt{} + (by << 16), by_odd = VecInt{} + (by & (int32_t)0xffff0000);
      even = fma((Vec)by_even, (Vec)(pairs << 16), even);
      odd = fma((Vec)by_odd, (Vec)(pairs & (int32_t)0xffff0000), odd);
    }
    sum += even + odd;
    std::memcpy(c.data[m], &sum, sizeof sum);
  }
}

// sums [m, n] += a [m, k, 2] x b [k, n, 2] of bfloat16, in float32.
template <int Sums, int A, int B>
inline void tile_dot_bf16() {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZeros = 0x0040;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | kFlushToZero | kDenormalsAreZeros);
  emulate_dot_bf16(emulated_tiles[Sums], emulated_tiles[A], emulated_tiles[B]);
  _mm_setcsr(before);
}

#else  // The instructions. Other instruction sets need the declarations too, for discarded branches.

class Tiles {
 public:
  explicit Tiles(const TileConfig& config) { asm volatile("ldtilecfg %0" : : "m"(config) : "memory"); }
  ~Tiles() { asm volatile("tilerelease" : : : "memory"); }
  Tiles(const Tiles&) = delete;
};

template <int Tile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
template <int Tile>
inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}
template <int Sums, int A, int B>
inline void tile_dot_int8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(A), "i"(B));
}
template <int Sums, int A, int B>
inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(A), "i"(B));
}

#endif
