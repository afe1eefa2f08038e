// A decoder's sublayers in one call, by one team of threads that waits between the operators for the work.
//
//   embedding                                                                                  with ends
//   norm -> QKV -> norm, rotate, store K and V -> attention -> gate -> O -> norm               attention
//   norm -> gate and up -> activation -> down -> norm                                          an MLP
//   norm -> router -> experts -> norm                                                          a mixture of experts
//   norm of the rows that sample -> head -> their largest logits                               with ends
//
// A sublayer has one or two branches, each with one of these mixers, which read the same residual stream; it receives their
// sum. Norms are optional everywhere.
//
// Called one by one from Python, a step's 300 operators would cost their calls, and every return would wait for the
// interpreter's lock, which other threads of a serving process want too. The operators are those that are called one
// by one elsewhere, in the same order on the same numbers: the results are the same bits.

#include <algorithm>
#include <cmath>
#include <tuple>
#include <vector>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "moe.h"
#include "sample.h"
#include "scratch.h"

extern "C" {

// tandem_kernels.native declares the structs with the same fields in the same order.

// Where the attention layers of one cache group find and put the keys and values of the step's sequences.
struct TandemGroup {
  const int32_t* block_table;  // [num_seqs, max_blocks]
  const int64_t* slots;        // [tokens]
  int32_t max_blocks, num_blocks, block_size;
};

struct TandemAttentionMixer {
  const TandemLinear *qkv, *o;
  const TandemLinear* gate;  // of attention's output by its sigmoid, per element or per head; or null
  TandemHeads heads;
  void* cache;
  const float* sinks;     // [num_heads] or null
  float scale, softcap;   // softcap 0: none
  int32_t window, group;  // window 0: none
};

struct TandemMlp {
  const TandemLinear* up;  // gate and up, if gated
  const TandemLinear* down;
  TandemActivation act;
};

// delta = post(mixer(pre(hidden))), with the one mixer that is not null.
struct TandemBranch {
  TandemNorm pre, post;
  const TandemAttentionMixer* attention;
  const TandemMlp* mlp;
  const TandemMoe* moe;
};

// hidden += scale * post(sum of the branches).
struct TandemSublayer {
  TandemBranch branches[2];
  int32_t num_branches;
  float scale;
  TandemNorm post;
};

// The operators before and after all sublayers.
struct TandemEnds {
  const int64_t* token_ids;      // [tokens]
  const void* embedding;         // [vocab_size, hidden_size] of the activations' dtype
  const void* learned_positions; // [num_learned, hidden_size] likewise, or null; position p has row p + position_offset
  TandemNorm norm;
  const TandemLinear* head;
  const int64_t* rows;  // [num_rows], distinct: those whose logits are wanted
  float* logits;        // [num_rows, vocab_size]
  int64_t* likeliest;   // [num_rows], see argmax; -1 for a row that holds NaN or +inf
  int64_t num_rows, vocab_size, num_learned, position_offset;
  float embed_scale, logit_scale, logit_cap;  // logit_cap 0: none
};

// A step, or the part of it in sublayers first .. end - 1.
struct TandemLayers {
  const TandemSublayer* sublayers;
  const TandemGroup* groups;
  const TandemEnds* ends;  // or null. With them the sublayers are all, and hidden and delta are not used
  float* hidden;  // [tokens, hidden_size], the residual stream without the last sublayer's result
  void* delta;    // [tokens, hidden_size], that result: read unless first is 0, and written
  const int64_t* positions;
  TandemAttention attention;  // what all attention layers share; the rest is filled in here
  int32_t first, end, num_groups, hidden_size;
};
}

namespace {

// Calls visit(branch) for each branch of the call's sublayers.
template <class Visit>
void for_branches(const TandemLayers& c, Visit visit) {
  for (int n = c.first; n < c.end; ++n)
    for (int b = 0; b < c.sublayers[n].num_branches; ++b) visit(c.sublayers[n].branches[b]);
}

// The first weight that multiplies the branch's input.
const TandemLinear* first_of(const TandemBranch& branch) {
  return branch.attention ? branch.attention->qkv : branch.mlp ? branch.mlp->up : branch.moe->gate_up;
}

bool reads_quantized(const TandemBranch& branch) {
  return branch.moe ? moe_reads_quantized(*branch.moe) : is_quantized(first_of(branch));
}

// Results that one operator passes to the next; the memory is reused from call to call.
struct Workspace {
  void *normed, *projected, *attended, *gate, *product, *second, *moe;
  void* quantized;
  float* hidden;
  void* delta;

