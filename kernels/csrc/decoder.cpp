// Decoder layers in one call, by one team of threads that waits between the operators for the work.
//
//   embedding                                                                                          with ends
//   norm -> QKV -> rotate, store K and V -> attention -> O -> norm -> gate and up -> SiLU -> down      each layer
//   norm of the rows that sample -> head -> their largest logits                                       with ends
//
// Called one by one from Python, a step's 300 operators would cost their calls, and every return would wait for the
// interpreter's lock, which other threads of a serving process want too. The operators are those that are called one
// by one elsewhere, in the same order on the same numbers: the results are the same bits.

#include <algorithm>
#include <cmath>
#include <map>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "sample.h"
#include "scratch.h"

extern "C" {

// One layer's weights and cache; tandem_kernels.native declares the same fields in the same order.
struct TandemLayer {
  const float *input_norm, *post_norm;
  const float *q_norm, *k_norm;  // or null
  const TandemLinear *qkv, *o, *gate_up, *down;
  void* cache;
  int32_t window;  // 0: none
};

// The operators before and after all layers.
struct TandemEnds {
  const int64_t* token_ids;  // [tokens]
  const void* embedding;     // [vocab_size, hidden_size] of the activations' dtype
  const float* norm;
  const TandemLinear* head;
  const int64_t* rows;  // [num_rows], distinct: those whose logits are wanted
  float* logits;        // [num_rows, vocab_size]
  int64_t* likeliest;   // [num_rows], see argmax; -1 for a row that holds NaN or +inf
  int64_t num_rows, vocab_size;
};

// A step, or the part of it in layers first_layer .. end_layer - 1.
struct TandemLayers {
  const TandemLayer* layers;
  const TandemEnds* ends;  // or null. With them the layers are all, and hidden and delta are not used
  float* hidden;  // [tokens, hidden_size], the residual stream without the last product
  void* delta;    // [tokens, hidden_size], that product: read unless first_layer is 0, and written
  const int64_t *positions, *slots;
  const float* rotations;
  int64_t num_positions;
  TandemAttention attention;  // query, out, their strides, cache and window are filled in here
  int32_t first_layer, end_layer;
  int32_t hidden_size, intermediate_size;
  float eps;
};
}

namespace {

// Results that one operator passes to the next; the memory is reused from call to call.
struct Workspace {
  void *normed, *qkv, *attended, *gate_up, *product;
  void* quantized;
  float* hidden;
  void* delta;

  Workspace(const TandemLayers& c, int64_t tokens) {
    const TandemAttention& a = c.attention;
    const int64_t element = bytes_of((DType)a.query_dtype), hidden = c.hidden_size, inner = c.intermediate_size,
                  queries = int64_t(a.num_heads) * a.head_size, keys = int64_t(a.num_kv_heads) * a.head_size,
                  widest = std::max({hidden, inner, queries});
    int64_t end = 0;
    auto take = [&end](int64_t bytes) {
      const int64_t at = end;
      end += (bytes + 63) / 64 * 64;
      return at;
    };
    const int64_t at[] = {take(tokens * hidden * element),      take(tokens * (queries + 2 * keys) * element),
                          take(tokens * queries * element),     take(tokens * 2 * inner * element),
                          take(tokens * inner * element),       take(quantized_bytes(tokens, int(widest))),
                          take(c.ends ? tokens * hidden * sizeof(float) : 0),
                          take(c.ends ? tokens * hidden * element : 0)};
    static thread_local Scratch memory;
    char* base = memory.of(end);
    normed = base + at[0], qkv = base + at[1], attended = base + at[2], gate_up = base + at[3];
    product = base + at[4], quantized = base + at[5];
    this->hidden = c.ends ? (float*)(base + at[6]) : c.hidden;
    delta = c.ends ? base + at[7] : c.delta;
  }
};

}  // namespace

extern "C" int64_t tandem_work_done() { return work_done.load(std::memory_order_relaxed); }

