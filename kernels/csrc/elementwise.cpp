// What a decoder's sublayers do between their matrix products, each pass over memory once, in float32 inside.

#include "elementwise.h"

#include <algorithm>

namespace {

// Below this much work, waking other threads costs more than they save.
constexpr int64_t kParallelElements = 1 << 14;

inline int threads_for(int64_t elements, int num_threads) { return elements < kParallelElements ? 1 : num_threads; }

// Inlined, so that a caller's constants, such as a dtype, leave no decisions in the loops. x and out may be the same row.
template <bool Centred>
__attribute__((always_inline)) inline void normalize_row(const void* x, int64_t from, int width, DType dtype,
                                                         const TandemNorm& norm, void* out, int64_t to,
                                                         DType out_dtype) {
  Vec total{}, squares{};
  for (int i = 0; Centred && i < width; i += kLanes) total += load_as_float(x, from + i, dtype, nullptr);
  const Vec mean = splat(Centred ? sum(total) / width : 0.0f);
  for (int i = 0; i < width; i += kLanes) {
    Vec v = load_as_float(x, from + i, dtype, nullptr);
    if (Centred) v -= mean;
    squares = fma(v, v, squares);
  }
  const Vec factor = splat(1.0f / __builtin_sqrtf(sum(squares) / width + norm.eps));
  auto scale = [&](auto finish) {
    for (int i = 0; i < width; i += kLanes) {
      Vec v = load_as_float(x, from + i, dtype, nullptr);
      if (Centred) v -= mean;
      store_from_float(out, to + i, out_dtype, finish(v * factor, i));
    }
  };
  const float *weight = norm.weight, *bias = norm.bias;
  if (weight && !bias) scale([&](Vec v, int i) { return v * load(weight + i); });
  else
    scale([&](Vec v, int i) {
      if (weight) v *= load(weight + i);
      return bias ? v + load(bias + i) : v;
    });
}

__attribute__((always_inline)) inline void normalize(const void* x, int64_t from, int width, DType dtype,
                                                     const TandemNorm& norm, void* out, int64_t to, DType out_dtype) {
  switch ((NormKind)norm.kind) {
    case NormKind::kRms: return normalize_row<false>(x, from, width, dtype, norm, out, to, out_dtype);
    case NormKind::kLayer: return normalize_row<true>(x, from, width, dtype, norm, out, to, out_dtype);
    case NormKind::kNone:
      for (int i = 0; i < width; i += kLanes)
        store_from_float(out, to + i, out_dtype, load_as_float(x, from + i, dtype, nullptr));
  }
}

// x * sigmoid(by). Beyond +-126 the sigmoid is 0 or 1 to float32 anyway.
inline Vec times_sigmoid(Vec x, Vec by) {
  Vec exponent = by * splat(-kLog2E);
  exponent = exponent > splat(126.0f) ? splat(126.0f) : exponent;
  return x / (splat(1.0f) + exp2_of(exponent));
}

// x / 2 * erfc(-x / sqrt(2)), with a rational approximation of erfc whose relative error is below 1.2e-7 (Press et al.,
// Numerical Recipes, 6.2).
inline Vec gelu(Vec x) {
  constexpr float kCoefficients[] = {0.17087277f,  -0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f,
                                     -0.18628806f, 0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  const Vec size = maximum(x, -x) * splat(0.70710678f), t = splat(1.0f) / (splat(1.0f) + size * splat(0.5f));
  Vec p = splat(kCoefficients[0]);
  for (int i = 1; i < 10; ++i) p = fma(p, t, splat(kCoefficients[i]));
  const Vec tail = splat(0.5f) * t * exp2_of((p - size * size) * splat(kLog2E));
  return x * (x < Vec{} ? tail : splat(1.0f) - tail);
}

// x / 2 * (1 + tanh(u)) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Vec gelu_tanh(Vec x) {
  return times_sigmoid(x, x * fma(x * x, splat(1.59576912f * 0.044715f), splat(1.59576912f)));
}

// A NaN stays one.
inline Vec relu(Vec x) { return x < Vec{} ? Vec{} : x; }

// act(gate) * up or act(x) for each vector of a row.
template <bool Gated, class Act>
inline void map_row(const void* x, int64_t row, DType dtype, const Activations& out, int width, Act act) {
  const int64_t from = row * width * (Gated ? 2 : 1);
  auto apply = [&](DType dtype) __attribute__((always_inline)) {
    for (int i = 0; i < width; i += kLanes) {
      Vec v = act(load_as_float(x, from + i, dtype, nullptr));
      if (Gated) v *= load_as_float(x, from + width + i, dtype, nullptr);
      store_from_float((void*)out.x, row * width + i, out.dtype, v);
    }
  };
  if (dtype == out.dtype) apply(out.dtype);
  else apply(dtype);
}

inline void clamped_row(const void* x, int64_t row, DType dtype, float limit, const Activations& out, int width) {
  const Vec most = splat(limit), least = splat(-limit);
  for (int i = 0; i < width; i += kLanes) {
    Vec gate = load_as_float(x, 2 * row * width + i, dtype, nullptr);
    Vec up = load_as_float(x, (2 * row + 1) * width + i, dtype, nullptr);
    gate = gate > most ? most : gate;
    up = up > most ? most : up < least ? least : up;
    store_from_float((void*)out.x, row * width + i, out.dtype,
                     times_sigmoid(gate, gate * splat(1.702f)) * (up + splat(1.0f)));
  }
}

inline Vec splat_element(const void* data, int64_t i, DType dtype) {
  float lanes[kLanes] = {};
  std::memcpy(lanes, (const char*)data + i * bytes_of(dtype), bytes_of(dtype));
  return splat(load_as_float(lanes, 0, dtype, nullptr)[0]);
}

// Rotates the first `dims` elements; those that share a vector with the last of them are multiplied by 1.
inline void rotate_head(void* qkv, int64_t from, DType dtype, const float* by, int dims) {
  auto apply = [&](int d, Vec rotation) {
    store_from_float(qkv, from + d, dtype, rotate(load_as_float(qkv, from + d, dtype, nullptr), rotation));
  };
  int d = 0;
  for (; d + kLanes <= dims; d += kLanes) apply(d, load(by + d));
  if (d == dims) return;
  float rest[kLanes];
  for (int i = 0; i < kLanes; ++i) rest[i] = d + i < dims ? by[d + i] : float(i % 2 == 0);
  apply(d, load(rest));
}

}  // namespace

