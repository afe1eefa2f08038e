// 64 keys of a sequence and a K/V head at a time, K and V as the products of attention read them.
//
// An interleaved cache holds them so, and its whole tiles are read where they lie. Others are copied into that order,
// as are tiles in which a tree's nodes stand where plain decoding would have put them.
#pragma once

#include <algorithm>
#include <cstring>

#include "attention.h"
#include "cache.h"
#include "product.h"

constexpr int kTile = 64;

// What a product reads of a tile: K or V, rows `stride` lanes apart; the next tile's lies `ahead` of it, 0: not to be
// fetched.
struct Operand {
  const uint32_t* data;
  int64_t stride;
  int64_t ahead;
};

// K [k_dim / per lane][64 keys] and V [64 / per lane][v_dim], of 32-bit lanes.
struct Tile {
  Operand keys, values;
};

// Where copies go; reused from tile to tile.
struct TileMemory {
  void *keys, *values;     // one tile each
  void* raw;               // both, in the dtype of the products
  float* token_scales[2];  // of K and V, per key of the tile
};

// Element: of the right side of attention's products.
template <class Element>
class TileReader {
 public:
  // Keys from tree_begin on are a tree's nodes.
  TileReader(const TandemAttention& call, const void* cache, int seq, int kv_head, int tree_begin, TileMemory memory)
      : c(call),
        cache(cache),
        blocks(call.block_table + int64_t(seq) * call.max_blocks),
        kv_head(kv_head),
        tree_begin(tree_begin),
        memory(memory) {}

  // The 64 keys from first_key on; those from `end` on are zero. With a path, keys from tree_begin on are its nodes in
  // their order.
  Tile read(int first_key, int end, uint64_t path) const {
    if (!c.interleaved) return rearranged(first_key, end, path);
    return first_key + kTile <= (path ? tree_begin : end) ? whole(first_key, end) : partial(first_key, end, path);
  }

 private:
  // Neighbouring keys that are fetched ahead together; blocks are multiples of it.
  static constexpr int kStrip = 16;
  static constexpr int kPer = kPerLane<Element>;

  const TandemAttention& c;
  const void* cache;
  const int32_t* blocks;
  const int kv_head, tree_begin;
  const TileMemory memory;

  // Of a plain cache.
  Tile rearranged(int first_key, int end, uint64_t path) const {
    const int dims[2] = {c.k_dim, c.v_dim}, bytes = bytes_of((DType)c.cache_dtype);
    const DType dtype = (DType)c.cache_dtype;
    const bool direct = dtype == (kPer == 2 ? DType::kBFloat16 : DType::kFloat32);
    static constexpr int kMaxHead = 576;
    alignas(64) static const Element zeros[kMaxHead] = {};
    const Element* rows[2][kTile];
    const int tree = path ? tree_begin : end;
    for (int key = tree; key < first_key; ++key) path &= path - 1;  // nodes of the tiles before
    for (int t = 0; t < kTile;) {
      if (first_key + t >= end) {
        rows[0][t] = rows[1][t] = zeros;
        memory.token_scales[0][t] = memory.token_scales[1][t] = 0;
        ++t;
        continue;
      }
      int key = first_key + t, run = 1;
      if (key >= tree) {
        key = tree + __builtin_ctzll(path);
        path &= path - 1;
      } else {
        // Neighbours of one block at once: divisions are slow.
        run = std::min({kTile - t, c.block_size - key % c.block_size, std::min(tree, end) - key});
      }
      const int64_t at[2] = {element_of(key, 0), element_of(key, 1)};
      for (int i = 0; i < run; ++i, ++t) {
        load_token_scales(key + i, t);
        for (int part = 0; part < 2; ++part) {
          const int D = dims[part];
          const int64_t from = at[part] + int64_t(i) * D;
          if (direct) {
            rows[part][t] = (const Element*)cache + from;
            continue;
          }
          Element* copy = (Element*)memory.raw + int64_t(part) * kTile * c.k_dim + int64_t(t) * D;
          for (int d = 0; d < D; d += kLanes) {
            Vec v = load_as_float(cache, from + d, dtype, c.table);
            if constexpr (kPer == 2) to_bf16((uint16_t*)copy + d, v);
            else store((float*)copy + d, v);
          }
          rows[part][t] = copy;
        }
      }
    }
    // The next tile is on its way from memory while this one is worked on: a tile's rows are too short and too
    // scattered for the processor to guess them.
    const char* ahead[2][kTile / kStrip] = {};
    if (first_key + kTile < end)
      for (int t = 0; t < kTile && first_key + kTile + t < tree; t += kStrip)
        for (int part = 0; part < 2; ++part)
          ahead[part][t / kStrip] = (const char*)cache + element_of(first_key + kTile + t, part) * bytes;
    auto fetch_ahead = [&](int t, int part, int64_t from, int64_t to) {
      if (!ahead[part][t / kStrip]) return;
      for (int64_t line = from; line < to; line += 64) fetch(ahead[part][t / kStrip] + line);
    };
    const int depth = c.k_dim / kPer, D = c.v_dim;
    const int64_t strip_bytes = int64_t(kStrip) * D * bytes;
    for (int t = 0; t < kTile; t += kLanes) {
      for (int d = 0; d < depth; d += kLanes)
        transpose((const uint32_t* const*)rows[0] + t, d, (uint32_t*)memory.keys + int64_t(d) * kTile + t, kTile);
      if (t % kStrip == 0) fetch_ahead(t, 0, 0, int64_t(kStrip) * c.k_dim * bytes);
    }
    for (int t = 0; t < kTile; t += kPer) {
      uint32_t* out = (uint32_t*)memory.values + int64_t(t / kPer) * D;
      fetch_ahead(t, 1, t % kStrip * strip_bytes / kStrip, (t % kStrip + kPer) * strip_bytes / kStrip);
      if constexpr (kPer == 2)
        for (int d = 0; d < D; d += kLanes) pair_up(rows[1][t] + d, rows[1][t + 1] + d, out + d);
      else
        std::memcpy(out, rows[1][t], D * 4);
    }
    return copied();
  }

