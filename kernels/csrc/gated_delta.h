// The gated delta rule with a recurrent state, after a short causal convolution; gated_delta.cpp says how.
#pragma once

#include <vector>

#include "linear.h"

// The sequences of a step and where their states lie; tandem_kernels.native declares the same fields in the same order.
extern "C" struct TandemStates {
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int64_t* ancestor_bits;    // [num_tokens] or null, as attention reads them
  const int32_t* initial_slots;    // [num_seqs], the state before the first token; -1: zeros
  const int32_t* final_slots;      // [num_seqs], receives the state after the last token; -1: no slot. Trees: -1
  const int32_t* snapshot_slots;   // [num_seqs], receives the state after snapshot_rows tokens; -1: no slot
  const int32_t* snapshot_rows;    // [num_seqs]
  int32_t num_seqs, num_tokens, num_slots;
};

// One layer; likewise. channels = 2 * k_heads * k_dim + v_heads * v_dim.
extern "C" struct TandemGatedDelta {
  const float* conv_weight;  // [taps, channels], the oldest input's first
  const float* decay_rate;   // [v_heads]
  const float* decay_bias;   // [v_heads], or with decay per channel [v_heads, k_dim]
  const float* norm;         // [v_dim]
  void* conv;                // [num_slots, taps - 1, channels] of the activations' dtype
  float* recurrent;          // [num_slots, v_heads, k_dim, v_dim]
  int32_t k_heads, v_heads, k_dim, v_dim, taps;
  int32_t decay_per_channel;
  int32_t sigmoid_gate;  // the output is multiplied by sigmoid(z) instead of silu(z)
  float eps;
};

constexpr int kMaxTaps = 8;

// Rows of activations, `stride` elements apart.
extern "C" struct TandemRows {
  const void* x;
  int64_t stride;
};

// What a layer's projections made of each token.
extern "C" struct TandemGatedDeltaInputs {
  TandemRows qkv;  // channels: queries, keys, values
  TandemRows z;    // [v_heads, v_dim]
  TandemRows b;    // [v_heads]
  TandemRows a;    // as decay_bias
};

// A step's sequences, checked and prepared once for all layers.
class StateStep {
 public:
  explicit StateStep(const TandemStates& call);

  // The first sequence whose rows, bits or slots do not fit, or -1; with one, nothing may be computed.
  int64_t wrong() const { return first_wrong; }
  int num_seqs() const { return call.num_seqs; }
  // Those of its sequences; rows after them belong to none.
  int64_t num_tokens() const { return call.num_seqs ? call.query_start_loc[call.num_seqs] : 0; }

 private:
  friend class GatedDelta;
  bool plan(int seq);
  bool is_tree(int seq) const;

  TandemStates call;
  int64_t first_wrong = -1;
  std::vector<int32_t> seq_of;  // by token
  std::vector<int32_t> parent;  // by token: the token before it in its sequence, -1: none
  std::vector<char> forks;      // by token: whether a later token than the next one continues it
};

// Floats that gated_delta_in_team needs besides, for all threads together.
int64_t gated_delta_floats(const TandemGatedDelta& layer, int64_t tokens);

// Called by every thread of a team; returns when all are done. out.x is [tokens, v_heads * v_dim], dense, of the inputs'
// dtype; `quantize` as in elementwise.h.
void gated_delta_in_team(Team& team, const StateStep& step, const TandemGatedDelta& layer,
                         const TandemGatedDeltaInputs& inputs, const Activations& out, bool quantize, float* floats);