void add_norm_in_team(Team& team, float* hidden, const void* delta, float scale, const TandemNorm& norm,
                      const Activations& normed, int64_t rows, int width, bool quantize, const int64_t* from) {
  team.share(rows, [&](int64_t r) {
    const int64_t begin = (from ? from[r] : r) * width;
    if (delta)
      for (int64_t i = begin; i < begin + width; i += kLanes)
        store(hidden + i, fma(load_as_float(delta, i, normed.dtype, nullptr), splat(scale), load(hidden + i)));
    normalize(hidden, begin, width, DType::kFloat32, norm, (void*)normed.x, r * width, normed.dtype);
    if (quantize) quantize_row(normed, r, width);
  });
  team.wait();
}

void norm_rows_in_team(Team& team, const void* x, DType dtype, const TandemNorm& norm, const Activations& out,
                       int64_t rows, int width, bool quantize) {
  team.share(rows, [&](int64_t r) {
    normalize(x, r * width, width, dtype, norm, (void*)out.x, r * width, out.dtype);
    if (quantize) quantize_row(out, r, width);
  });
  team.wait();
}

void activate_row(const void* x, DType dtype, const TandemActivation& by, const Activations& out, int64_t row,
                  int width, bool quantize) {
  auto apply = [&](auto act) {
    if (by.gated) map_row<true>(x, row, dtype, out, width, act);
    else map_row<false>(x, row, dtype, out, width, act);
  };
  if (by.limit != 0) clamped_row(x, row, dtype, by.limit, out, width);
  else
    switch ((Activation)by.act) {
      case Activation::kSilu: apply([](Vec v) { return times_sigmoid(v, v); }); break;
      case Activation::kGelu: apply(gelu); break;
      case Activation::kGeluTanh: apply(gelu_tanh); break;
      case Activation::kRelu: apply(relu); break;
      case Activation::kRelu2: apply([](Vec v) { return relu(v) * relu(v); }); break;
    }
  if (quantize) quantize_row(out, row, width);
}

