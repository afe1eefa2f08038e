// How K and V of a token lie in a block's piece of the cache, for one K/V head: [block_size, head_size] elements.
//
//   plain         a token's row in one piece
//   interleaved   as the products of attention read them, so that it need not rearrange a context at every step:
//                 K [head_size / per][block_size][per], V [block_size / per][head_size][per]
//
// per is the number of elements in a 32-bit lane: 2 of bfloat16, 1 of float32.
#pragma once

#include <cstring>

#include "simd.h"

struct HeadShape {
  int block_size, head_size;
  DType dtype;
  bool interleaved;

  int64_t bytes() const { return int64_t(block_size) * head_size * bytes_of(dtype); }

  // Row `offset` of K into the head's piece, or out of it.
  void put_key(void* head, int offset, const void* row) const {
    if (!interleaved) return copy((char*)head + offset * row_bytes(), row);
    for (int lane = 0; lane < lanes(); ++lane)
      ((uint32_t*)head)[int64_t(lane) * block_size + offset] = ((const uint32_t*)row)[lane];
  }
  void get_key(const void* head, int offset, void* row) const {
    if (!interleaved) return copy(row, (const char*)head + offset * row_bytes());
    for (int lane = 0; lane < lanes(); ++lane)
      ((uint32_t*)row)[lane] = ((const uint32_t*)head)[int64_t(lane) * block_size + offset];
  }

  // The same of V.
  void put_value(void* head, int offset, const void* row) const {
    if (!interleaved || bytes_of(dtype) == 4) return copy((char*)head + offset * row_bytes(), row);
    uint16_t* to = (uint16_t*)head + int64_t(offset / 2) * head_size * 2 + offset % 2;
    for (int d = 0; d < head_size; ++d) to[2 * d] = ((const uint16_t*)row)[d];
  }
  void get_value(const void* head, int offset, void* row) const {
    if (!interleaved || bytes_of(dtype) == 4) return copy(row, (const char*)head + offset * row_bytes());
    const uint16_t* from = (const uint16_t*)head + int64_t(offset / 2) * head_size * 2 + offset % 2;
    for (int d = 0; d < head_size; ++d) ((uint16_t*)row)[d] = from[2 * d];
  }

 private:
  int64_t row_bytes() const { return int64_t(head_size) * bytes_of(dtype); }
  int lanes() const { return int(row_bytes() / 4); }
  void copy(void* to, const void* from) const { std::memcpy(to, from, row_bytes()); }
};

// Where the heads' pieces lie in a dense cache: a block holds K of all K/V heads, then V of all.
struct CachePieces {
  int num_kv_heads, block_size, k_dim, v_dim;
  DType dtype;
  bool interleaved;

  HeadShape keys() const { return {block_size, k_dim, dtype, interleaved}; }
  HeadShape values() const { return {block_size, v_dim, dtype, interleaved}; }
  char* keys(void* cache, int64_t block, int head) const {
    return (char*)cache + block * block_bytes() + head * keys().bytes();
  }
  char* values(void* cache, int64_t block, int head) const {
    return (char*)cache + block * block_bytes() + num_kv_heads * keys().bytes() + head * values().bytes();
  }

 private:
  int64_t block_bytes() const { return num_kv_heads * (keys().bytes() + values().bytes()); }
};
