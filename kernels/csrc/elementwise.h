// What a decoder's sublayers do between their matrix products.
#pragma once

#include "cache.h"
#include "linear.h"

// Structs with Tandem in their names: tandem_kernels.native declares the same fields in the same order.

enum class NormKind : int32_t { kNone = 0, kRms = 1, kLayer = 2 };

// x / rms(x) or (x - mean(x)) / deviation(x), times the weight, plus the bias; kNone: x.
extern "C" struct TandemNorm {
  const float *weight, *bias;  // [width], or null
  float eps;
  int32_t kind;
};

enum class Activation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kRelu2 = 4 };

// A row of `width` results is made of 2 * width numbers if gated, act(gate) * up, else of `width`.
extern "C" struct TandemActivation {
  int32_t act, gated;
  // gpt-oss: gate <= limit, -limit <= up <= limit, and the result is gate * sigmoid(1.702 gate) * (up + 1); 0: none.
  float limit;
};

// The heads of an attention layer. A row of its fused projection holds the heads' queries, keys and values.
extern "C" struct TandemHeads {
  TandemNorm q_norm, k_norm, v_norm;
  const float* rotations;  // [num_positions, rope_dims] interleaved (cos, sin); null: positions do not enter
  int64_t num_positions;
  int32_t rope_dims;  // even; the elements of a head from there on are not rotated
  int32_t num_heads, num_kv_heads, k_dim, v_dim;
  int32_t norm_whole;       // q_norm and k_norm normalise all heads together rather than each
  int32_t norm_after_rope;  // else before

  int64_t row() const { return int64_t(num_heads + num_kv_heads) * k_dim + int64_t(num_kv_heads) * v_dim; }
};

// The functions are called by every thread of a team, and return when all are done. A product that follows with
// quantized weights gets its rows quantized on the way. Widths are multiples of 16.

// hidden += scale * delta (unless null); normed.x = norm(hidden). All [rows, width] dense; delta is of normed's dtype.
// With `from`, row r of normed is made of row from[r] of hidden and delta, each of which is named once.
void add_norm_in_team(Team& team, float* hidden, const void* delta, float scale, const TandemNorm& norm,
                      const Activations& normed, int64_t rows, int width, bool quantize,
                      const int64_t* from = nullptr);

// out.x = norm(x), both [rows, width] dense; they may be the same.
void norm_rows_in_team(Team& team, const void* x, DType dtype, const TandemNorm& norm, const Activations& out,
                       int64_t rows, int width, bool quantize);

// x [rows, 2 * width], the gate in the first half of each row, or [rows, width] -> out.x [rows, width], all dense.
void activate_in_team(Team& team, const void* x, DType dtype, const TandemActivation& by, const Activations& out,
                      int64_t rows, int width, bool quantize);

// One row of it, on the calling thread.
void activate_row(const void* x, DType dtype, const TandemActivation& by, const Activations& out, int64_t row,
                  int width, bool quantize);

// x [rows, heads, size] *= sigmoid(gate), with gate [rows, heads, size] or, per_head, [rows, heads].
void sigmoid_gate_in_team(Team& team, const Activations& x, const void* gate, bool per_head, int64_t rows, int heads,
                          int size, bool quantize);

// A row of logits <- logits * scale, then cap * tanh(logits / cap) unless cap is 0. A row of any length.
void finish_logits(float* row, int64_t size, float scale, float cap);

// From a fused QKV projection to attention's inputs.
struct RopeStore {
  void* qkv;                 // [tokens, heads.row()] dense; it changes
  const int64_t* positions;  // [tokens]
  const int64_t* slots;      // [tokens]
  int64_t tokens, num_slots;
  int block_size;
  DType dtype;
  bool interleaved;  // how the cache lies (cache.h)

  // The first token whose position or slot lies outside, or -1.
  int64_t first_wrong(int64_t num_positions) const;
};

// Norms and rotates queries and keys; keys and values go into the cache (cache.h).
void rope_store_in_team(Team& team, const RopeStore& call, const TandemHeads& heads, void* cache);