  void load_token_scales(int key, int t) const {
    auto load = [&](const float* scales, const int64_t* strides, int part) {
      if (!scales) return;
      memory.token_scales[part][t] = scales[blocks[key / c.block_size] * strides[0] + kv_head * strides[1] +
                                          key % c.block_size * strides[2]];
    };
    load(c.k_token_scale, c.k_token_scale_strides, 0);
    load(c.v_token_scale, c.v_token_scale_strides, 1);
  }

  // Of an interleaved cache: where it lies; the next one is fetched ahead.
  Tile whole(int first_key, int end) const {
    auto at = [&](int key, int part) {
      const int64_t lane = part == 0 ? key % c.block_size : int64_t(key % c.block_size) / kPer * c.v_dim;
      return (const uint32_t*)piece(blocks[key / c.block_size], part) + lane;
    };
    // A tile is too short, and the next too far, for the processor to guess what comes.
    const bool has_next = first_key + kTile < end;
    auto operand = [&](int part, int64_t stride) {
      const uint32_t* data = at(first_key, part);
      return Operand{data, stride, has_next ? at(first_key + kTile, part) - data : 0};
    };
    return {operand(0, c.block_size), operand(1, c.v_dim)};
  }

  // Of an interleaved cache: a copy, so that what lies beyond `end` does not count, whatever it is.
  Tile partial(int first_key, int end, uint64_t path) const {
    const int D = c.v_dim, tree = path ? tree_begin : end;
    const DType dtype = (DType)c.cache_dtype;
    const HeadShape key_shape = {c.block_size, c.k_dim, dtype, true}, value_shape = {c.block_size, D, dtype, true},
                    key_tile = {kTile, c.k_dim, dtype, true}, value_tile = {kTile, D, dtype, true};
    std::memset(memory.keys, 0, key_tile.bytes());
    std::memset(memory.values, 0, value_tile.bytes());
    for (int key = tree; key < first_key; ++key) path &= path - 1;  // nodes of the tiles before
    int t = 0;
    if (const int count = std::min(tree, end) - first_key; count > 0) {
      // A tile lies within one block.
      const int offset = first_key % c.block_size;
      const uint32_t* keys = (const uint32_t*)piece(blocks[first_key / c.block_size], 0);
      for (int lane = 0; lane < c.k_dim / kPer; ++lane)
        std::memcpy((uint32_t*)memory.keys + lane * kTile, keys + int64_t(lane) * c.block_size + offset, count * 4);
      const char* values = piece(blocks[first_key / c.block_size], 1);
      const int whole = count / kPer * kPer;
      std::memcpy(memory.values, values + int64_t(offset) * D * sizeof(Element), int64_t(whole) * D * sizeof(Element));
      for (t = whole; t < count; ++t) {
        value_shape.get_value(values, offset + t, memory.raw);
        value_tile.put_value(memory.values, t, memory.raw);
      }
      t = count;
    }
    for (; t < kTile && first_key + t < end; ++t, path &= path - 1) {
      const int key = tree + __builtin_ctzll(path), offset = key % c.block_size;
      key_shape.get_key(piece(blocks[key / c.block_size], 0), offset, memory.raw);
      key_tile.put_key(memory.keys, t, memory.raw);
      value_shape.get_value(piece(blocks[key / c.block_size], 1), offset, memory.raw);
      value_tile.put_value(memory.values, t, memory.raw);
    }
    return copied();
  }

  Tile copied() const {
    return {{(const uint32_t*)memory.keys, kTile, 0}, {(const uint32_t*)memory.values, c.v_dim, 0}};
  }

  // Where a key's K (part 0) or V (part 1) lies in the cache, in elements.
  int64_t element_of(int key, int part) const {
    return first_element(blocks[key / c.block_size], part) +
           int64_t(key % c.block_size) * (part == 0 ? c.k_dim : c.v_dim);
  }

  int64_t first_element(int block, int part) const {
    return block * c.cache_strides[0] + part * c.cache_strides[1] + kv_head * c.cache_strides[2 + part];
  }

  const char* piece(int block, int part) const {
    return (const char*)cache + first_element(block, part) * bytes_of((DType)c.cache_dtype);
  }
};