  Workspace(const TandemLayers& c, int64_t tokens) {
    const int64_t element = bytes_of((DType)c.attention.query_dtype), hidden = c.hidden_size;
    int64_t projected_width = 0, attended_width = 0, gate_width = 0, product_width = 0, deepest = hidden, moe_size = 0;
    bool has_second = false;
    for (int n = c.first; n < c.end; ++n) has_second |= c.sublayers[n].num_branches > 1;
    for_branches(c, [&](const TandemBranch& branch) {
      if (const TandemAttentionMixer* a = branch.attention) {
        projected_width = std::max(projected_width, a->heads.row());
        attended_width = std::max<int64_t>(attended_width, a->o->depth);
        if (a->gate) gate_width = std::max<int64_t>(gate_width, a->gate->stride);
        deepest = std::max<int64_t>(deepest, a->o->depth);
      } else if (const TandemMlp* mlp = branch.mlp) {
        projected_width = std::max<int64_t>(projected_width, mlp->up->stride);
        product_width = std::max<int64_t>(product_width, mlp->down->depth);
        deepest = std::max<int64_t>(deepest, mlp->down->depth);
      } else {
        moe_size = std::max(moe_size, moe_bytes(*branch.moe, tokens, (DType)c.attention.query_dtype));
      }
    });
    int64_t end = 0;
    auto take = [&end](int64_t bytes) {
      const int64_t at = end;
      end += (bytes + 63) / 64 * 64;
      return at;
    };
    const int64_t at[] = {take(tokens * hidden * element),
                          take(tokens * projected_width * element),
                          take(tokens * attended_width * element),
                          take(tokens * gate_width * element),
                          take(tokens * product_width * element),
                          take(has_second ? tokens * hidden * element : 0),
                          take(quantized_bytes(tokens, int(deepest))),
                          take(c.ends ? tokens * hidden * sizeof(float) : 0),
                          take(c.ends ? tokens * hidden * element : 0),
                          take(moe_size)};
    static thread_local Scratch memory;
    char* base = memory.of(end);
    normed = base + at[0], projected = base + at[1], attended = base + at[2], gate = base + at[3];
    product = base + at[4], second = base + at[5], quantized = base + at[6];
    this->hidden = c.ends ? (float*)(base + at[7]) : c.hidden;
    delta = c.ends ? base + at[8] : c.delta;
    moe = base + at[9];
  }
};

// The attention layers' work, divided once for all layers of the same heads, window and group.
class AttentionPlans {
 public:
  // False when the metadata is inconsistent.
  bool plan(const TandemLayers& c, const Workspace& work) {
    bool good = true;
    for_branches(c, [&](const TandemBranch& branch) {
      if (!branch.attention || !good) return;
      const Key key = key_of(*branch.attention);
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) return;
      keys.push_back(key);
      steps.emplace_back(call_for(c, work, *branch.attention));
      good = steps.back().plan();
    });
    return good;
  }

  AttentionStep& of(const TandemAttentionMixer& a) {
    return steps[std::find(keys.begin(), keys.end(), key_of(a)) - keys.begin()];
  }

 private:
  using Key = std::tuple<int32_t, int32_t, int32_t, int32_t, int32_t, int32_t>;

  static Key key_of(const TandemAttentionMixer& a) {
    return {a.group, a.window, a.heads.num_heads, a.heads.num_kv_heads, a.heads.k_dim, a.heads.v_dim};
  }

