// The gated delta rule (Yang, Kautz, Hatamizadeh, 2024, arxiv 2412.06464), token by token.
//
//   x_t           silu of a convolution over the token's and the last taps - 1 inputs, per channel; split into q, k, v
//   q, k          divided by their lengths; q also by sqrt(k_dim)
//   decay_t       exp(-rate * softplus(a_t + bias)), per value head, or per row of the state (KDA, arxiv 2510.26692)
//   S_t           diag(decay_t) S_{t-1} + k_t (sigmoid(b_t) (v_t - k_t' diag(decay_t) S_{t-1}))'
//   out_t         norm(q_t' S_t) * silu(z_t)
//
// A state is [k_dim, v_dim] per value head; its columns do not meet. A piece of work is some columns of one sequence and
// value head: a tile of kLanes columns stays in the first-level cache for a span of tokens. Every token does the same
// arithmetic in the same order, whether it comes in a chunk, alone or as a draft's node, so its bits depend on nothing
// but its sequence. The published algorithms for chunks need fewer passes over the state, but round differently.
//
// A node of a tree continues its parent's state. Tiles that more than the next node continues are copied; nothing is
// written to a tree's slots.

#include "gated_delta.h"

#include <algorithm>
#include <bit>

#include "scratch.h"

namespace {

constexpr int kMaxTreeNodes = 64;
// Columns of a piece of work: neighbours in memory, so that a row of the state is read in whole cache lines.
constexpr int kColumns = 64;
// Tokens for which a tile stays in the cache; their q and k take 16 KB of it.
constexpr int kSpan = 16;
// Added to the squares of q and k.
constexpr float kLengthEps = 1e-6f;

// ln(1 + e^x)
inline Vec softplus(Vec x) {
  const Vec y = exp2_of((x < Vec{} ? x : -x) * splat(kLog2E));
  // ln(1 + y) = 2 artanh(s) with s = y / (2 + y) <= 1 / 3, exact also for small y.
  const Vec s = y / (splat(2.0f) + y), square = s * s;
  Vec series = splat(1 / 15.0f);
  for (int n = 13; n > 0; n -= 2) series = fma(series, square, splat(1.0f / float(n)));
  return maximum(x, Vec{}) + splat(2.0f) * s * series;
}

inline Vec sigmoid(Vec x) {
  // Beyond 126 the result is 0 to float32 anyway.
  const Vec exponent = x * splat(-kLog2E);
  return splat(1.0f) / (splat(1.0f) + exp2_of(exponent > splat(126.0f) ? splat(126.0f) : exponent));
}

inline float element(const TandemRows& rows, int64_t row, int i, DType dtype) {
  const int64_t at = row * rows.stride + i;
  if (dtype == DType::kFloat32) return ((const float*)rows.x)[at];
  // Vector loads would read beyond the last row.
  uint16_t bits[kLanes] = {((const uint16_t*)rows.x)[at]};
  return load_as_float(bits, 0, dtype, nullptr)[0];
}

// One token in one tile [k_dim][kLanes]; v -> q' S. One copy in machine code: the compiler may round another differently.
template <bool kPerChannel>
__attribute__((noinline)) void advance(float* state, int k_dim, const float* q, const float* k, const float* decay, float beta, float* v) {
  const Vec all = splat(decay[0]);
  Vec seen[4] = {};
  for (int i = 0; i < k_dim; i += 4)
    for (int u = 0; u < 4; ++u) {
      float* row = state + (i + u) * kLanes;
      Vec s = load(row);
      if constexpr (kPerChannel) store(row, s = s * splat(decay[i + u]));
      seen[u] = fma(s, splat(k[i + u]), seen[u]);
    }
  Vec known = (seen[0] + seen[1]) + (seen[2] + seen[3]);
  if constexpr (!kPerChannel) known = known * all;
  const Vec delta = (load(v) - known) * splat(beta);
  Vec out[4] = {};
  for (int i = 0; i < k_dim; i += 4)
    for (int u = 0; u < 4; ++u) {
      float* row = state + (i + u) * kLanes;
      Vec s = load(row);
      if constexpr (!kPerChannel) s = s * all;
      store(row, s = fma(delta, splat(k[i + u]), s));
      out[u] = fma(s, splat(q[i + u]), out[u]);
    }
  store(v, (out[0] + out[1]) + (out[2] + out[3]));
}

}  // namespace

StateStep::StateStep(const TandemStates& call)
    : call(call), seq_of(call.num_tokens), parent(call.num_tokens), forks(call.num_tokens) {
  for (int b = 0; b < call.num_seqs && first_wrong < 0; ++b)
    if (!plan(b)) first_wrong = b;
}

