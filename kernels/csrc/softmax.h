// The softmax of attention, key tile by key tile: running maximum, sum and weighted V per row.
#pragma once

#include <algorithm>
#include <cmath>

#include "product.h"
#include "tiles.h"

constexpr float kMinusInfinity = -INFINITY;

// A row's softmax so far: weights are 2^(score - base), with scores in units of log2.
struct State {
  float* base;  // [rows]; minus infinity before the first visible key
  float* sum;   // [rows, kLanes], the weights by lane
  float* acc;   // [rows, v_dim], weighted V
  static int64_t floats(int64_t rows, int64_t v_dim) { return rows * (1 + kLanes + v_dim); }
};

// The base follows the maximum when that has outgrown it by so much: weights stay far from overflow, and most
// tiles need no rescaling of what came before (after FlashAttention-4's conditional rescaling).
constexpr float kSlack = 8;

inline float power(float x) { return exp2_of(splat(x))[0]; }

// scores -> softcap * tanh(scores * scale / softcap)
inline void cap(float* scores, float scale, float softcap) {
  for (int t = 0; t < kTile; t += kLanes)
    store(scores + t, tanh_of(load(scores + t) * splat(scale / softcap)) * splat(softcap));
}

// One row of scores joins its state; writes the weights 2^(score - maximum), times V's scales per key or null.
template <class Type>
inline void soften(const float* scores, float unit, int row, State& state, int v_dim, const float* value_scales,
                   typename Type::Left* weights) {
  constexpr int kCount = kTile / kLanes;
  Vec s[kCount];
  for (int v = 0; v < kCount; ++v) s[v] = load(scores + v * kLanes);
  Vec top = s[0] * splat(unit);
  for (int v = 1; v < kCount; ++v) top = maximum(s[v] * splat(unit), top);
  float base = state.base[row];
  if (any_above(top, base + kSlack)) {
    const float old = base;
    state.base[row] = base = largest(top);
    if (old != kMinusInfinity) {
      const float shrink = power(old - base);
      store(state.sum + row * kLanes, load(state.sum + row * kLanes) * splat(shrink));
      float* acc = state.acc + int64_t(row) * v_dim;
      for (int d = 0; d < v_dim; d += kLanes) store(acc + d, load(acc + d) * splat(shrink));
    }
  }
  // A row that has seen no key yet has only scores of minus infinity, whose weight is 0 from any base.
  const Vec from = splat(base == kMinusInfinity ? 0.0f : -base);
  Vec total{};
  for (int v = 0; v < kCount; ++v) {
    s[v] = exp2_of(fma(s[v], splat(unit), from));
    total += s[v];
    if (value_scales) s[v] *= load(value_scales + v * kLanes);
  }
  for (int v = 0; v < kCount; ++v) {
    if constexpr (std::is_same_v<typename Type::Left, float>) store(weights + v * kLanes, s[v]);
    else to_bf16(weights + v * kLanes, s[v]);
  }
  store(state.sum + row * kLanes, load(state.sum + row * kLanes) + total);
}

// total <- total and split together, as if one softmax had seen the keys of both.
inline void merge_states(State& total, const State& split, int rows, int D) {
  for (int r = 0; r < rows; ++r) {
    if (split.base[r] == kMinusInfinity) continue;
    const float base = std::max(total.base[r], split.base[r]);
    const Vec a = splat(power(total.base[r] - base)), b = splat(power(split.base[r] - base));
    total.base[r] = base;
    auto add = [&](float* to, const float* from) { store(to, fma(load(to), a, load(from) * b)); };
    add(total.sum + r * kLanes, split.sum + r * kLanes);
    for (int64_t d = int64_t(r) * D; d < int64_t(r + 1) * D; d += kLanes) add(total.acc + d, split.acc + d);
  }
}
