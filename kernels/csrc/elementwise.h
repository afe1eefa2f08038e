// What a decoder layer does between its matrix products.
#pragma once

#include "cache.h"
#include "linear.h"

// All are called by every thread of a team, and return when all are done. A product that follows with quantized
// weights gets its rows quantized on the way.

// hidden += delta (unless null); normed.x = hidden / rms(hidden) * weight. All [rows, width] dense; delta is of normed's
// dtype. With `from`, row r of normed is made of row from[r] of hidden and delta, each of which is named once.
void add_rms_norm_in_team(Team& team, float* hidden, const void* delta, const float* weight,
                          const Activations& normed, int64_t rows, int width, float eps, bool quantize,
                          const int64_t* from = nullptr);

// gate_up [rows, 2 * width] -> out.x [rows, width] = silu(gate) * up, both dense.
void silu_mul_in_team(Team& team, const void* gate_up, const Activations& out, int64_t rows, int width, bool quantize);

// From a fused QKV projection to attention's inputs.
struct RopeStore {
  void* qkv;                 // [tokens, num_heads + 2 * num_kv_heads, head_size] dense; queries and keys change
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens]
  const float* rotations;    // [num_positions, head_size] interleaved (cos, sin)
  int64_t tokens, num_positions, num_slots;
  int num_heads, num_kv_heads, head_size, block_size;
  DType dtype;
  float eps;
  bool interleaved;  // how the cache lies (cache.h)

  // The first token whose position or slot lies outside, or -1.
  int64_t first_wrong() const;
};

// Norms (unless the weights are null) and rotates queries and keys; keys and values go into the cache
// [blocks, 2, num_kv_heads, block_size, head_size].
void rope_store_in_team(Team& team, const RopeStore& call, const float* q_norm, const float* k_norm, void* cache);