bool StateStep::is_tree(int seq) const {
  const int first = call.query_start_loc[seq], n = call.query_start_loc[seq + 1] - first;
  return call.ancestor_bits && n > 0 && n <= kMaxTreeNodes && call.ancestor_bits[first] != 0;
}

bool StateStep::plan(int seq) {
  const int first = call.query_start_loc[seq], end = call.query_start_loc[seq + 1];
  auto is_slot = [&](int32_t slot) { return slot >= -1 && slot < call.num_slots; };
  if (first < (seq ? call.query_start_loc[seq - 1] : 0) || end < first || end > call.num_tokens) return false;
  if (seq == 0 && first != 0) return false;
  if (!is_slot(call.initial_slots[seq]) || !is_slot(call.final_slots[seq]) || !is_slot(call.snapshot_slots[seq]))
    return false;
  if (call.snapshot_slots[seq] >= 0 && (call.snapshot_rows[seq] < 1 || call.snapshot_rows[seq] > end - first))
    return false;
  const bool tree = is_tree(seq);
  if (tree && (call.final_slots[seq] >= 0 || call.snapshot_slots[seq] >= 0)) return false;
  for (int t = first; t < end; ++t) {
    seq_of[t] = seq;
    parent[t] = t == first ? -1 : t - 1;
    if (!tree) continue;
    const int node = t - first;
    const uint64_t bits = call.ancestor_bits[t], others = bits ^ uint64_t(1) << node;
    if (!(bits >> node & 1) || (others >> node)) return false;
    if (!others) {
      if (node) return false;  // a second root
      continue;
    }
    // The parent is the last of the ancestors, and has all others of them.
    const int from = 63 - std::countl_zero(others);
    if (uint64_t(call.ancestor_bits[first + from]) != others) return false;
    parent[t] = first + from;
    if (from != node - 1) forks[parent[t]] = true;
  }
  return true;
}

class GatedDelta {
 public:
  GatedDelta(const StateStep& step, const TandemGatedDelta& layer, const TandemGatedDeltaInputs& inputs, DType dtype,
             float* floats)
      : step(step), c(layer), in(inputs), dtype(dtype), tokens(step.call.num_tokens),
        channels(2 * c.k_heads * c.k_dim + c.v_heads * c.v_dim), decays(c.decay_per_channel ? c.k_dim : 1) {
    q = floats;
    k = q + tokens * c.k_heads * c.k_dim;
    v = k + tokens * c.k_heads * c.k_dim;
    decay = v + tokens * c.v_heads * c.v_dim;
    beta = decay + tokens * c.v_heads * decays;
  }

  int pieces_of_token() const { return 2 * c.k_heads + c.v_heads; }
  int pieces_of_head() const { return (c.v_dim + kColumns - 1) / kColumns; }

  // One head of q, k or v of one token.
  void prepare(int64_t token, int piece) {
    const int head = piece < 2 * c.k_heads ? piece % c.k_heads : piece - 2 * c.k_heads;
    if (piece >= 2 * c.k_heads) {
      convolve(token, 2 * c.k_heads * c.k_dim + head * c.v_dim, c.v_dim, at(v, head, token, c.v_dim));
      const float b = element(in.b, token, head, dtype);
      at(beta, head, token, 1)[0] = sigmoid(splat(b))[0];
      float* decays_of = at(decay, head, token, decays);
      const Vec rate = splat(-c.decay_rate[head] * kLog2E);
      for (int i = 0; i < decays; ++i) {
        const int n = head * decays + i;
        decays_of[i] = exp2_of(rate * softplus(splat(element(in.a, token, n, dtype) + c.decay_bias[n])))[0];
      }
      return;
    }
    const bool is_query = piece < c.k_heads;
    float* out = at(is_query ? q : k, head, token, c.k_dim);
    convolve(token, piece * c.k_dim, c.k_dim, out);
    Vec squares{};
    for (int i = 0; i < c.k_dim; i += kLanes) squares = fma(load(out + i), load(out + i), squares);
    float factor = 1.0f / __builtin_sqrtf(sum(squares) + kLengthEps);
    if (is_query) factor = factor / __builtin_sqrtf(float(c.k_dim));
    for (int i = 0; i < c.k_dim; i += kLanes) store(out + i, load(out + i) * splat(factor));
  }