// Returns -1, or the first token whose position, slot or id lies outside, or -2 when attention's metadata is
// inconsistent; in both cases nothing was computed.
extern "C" int64_t tandem_decoder_layers(const TandemLayers* call) {
  const TandemLayers& c = *call;
  const int64_t tokens = c.attention.num_tokens;
  const DType dtype = (DType)c.attention.query_dtype;
  const Workspace work(c, tokens);
  TandemAttention attention = c.attention;
  const int64_t D = attention.head_size, queries = attention.num_heads * D;
  attention.query = work.qkv;
  attention.query_stride = queries + 2 * attention.num_kv_heads * D;
  attention.out = work.attended;
  attention.out_stride = queries;

  const RopeStore rope = {work.qkv, c.positions, c.slots, tokens, int64_t(attention.num_blocks) * attention.block_size,
                          attention.block_size, dtype, attention.interleaved != 0};
  if (const int64_t wrong = rope.first_wrong(c.num_positions); wrong >= 0) return wrong;
  const TandemActivation silu = {int(Activation::kSilu), 1, 0};
  auto norm = [&](const float* weight) {
    return TandemNorm{weight, nullptr, c.eps, int(weight ? NormKind::kRms : NormKind::kNone)};
  };
  for (int64_t t = 0; c.ends && t < tokens; ++t)
    if (c.ends->token_ids[t] < 0 || c.ends->token_ids[t] >= c.ends->vocab_size) return t;
  std::map<int32_t, AttentionStep> steps;  // by window
  for (int n = c.first_layer; n < c.end_layer; ++n) {
    attention.window = c.layers[n].window;
    if (steps.count(attention.window)) continue;
    if (!steps.emplace(attention.window, attention).first->second.plan()) return -2;
  }

  auto rows = [&](const void* x, const TandemLinear* weight) {
    return Activations{x, dtype, tokens, work.quantized, weight->order};
  };
  with_team(attention.num_threads, [&](Team& team) {
    if (const TandemEnds* ends = c.ends) {
      team.share(tokens, [&](int64_t t) {
        float* row = work.hidden + t * c.hidden_size;
        const int64_t from = ends->token_ids[t] * c.hidden_size;
        for (int i = 0; i < c.hidden_size; i += kLanes)
          store(row + i, load_as_float(ends->embedding, from + i, dtype, nullptr));
      });
      team.wait();
    }
    for (int n = c.first_layer; n < c.end_layer; ++n) {
      const TandemLayer& layer = c.layers[n];
      add_norm_in_team(team, work.hidden, n == 0 ? nullptr : work.delta, 1, norm(layer.input_norm),
                       rows(work.normed, layer.qkv), tokens, c.hidden_size, is_quantized(layer.qkv));
      linear_in_team(team, layer.qkv, rows(work.normed, layer.qkv), tokens, work.qkv, dtype);
      const TandemHeads heads = {norm(layer.q_norm), norm(layer.k_norm), norm(nullptr), c.rotations, c.num_positions, int(D),
                                 attention.num_heads, attention.num_kv_heads, int(D), int(D), 0, 0};
      rope_store_in_team(team, rope, heads, layer.cache);
      steps.at(layer.window).run_in_team(team, layer.cache);
      if (is_quantized(layer.o)) {
        team.share(tokens, [&](int64_t r) { quantize_row(rows(work.attended, layer.o), r, layer.o->depth); });
        team.wait();
      }
      linear_in_team(team, layer.o, rows(work.attended, layer.o), tokens, work.delta, dtype);
      add_norm_in_team(team, work.hidden, work.delta, 1, norm(layer.post_norm), rows(work.normed, layer.gate_up), tokens,
                       c.hidden_size, is_quantized(layer.gate_up));
      linear_in_team(team, layer.gate_up, rows(work.normed, layer.gate_up), tokens, work.gate_up, dtype);
      activate_in_team(team, work.gate_up, dtype, silu, rows(work.product, layer.down), tokens,
                       c.intermediate_size, is_quantized(layer.down));
      linear_in_team(team, layer.down, rows(work.product, layer.down), tokens, work.delta, dtype);
    }
    if (const TandemEnds* ends = c.ends; ends && ends->num_rows) {
      const Activations sampled = {work.normed, dtype, ends->num_rows, work.quantized, ends->head->order};
      add_norm_in_team(team, work.hidden, work.delta, 1, norm(ends->norm), sampled, ends->num_rows, c.hidden_size,
                       is_quantized(ends->head), ends->rows);
      linear_in_team(team, ends->head, sampled, ends->num_rows, ends->logits, DType::kFloat32);
      team.share(ends->num_rows, [&](int64_t r) {
        const float* row = ends->logits + r * ends->vocab_size;
        const int64_t likeliest = argmax(row, ends->vocab_size);
        ends->likeliest[r] = std::isfinite(row[likeliest]) ? likeliest : -1;
      });
      team.wait();
    }
  });
  return -1;
}
