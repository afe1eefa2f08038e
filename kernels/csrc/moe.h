// A mixture of experts: each row's router chooses some of many small MLPs, whose results are summed with weights.
#pragma once

#include "elementwise.h"
#include "linear.h"

// How a router's logits become scores: kTopSoftmax takes the softmax over the chosen ones.
enum class RouterScore : int32_t { kSoftmax = 0, kSigmoid = 1, kTopSoftmax = 2 };

// tandem_kernels.native declares the same fields in the same order. Widths are multiples of 16.
extern "C" struct TandemMoe {
  const TandemLinear* router;  // one float32 piece, [experts, hidden]
  const float* correction;     // [experts], added to the scores for the choice alone, or null
  // The pieces of expert 0, then those of expert 1, and so on. All experts have equal shapes and packings.
  const TandemLinear *gate_up, *down;
  const TandemLinear *shared_gate_up, *shared_down;  // an MLP for every row, or null
  const float* shared_gate;  // [hidden]: the shared MLP counts as much as the sigmoid of its product with a row; or null
  TandemActivation act;
  int32_t experts, top_k, score;
  int32_t groups, top_groups;  // the top_groups groups with the largest sums of their two best scores may be chosen from
  int32_t renorm;              // whether the chosen weights are divided by their sum
  float scale;                 // multiplies the weights
};

// Bytes that moe_in_team needs for `rows` rows of a type.
int64_t moe_bytes(const TandemMoe& moe, int64_t rows, DType dtype);

// x [rows, hidden], quantized where moe_reads_quantized -> out [rows, hidden] of x's type. `memory` has moe_bytes, aligned
// to 64. Called by every thread of a team; returns when all are done. A row's bits do not depend on the other rows.
void moe_in_team(Team& team, const TandemMoe& moe, const Activations& x, int64_t rows, void* out, void* memory);

inline bool moe_reads_quantized(const TandemMoe& moe) {
  return is_quantized(moe.gate_up) || (moe.shared_gate_up && is_quantized(moe.shared_gate_up));
}
