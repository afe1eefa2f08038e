// turbo_attention over one step's sequences; attention.cpp says how.
#pragma once

#include <memory>

#include "simd.h"
#include "team.h"

// Everything a call needs; tandem_kernels.native declares the same fields in the same order.
extern "C" struct TandemAttention {
  const void* query;  // [num_tokens, num_heads, k_dim], tokens query_stride elements apart
  void* out;          // [num_tokens, num_heads, v_dim], tokens out_stride elements apart
  const void* cache;  // blocks with K [num_kv_heads, block_size, k_dim] and V [num_kv_heads, block_size, v_dim]
  const float* table; // [256], what each byte of a float8 cache stands for
  const int32_t* block_table;
  const int32_t* seq_lens;
  const int32_t* query_start_loc;
  const int64_t* ancestor_bits;  // or null
  const float* sinks;            // [num_heads] or null
  const float* k_scale;          // [num_kv_heads] or null
  const float* v_scale;          // [num_kv_heads] or null
  const float* k_token_scale;    // [num_blocks, num_kv_heads, block_size] or null: instead of k_scale
  const float* v_token_scale;
  int64_t query_stride, out_stride;
  int64_t cache_strides[4];          // between blocks, K and V, heads of K, heads of V, in elements
  int64_t k_token_scale_strides[3];  // between blocks, heads, tokens
  int64_t v_token_scale_strides[3];
  int32_t num_seqs, max_blocks, num_blocks, num_tokens;
  int32_t num_heads, num_kv_heads, k_dim, v_dim, block_size;
  int32_t query_dtype, cache_dtype;
  int32_t window;  // 0: none
  float scale, softcap;  // softcap 0: none
  int32_t num_threads;
  // How the cache lies (cache.h). If so, blocks are multiples of 64 tokens and the products' dtype is the cache's.
  int32_t interleaved;
};

class Attention;

// What belongs to a layer, besides what the division of the work depends on.
struct AttentionConstants {
  const void* cache;
  const float* sinks;  // [num_heads] or null
  float scale, softcap;
};

// One step's work, divided once and done for each layer of the same heads and window. Of several at a time, only one may
// run.
class AttentionStep {
 public:
  explicit AttentionStep(const TandemAttention& call);
  AttentionStep(AttentionStep&&);
  ~AttentionStep();

  // False when the metadata is inconsistent, or would read outside the cache.
  bool plan();

  // Called by every thread of a team; returns when all are done.
  void run_in_team(Team& team, const AttentionConstants& layer);

 private:
  std::unique_ptr<Attention> attention;
};