  static TandemAttention call_for(const TandemLayers& c, const Workspace& work, const TandemAttentionMixer& a) {
    const TandemGroup& group = c.groups[a.group];
    const TandemHeads& heads = a.heads;
    const int64_t keys = int64_t(group.block_size) * heads.k_dim, values = int64_t(group.block_size) * heads.v_dim;
    TandemAttention call = c.attention;
    call.query = work.projected, call.query_stride = heads.row();
    call.out = work.attended, call.out_stride = int64_t(heads.num_heads) * heads.v_dim;
    call.block_table = group.block_table, call.max_blocks = group.max_blocks;
    call.num_blocks = group.num_blocks, call.block_size = group.block_size;
    const int64_t strides[] = {heads.num_kv_heads * (keys + values), heads.num_kv_heads * keys, keys, values};
    std::copy(std::begin(strides), std::end(strides), call.cache_strides);
    call.num_heads = heads.num_heads, call.num_kv_heads = heads.num_kv_heads;
    call.k_dim = heads.k_dim, call.v_dim = heads.v_dim;
    call.window = a.window;
    return call;
  }

  std::vector<Key> keys;
  std::vector<AttentionStep> steps;
};

class Decoder {
 public:
  explicit Decoder(const TandemLayers& call)
      : c(call), tokens(call.attention.num_tokens), dtype((DType)call.attention.query_dtype), work(call, tokens) {}

  // -1, or the first token whose position, slot or id lies outside, or -2 when attention's metadata is inconsistent.
  int64_t check_and_plan() {
    int64_t num_positions = INT64_MAX;
    for_branches(c, [&](const TandemBranch& branch) {
      if (branch.attention) num_positions = std::min(num_positions, branch.attention->heads.num_positions);
    });
    if (c.ends && c.ends->learned_positions)
      num_positions = std::min(num_positions, c.ends->num_learned - c.ends->position_offset);
    for (int g = 0; g < c.num_groups; ++g)
      if (const int64_t wrong = store_to(g).first_wrong(num_positions); wrong >= 0) return wrong;
    for (int64_t t = 0; c.ends && t < tokens; ++t)
      if (c.ends->token_ids[t] < 0 || c.ends->token_ids[t] >= c.ends->vocab_size || c.positions[t] < 0 ||
          c.positions[t] >= num_positions)
        return t;
    return plans.plan(c, work) ? -1 : -2;
  }

  // Called by every thread of a team.
  void run_in_team(Team& team) {
    if (c.ends) embed(team, *c.ends);
    for (int n = c.first; n < c.end; ++n) {
      const TandemSublayer& sublayer = c.sublayers[n];
      for (int b = 0; b < sublayer.num_branches; ++b) {
        const TandemBranch& branch = sublayer.branches[b];
        void* out = b == 0 ? work.delta : work.second;
        add_norm_in_team(team, work.hidden, b == 0 && n > 0 ? work.delta : nullptr, scale_before(n), branch.pre,
                         rows(work.normed, first_of(branch)), tokens, c.hidden_size, reads_quantized(branch));
        if (branch.attention) attend(team, *branch.attention, out);
        else if (branch.mlp) feed_forward(team, *branch.mlp, out);
        else moe_in_team(team, *branch.moe, rows(work.normed, first_of(branch)), tokens, out, work.moe);
        norm(team, branch.post, out);
      }
      if (sublayer.num_branches > 1) add_second(team);
      norm(team, sublayer.post, work.delta);
    }
    if (c.ends && c.ends->num_rows) finish(team, *c.ends);
  }

 private:
  const TandemLayers& c;
  const int64_t tokens;
  const DType dtype;
  const Workspace work;
  AttentionPlans plans;

  // Rows that the weight will multiply.
  Activations rows(const void* x, const TandemLinear* weight) const {
    return {x, dtype, tokens, work.quantized, weight->order};
  }

  // Scale of the result that has not joined the residual stream yet.
  float scale_before(int sublayer) const { return sublayer > 0 ? c.sublayers[sublayer - 1].scale : 1.0f; }

  RopeStore store_to(int group) const {
    const TandemGroup& g = c.groups[group];
    return {work.projected, c.positions, g.slots, tokens, int64_t(g.num_blocks) * g.block_size, g.block_size, dtype,
            c.attention.interleaved != 0};
  }

  void embed(Team& team, const TandemEnds& ends) {
    team.share(tokens, [&](int64_t t) {
      float* row = work.hidden + t * c.hidden_size;
      const int64_t from = ends.token_ids[t] * c.hidden_size;
      for (int i = 0; i < c.hidden_size; i += kLanes)
        store(row + i, load_as_float(ends.embedding, from + i, dtype, nullptr) * splat(ends.embed_scale));
      if (!ends.learned_positions) return;
      const int64_t position = (c.positions[t] + ends.position_offset) * c.hidden_size;
      for (int i = 0; i < c.hidden_size; i += kLanes)
        store(row + i, load(row + i) + load_as_float(ends.learned_positions, position + i, dtype, nullptr));
    });
    team.wait();
  }