  // Some columns of a value head: all tokens of a sequence.
  void scan(int seq, int head, int piece) {
    const TandemStates& s = step.call;
    const int first = s.query_start_loc[seq], end = s.query_start_loc[seq + 1];
    if (first == end) return;
    const int column = piece * kColumns, tiles = std::min(kColumns, c.v_dim - column) / kLanes;
    const int64_t tile = int64_t(c.k_dim) * kLanes;
    const bool tree = step.is_tree(seq);
    static thread_local Scratch memory;
    float* state = (float*)memory.of((tiles + (tree ? end - first : 0)) * tile * sizeof(float));
    load_tiles(state, s.initial_slots[seq], head, column, tiles);
    if (tree) {
      float* saved = state + tiles * tile;
      for (int n = 0; n < tiles; ++n) walk(state + n * tile, saved, first, end, head, column + n * kLanes);
      return;
    }
    const int snapshot = s.snapshot_slots[seq] < 0 ? end : first + s.snapshot_rows[seq];
    for (int from = first; from < end;) {
      const int until = std::min({from + kSpan, end, from < snapshot ? snapshot : end});
      for (int n = 0; n < tiles; ++n)
        for (int t = from; t < until; ++t) advance(state + n * tile, head, t, column + n * kLanes);
      from = until;
      if (from == snapshot && s.snapshot_slots[seq] >= 0)
        store_tiles(state, s.snapshot_slots[seq], head, column, tiles);
    }
    if (s.final_slots[seq] >= 0) store_tiles(state, s.final_slots[seq], head, column, tiles);
  }

  // The inputs that the tokens after these convolve with.
  void keep_inputs(int seq) {
    const TandemStates& s = step.call;
    const int first = s.query_start_loc[seq], end = s.query_start_loc[seq + 1];
    if (first == end) return;
    // The snapshot first: the final slot may be the initial one.
    if (s.snapshot_slots[seq] >= 0) keep_inputs(seq, first + s.snapshot_rows[seq] - 1, s.snapshot_slots[seq]);
    if (s.final_slots[seq] >= 0) keep_inputs(seq, end - 1, s.final_slots[seq]);
  }

