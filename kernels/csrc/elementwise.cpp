// What a decoder layer does between its matrix products, each pass over memory once, in float32 inside.

#include "elementwise.h"

#include <algorithm>

namespace {

// Below this much work, waking other threads costs more than they save.
constexpr int64_t kParallelElements = 1 << 14;

inline int threads_for(int64_t elements, int num_threads) { return elements < kParallelElements ? 1 : num_threads; }

// A row's values times 1 / rms and the weight.
inline void normalize(const void* x, int64_t from, int width, DType dtype, const float* weight, float eps, void* out,
                      int64_t to, DType out_dtype) {
  Vec squares{};
  for (int i = 0; i < width; i += kLanes) {
    Vec v = load_as_float(x, from + i, dtype, nullptr);
    squares = fma(v, v, squares);
  }
  const Vec factor = splat(1.0f / __builtin_sqrtf(sum(squares) / width + eps));
  for (int i = 0; i < width; i += kLanes) {
    Vec v = load_as_float(x, from + i, dtype, nullptr) * factor;
    store_from_float(out, to + i, out_dtype, v * load(weight + i));
  }
}

}  // namespace

void add_rms_norm_in_team(Team& team, float* hidden, const void* delta, const float* weight,
                          const Activations& normed, int64_t rows, int width, float eps, bool quantize,
                          const int64_t* from) {
  team.share(rows, [&](int64_t r) {
    const int64_t begin = (from ? from[r] : r) * width;
    if (delta)
      for (int64_t i = begin; i < begin + width; i += kLanes)
        store(hidden + i, load(hidden + i) + load_as_float(delta, i, normed.dtype, nullptr));
    normalize(hidden, begin, width, DType::kFloat32, weight, eps, (void*)normed.x, r * width, normed.dtype);
    if (quantize) quantize_row(normed, r, width);
  });
  team.wait();
}

void silu_mul_in_team(Team& team, const void* gate_up, const Activations& out, int64_t rows, int width,
                      bool quantize) {
  team.share(rows, [&](int64_t r) {
    for (int i = 0; i < width; i += kLanes) {
      Vec gate = load_as_float(gate_up, 2 * r * width + i, out.dtype, nullptr);
      Vec up = load_as_float(gate_up, (2 * r + 1) * width + i, out.dtype, nullptr);
      // Beyond +-126 the sigmoid is 0 or 1 to float32 anyway.
      Vec exponent = gate * splat(-kLog2E);
      exponent = exponent > splat(126.0f) ? splat(126.0f) : exponent;
      store_from_float((void*)out.x, r * width + i, out.dtype, gate / (splat(1.0f) + exp2_of(exponent)) * up);
    }
    if (quantize) quantize_row(out, r, width);
  });
  team.wait();
}

int64_t RopeStore::first_wrong() const {
  for (int64_t t = 0; t < tokens; ++t)
    if (positions[t] < 0 || positions[t] >= num_positions || slots[t] < 0 || slots[t] >= num_slots) return t;
  return -1;
}

void rope_store_in_team(Team& team, const RopeStore& c, const float* q_norm, const float* k_norm, void* cache) {
  const int D = c.head_size, heads = c.num_heads + 2 * c.num_kv_heads;
  const HeadShape shape = {c.block_size, D, c.dtype, c.interleaved};
  team.share(c.tokens, [&](int64_t t) {
    const float* by = c.rotations + c.positions[t] * D;
    const int offset = int(c.slots[t] % c.block_size);
    for (int h = 0; h < heads; ++h) {
      const int64_t from = (t * heads + h) * D;
      const bool is_query = h < c.num_heads, is_value = h >= c.num_heads + c.num_kv_heads;
      const int kv_head = is_query ? 0 : (h - c.num_heads) % c.num_kv_heads;
      char* piece =
          (char*)cache + ((c.slots[t] / c.block_size * 2 + is_value) * c.num_kv_heads + kv_head) * shape.bytes();
      const char* row = (const char*)c.qkv + from * bytes_of(c.dtype);
      if (is_value) {
        shape.put_value(piece, offset, row);
        continue;
      }
      const float* norm = is_query ? q_norm : k_norm;
      if (norm) normalize(c.qkv, from, D, c.dtype, norm, c.eps, c.qkv, from, c.dtype);
      for (int d = 0; d < D; d += kLanes)
        store_from_float(c.qkv, from + d, c.dtype,
                         rotate(load_as_float(c.qkv, from + d, c.dtype, nullptr), load(by + d)));
      if (!is_query) shape.put_key(piece, offset, row);
    }
  });
  team.wait();
}

extern "C" {

// See add_rms_norm_in_team; out is of the given dtype.
void tandem_add_rms_norm(float* hidden, const void* delta, const float* weight, void* out, int64_t rows, int32_t width,
                         int32_t dtype, float eps, int32_t num_threads) {
  const Activations normed = {out, (DType)dtype, rows, nullptr};
  with_team(threads_for(rows * width, num_threads), [&](Team& team) {
    add_rms_norm_in_team(team, hidden, delta, weight, normed, rows, width, eps, false);
  });
}

// See silu_mul_in_team.
void tandem_silu_mul(const void* gate_up, void* out, int64_t rows, int32_t width, int32_t dtype, int32_t num_threads) {
  const Activations product = {out, (DType)dtype, rows, nullptr};
  with_team(threads_for(rows * width, num_threads),
            [&](Team& team) { silu_mul_in_team(team, gate_up, product, rows, width, false); });
}

// See RopeStore. Returns the first token whose position or slot lies outside, having changed nothing, or -1.
int64_t tandem_rope_store(void* qkv, const int64_t* positions, const int64_t* slots, const float* rotations,
                          const float* q_norm, const float* k_norm, void* cache, int64_t tokens, int64_t num_positions,
                          int64_t num_slots, int32_t num_heads, int32_t num_kv_heads, int32_t head_size,
                          int32_t block_size, int32_t dtype, float eps, int32_t num_threads) {
  const RopeStore call = {qkv,       positions, slots,        rotations, tokens,     num_positions, num_slots,
                          num_heads, num_kv_heads, head_size, block_size, (DType)dtype, eps, false};
  const int64_t wrong = call.first_wrong();
  if (wrong >= 0) return wrong;
  const int64_t elements = tokens * (num_heads + 2 * num_kv_heads) * head_size;
  with_team(threads_for(elements, num_threads),
            [&](Team& team) { rope_store_in_team(team, call, q_norm, k_norm, cache); });
  return -1;
}
}