void activate_in_team(Team& team, const void* x, DType dtype, const TandemActivation& by, const Activations& out,
                      int64_t rows, int width, bool quantize) {
  team.share(rows, [&](int64_t r) { activate_row(x, dtype, by, out, r, width, quantize); });
  team.wait();
}

void sigmoid_gate_in_team(Team& team, const Activations& x, const void* gate, bool per_head, int64_t rows, int heads,
                          int size, bool quantize) {
  team.share(rows, [&](int64_t r) {
    for (int64_t h = r * heads; h < (r + 1) * heads; ++h)
      for (int64_t i = h * size; i < (h + 1) * size; i += kLanes) {
        const Vec by = per_head ? splat_element(gate, h, x.dtype) : load_as_float(gate, i, x.dtype, nullptr);
        store_from_float((void*)x.x, i, x.dtype, times_sigmoid(load_as_float(x.x, i, x.dtype, nullptr), by));
      }
    if (quantize) quantize_row(x, r, heads * size);
  });
  team.wait();
}

void finish_logits(float* row, int64_t size, float scale, float cap) {
  if (scale == 1 && cap == 0) return;
  const Vec by = splat(cap == 0 ? scale : scale / cap);
  auto finished = [&](Vec v) { return cap == 0 ? v * by : tanh_of(v * by) * splat(cap); };
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(row + i, finished(load(row + i)));
  if (i == size) return;
  float rest[kLanes] = {};
  std::memcpy(rest, row + i, (size - i) * sizeof(float));
  store(rest, finished(load(rest)));
  std::memcpy(row + i, rest, (size - i) * sizeof(float));
}

int64_t RopeStore::first_wrong(int64_t num_positions) const {
  for (int64_t t = 0; t < tokens; ++t)
    if (positions[t] < 0 || positions[t] >= num_positions || slots[t] < 0 || slots[t] >= num_slots) return t;
  return -1;
}

void rope_store_in_team(Team& team, const RopeStore& c, const TandemHeads& heads, void* cache) {
  const CachePieces pieces = {heads.num_kv_heads, c.block_size, heads.k_dim, heads.v_dim, c.dtype, c.interleaved};
  auto norm_heads = [&](int64_t from, int count, int size, const TandemNorm& norm, bool whole) {
    if (norm.kind == int(NormKind::kNone)) return;
    if (whole) return normalize(c.qkv, from, count * size, c.dtype, norm, c.qkv, from, c.dtype);
    for (int64_t at = from; at < from + int64_t(count) * size; at += size)
      normalize(c.qkv, at, size, c.dtype, norm, c.qkv, at, c.dtype);
  };
  team.share(c.tokens, [&](int64_t t) {
    auto finish = [&](int64_t from, int count, const TandemNorm& norm) {
      if (!heads.norm_after_rope) norm_heads(from, count, heads.k_dim, norm, heads.norm_whole);
      if (heads.rotations)
        for (int h = 0; h < count; ++h)
          rotate_head(c.qkv, from + int64_t(h) * heads.k_dim, c.dtype,
                      heads.rotations + c.positions[t] * heads.rope_dims, heads.rope_dims);
      if (heads.norm_after_rope) norm_heads(from, count, heads.k_dim, norm, heads.norm_whole);
    };
    const int64_t queries = t * heads.row(), keys = queries + int64_t(heads.num_heads) * heads.k_dim,
                  values = keys + int64_t(heads.num_kv_heads) * heads.k_dim, block = c.slots[t] / c.block_size;
    const int offset = int(c.slots[t] % c.block_size);
    finish(queries, heads.num_heads, heads.q_norm);
    finish(keys, heads.num_kv_heads, heads.k_norm);
    norm_heads(values, heads.num_kv_heads, heads.v_dim, heads.v_norm, false);
    auto row = [&](int64_t at) { return (const char*)c.qkv + at * bytes_of(c.dtype); };
    for (int h = 0; h < heads.num_kv_heads; ++h) {
      pieces.keys().put_key(pieces.keys(cache, block, h), offset, row(keys + int64_t(h) * heads.k_dim));
      pieces.values().put_value(pieces.values(cache, block, h), offset, row(values + int64_t(h) * heads.v_dim));
    }
  });
  team.wait();
}