  // Norm and gate of one token.
  void finish(int64_t token, const Activations& out) {
    for (int head = 0; head < c.v_heads; ++head) {
      const float* x = at(v, head, token, c.v_dim);
      Vec squares{};
      for (int i = 0; i < c.v_dim; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
      const Vec factor = splat(1.0f / __builtin_sqrtf(sum(squares) / float(c.v_dim) + c.eps));
      for (int i = 0; i < c.v_dim; i += kLanes) {
        const Vec z = load_as_float(in.z.x, token * in.z.stride + head * c.v_dim + i, dtype, nullptr);
        const Vec gate = c.sigmoid_gate ? sigmoid(z) : z * sigmoid(z);
        store_from_float((void*)out.x, (token * c.v_heads + head) * c.v_dim + i, dtype,
                         load(x + i) * factor * load(c.norm + i) * gate);
      }
    }
  }

 private:
  // Heads lie apart, so that the tokens of one follow each other.
  float* at(float* base, int head, int64_t token, int width) const { return base + (head * tokens + token) * width; }

  // The input `back` tokens before one; null: nothing came before.
  const char* input(int seq, int token, int back) const {
    const int size = bytes_of(dtype);
    for (; back > 0 && token >= 0; --back) token = step.parent[token];
    if (token >= 0) return (const char*)in.qkv.x + token * in.qkv.stride * size;
    // The last of the kept inputs is the one before the first token.
    const int slot = step.call.initial_slots[seq], row = c.taps - 2 - back;
    return slot < 0 ? nullptr : (const char*)c.conv + (int64_t(slot) * (c.taps - 1) + row) * channels * size;
  }

  void convolve(int64_t token, int channel, int width, float* out) const {
    const char* inputs[kMaxTaps];
    for (int n = 0; n < c.taps; ++n) inputs[n] = input(step.seq_of[token], int(token), c.taps - 1 - n);
    for (int i = channel; i < channel + width; i += kLanes) {
      Vec x{};
      for (int n = 0; n < c.taps; ++n)
        if (inputs[n])
          x = fma(load_as_float(inputs[n], i, dtype, nullptr), load(c.conv_weight + n * channels + i), x);
      store(out + i - channel, x * sigmoid(x));
    }
  }

  void keep_inputs(int seq, int last, int slot) {
    const int64_t row = int64_t(channels) * bytes_of(dtype);
    char* to = (char*)c.conv + slot * (c.taps - 1) * row;
    // In the order of the text: in the initial slot itself, every row is read before it is overwritten.
    for (int n = 0; n < c.taps - 1; ++n) {
      const char* from = input(seq, last, c.taps - 2 - n);
      if (from) std::memmove(to + n * row, from, row);
      else std::memset(to + n * row, 0, row);
    }
  }

  void advance(float* state, int head, int64_t token, int column) {
    const int k_head = head / (c.v_heads / c.k_heads);
    const float *qt = at(q, k_head, token, c.k_dim), *kt = at(k, k_head, token, c.k_dim);
    const float *decay_of = at(decay, head, token, decays), beta_of = at(beta, head, token, 1)[0];
    float* vt = at(v, head, token, c.v_dim) + column;
    if (c.decay_per_channel) ::advance<true>(state, c.k_dim, qt, kt, decay_of, beta_of, vt);
    else ::advance<false>(state, c.k_dim, qt, kt, decay_of, beta_of, vt);
  }

  // A tree's tokens, parents before children; saved has a tile per token.
  void walk(float* state, float* saved, int first, int end, int head, int column) {
    const int64_t tile = int64_t(c.k_dim) * kLanes;
    for (int t = first; t < end; ++t) {
      if (t > first && step.parent[t] != t - 1)
        std::memcpy(state, saved + (step.parent[t] - first) * tile, tile * sizeof(float));
      advance(state, head, t, column);
      if (step.forks[t]) std::memcpy(saved + (t - first) * tile, state, tile * sizeof(float));
    }
  }

  float* rows_of(int slot, int head, int column) const {
    return c.recurrent + (int64_t(slot) * c.v_heads + head) * c.k_dim * c.v_dim + column;
  }

  void load_tiles(float* state, int slot, int head, int column, int tiles) const {
    const int64_t tile = int64_t(c.k_dim) * kLanes;
    if (slot < 0) return std::fill_n(state, tiles * tile, 0.0f), void();
    const float* from = rows_of(slot, head, column);
    for (int i = 0; i < c.k_dim; ++i, from += c.v_dim)
      for (int n = 0; n < tiles; ++n) store(state + n * tile + i * kLanes, load(from + n * kLanes));
  }

  void store_tiles(const float* state, int slot, int head, int column, int tiles) const {
    const int64_t tile = int64_t(c.k_dim) * kLanes;
    float* to = rows_of(slot, head, column);
    for (int i = 0; i < c.k_dim; ++i, to += c.v_dim)
      for (int n = 0; n < tiles; ++n) store(to + n * kLanes, load(state + n * tile + i * kLanes));
  }

  const StateStep& step;
  const TandemGatedDelta& c;
  const TandemGatedDeltaInputs& in;
  const DType dtype;
  const int64_t tokens;
  const int channels, decays;
  // By head, then token: [k_dim], [k_dim], [v_dim] (later the output), [decays], [1].
  float *q, *k, *v, *decay, *beta;
};

int64_t gated_delta_floats(const TandemGatedDelta& c, int64_t tokens) {
  const int64_t of_head = c.v_dim + (c.decay_per_channel ? c.k_dim : 1) + 1;
  return tokens * (2 * int64_t(c.k_heads) * c.k_dim + c.v_heads * of_head);
}

void gated_delta_in_team(Team& team, const StateStep& step, const TandemGatedDelta& layer,
                         const TandemGatedDeltaInputs& inputs, const Activations& out, bool quantize, float* floats) {
  GatedDelta rule(step, layer, inputs, out.dtype, floats);
  const int64_t tokens = step.num_tokens();
  const int pieces = rule.pieces_of_token(), columns = rule.pieces_of_head(), heads = layer.v_heads;
  team.share(tokens * pieces, [&](int64_t n) { rule.prepare(n / pieces, int(n % pieces)); });
  team.wait();
  const int64_t scans = int64_t(step.num_seqs()) * heads * columns;
  team.share(scans, [&](int64_t n) {
    rule.scan(int(n / columns / heads), int(n / columns % heads), int(n % columns));
  });
  team.share(step.num_seqs(), [&](int64_t n) { rule.keep_inputs(int(n)); });
  team.wait();
  team.share(tokens, [&](int64_t t) {
    rule.finish(t, out);
    if (quantize) quantize_row(out, t, layer.v_heads * layer.v_dim);
  });
  team.wait();
}

extern "C" {

// See gated_delta_in_team; out [num_tokens, v_heads * v_dim] of the given dtype. Returns
// the first sequence whose rows, bits or slots do not fit, having changed nothing, or -1.
int64_t tandem_gated_delta(const TandemStates* states, const TandemGatedDelta* layer,
                           const TandemGatedDeltaInputs* inputs, void* out, int32_t dtype, int32_t num_threads) {
  const StateStep step(*states);
  if (step.wrong() >= 0) return step.wrong();
  const Activations rows = {out, (DType)dtype, states->num_tokens, nullptr};
  static thread_local Scratch memory;
  float* floats = (float*)memory.of(gated_delta_floats(*layer, states->num_tokens) * sizeof(float));
  with_team(num_threads, [&](Team& team) { gated_delta_in_team(team, step, *layer, *inputs, rows, false, floats); });
  return -1;
}
}
