// Products of bfloat16 numbers with AMX: up to 32 rows times 32 columns at a time, sums in four tiles.
//
//   tiles 0, 1   sums of the upper rows, at most 16: columns 0 .. 15 and 16 .. 31
//   tiles 2, 3   sums of the lower rows, at most 16
//   tiles 4, 5   32 of depth of the upper and of the lower rows
//   tiles 6, 7   the same depth of the columns, as [16 pairs][16 columns][2]
//
// A row's sums do not depend on the other rows: neither on how many there are, nor on what they hold.
#pragma once

#include "amx.h"
#include "product.h"

constexpr int kTileDepth = 32, kTileColumns = 32;

// lower is 0 where only tile_product<false> is called.
inline TileConfig bfloat16_tiles(int upper, int lower) {
  TileConfig config;
  for (int tile : {0, 1, 4}) config.shape(tile, upper, kTileBytes);
  if (lower > 0)
    for (int tile : {2, 3, 5}) config.shape(tile, lower, kTileBytes);
  for (int tile : {6, 7}) config.shape(tile, kTileDepth / 2, kTileBytes);
  return config;
}

// c [rows, 32] = a [rows, depth] x b [depth / 2, 32, 2], or += if Mode is kContinued; strides are in bytes and depth is
// a multiple of 32. The lower rows follow 16 upper ones.
template <bool Lower, Sum Mode>
inline void tile_product(const void* a, int64_t a_stride, const void* b, int64_t b_stride, void* c, int64_t c_stride,
                         int depth) {
  static_assert(Mode != Sum::kAdded);
  const char *a0 = (const char*)a, *a1 = a0 + 16 * a_stride, *from = (const char*)b;
  char *c0 = (char*)c, *c1 = c0 + 16 * c_stride;
  if constexpr (Mode == Sum::kContinued) {
    tile_load<0>(c0, c_stride);
    tile_load<1>(c0 + kTileBytes, c_stride);
    if constexpr (Lower) {
      tile_load<2>(c1, c_stride);
      tile_load<3>(c1 + kTileBytes, c_stride);
    }
  } else {
    tile_zero<0>();
    tile_zero<1>();
    if constexpr (Lower) {
      tile_zero<2>();
      tile_zero<3>();
    }
  }
  for (int k = 0; k < depth; k += kTileDepth) {
    tile_load<4>(a0 + k * 2, a_stride);
    tile_load<6>(from, b_stride);
    tile_load<7>(from + kTileBytes, b_stride);
    if constexpr (Lower) tile_load<5>(a1 + k * 2, a_stride);
    tile_dot_bf16<0, 4, 6>();
    tile_dot_bf16<1, 4, 7>();
    if constexpr (Lower) {
      tile_dot_bf16<2, 5, 6>();
      tile_dot_bf16<3, 5, 7>();
    }
    from += kTileDepth / 2 * b_stride;
  }
  tile_store<0>(c0, c_stride);
  tile_store<1>(c0 + kTileBytes, c_stride);
  if constexpr (Lower) {
    tile_store<2>(c1, c_stride);
    tile_store<3>(c1 + kTileBytes, c_stride);
  }
}