extern "C" {

// See add_norm_in_team; out is of the given dtype.
void tandem_add_norm(float* hidden, const void* delta, const TandemNorm* norm, void* out, int64_t rows, int32_t width,
                     int32_t dtype, float scale, int32_t num_threads) {
  const Activations normed = {out, (DType)dtype, rows, nullptr};
  with_team(threads_for(rows * width, num_threads), [&](Team& team) {
    add_norm_in_team(team, hidden, delta, scale, *norm, normed, rows, width, false);
  });
}

// See norm_rows_in_team.
void tandem_norm_rows(const void* x, const TandemNorm* norm, void* out, int64_t rows, int32_t width, int32_t dtype,
                      int32_t out_dtype, int32_t num_threads) {
  const Activations to = {out, (DType)out_dtype, rows, nullptr};
  with_team(threads_for(rows * width, num_threads),
            [&](Team& team) { norm_rows_in_team(team, x, (DType)dtype, *norm, to, rows, width, false); });
}

// See activate_in_team.
void tandem_activate(const void* x, const TandemActivation* by, void* out, int64_t rows, int32_t width, int32_t dtype,
                     int32_t out_dtype, int32_t num_threads) {
  const Activations to = {out, (DType)out_dtype, rows, nullptr};
  with_team(threads_for(rows * width, num_threads),
            [&](Team& team) { activate_in_team(team, x, (DType)dtype, *by, to, rows, width, false); });
}

// See sigmoid_gate_in_team.
void tandem_sigmoid_gate(void* x, const void* gate, int32_t per_head, int64_t rows, int32_t heads, int32_t size,
                         int32_t dtype, int32_t num_threads) {
  const Activations activations = {x, (DType)dtype, rows, nullptr};
  with_team(threads_for(rows * heads * size, num_threads), [&](Team& team) {
    sigmoid_gate_in_team(team, activations, gate, per_head != 0, rows, heads, size, false);
  });
}

// See finish_logits; logits [rows, size], dense.
void tandem_finish_logits(float* logits, int64_t rows, int64_t size, float scale, float cap, int32_t num_threads) {
  with_team(threads_for(rows * size, num_threads), [&](Team& team) {
    team.share(rows, [&](int64_t r) { finish_logits(logits + r * size, size, scale, cap); });
    team.wait();
  });
}

// See RopeStore. Returns the first token whose position or slot lies outside, having changed nothing, or -1.
int64_t tandem_rope_store(const TandemHeads* heads, void* qkv, const int64_t* positions, const int64_t* slots,
                          void* cache, int64_t tokens, int64_t num_slots, int32_t block_size, int32_t dtype,
                          int32_t num_threads) {
  const RopeStore call = {qkv, positions, slots, tokens, num_slots, block_size, (DType)dtype, false};
  const int64_t wrong = call.first_wrong(heads->num_positions);
  if (wrong >= 0) return wrong;
  with_team(threads_for(tokens * heads->row(), num_threads),
            [&](Team& team) { rope_store_in_team(team, call, *heads, cache); });
  return -1;
}
}