  void attend(Team& team, const TandemAttentionMixer& a, void* out) {
    linear_in_team(team, a.qkv, rows(work.normed, a.qkv), tokens, work.projected, dtype);
    if (a.gate) {
      // Its rows may want another form than qkv's.
      const bool ready = is_quantized(a.qkv) && a.qkv->order == a.gate->order;
      if (is_quantized(a.gate) && !ready) quantize(team, work.normed, a.gate);
      linear_in_team(team, a.gate, rows(work.normed, a.gate), tokens, work.gate, dtype);
    }
    rope_store_in_team(team, store_to(a.group), a.heads, a.cache);
    plans.of(a).run_in_team(team, {a.cache, a.sinks, a.scale, a.softcap});
    if (a.gate)
      sigmoid_gate_in_team(team, rows(work.attended, a.o), work.gate, a.gate->stride == a.heads.num_heads, tokens,
                           a.heads.num_heads, a.heads.v_dim, is_quantized(a.o));
    else if (is_quantized(a.o)) quantize(team, work.attended, a.o);
    linear_in_team(team, a.o, rows(work.attended, a.o), tokens, out, dtype);
  }

  void feed_forward(Team& team, const TandemMlp& mlp, void* out) {
    linear_in_team(team, mlp.up, rows(work.normed, mlp.up), tokens, work.projected, dtype);
    activate_in_team(team, work.projected, dtype, mlp.act, rows(work.product, mlp.down), tokens, mlp.down->depth,
                     is_quantized(mlp.down));
    linear_in_team(team, mlp.down, rows(work.product, mlp.down), tokens, out, dtype);
  }

  void quantize(Team& team, const void* x, const TandemLinear* weight) {
    team.share(tokens, [&](int64_t r) { quantize_row(rows(x, weight), r, weight->depth); });
    team.wait();
  }

  void norm(Team& team, const TandemNorm& by, void* x) {
    if (by.kind != int(NormKind::kNone))
      norm_rows_in_team(team, x, dtype, by, {x, dtype, tokens, nullptr}, tokens, c.hidden_size, false);
  }

  // delta += second, rounded to their dtype.
  void add_second(Team& team) {
    team.share(tokens, [&](int64_t r) {
      for (int64_t i = r * c.hidden_size; i < (r + 1) * c.hidden_size; i += kLanes)
        store_from_float(work.delta, i, dtype,
                         load_as_float(work.delta, i, dtype, nullptr) + load_as_float(work.second, i, dtype, nullptr));
    });
    team.wait();
  }

  void finish(Team& team, const TandemEnds& ends) {
    const Activations sampled = {work.normed, dtype, ends.num_rows, work.quantized, ends.head->order};
    add_norm_in_team(team, work.hidden, work.delta, scale_before(c.end), ends.norm, sampled, ends.num_rows,
                     c.hidden_size, is_quantized(ends.head), ends.rows);
    linear_in_team(team, ends.head, sampled, ends.num_rows, ends.logits, DType::kFloat32);
    team.share(ends.num_rows, [&](int64_t r) {
      float* row = ends.logits + r * ends.vocab_size;
      finish_logits(row, ends.vocab_size, ends.logit_scale, ends.logit_cap);
      const int64_t likeliest = argmax(row, ends.vocab_size);
      ends.likeliest[r] = std::isfinite(row[likeliest]) ? likeliest : -1;
    });
    team.wait();
  }
};

}  // namespace

extern "C" int64_t tandem_work_done() { return work_done.load(std::memory_order_relaxed); }

// See Decoder::check_and_plan for the result; if it is not -1, nothing was computed.
extern "C" int64_t tandem_decoder_layers(const TandemLayers* call) {
  Decoder decoder(*call);
  if (const int64_t wrong = decoder.check_and_plan(); wrong != -1) return wrong;
  with_team(call->attention.num_threads, [&](Team& team) { decoder.run_in_team(team); });
  return -1;
}
