// What a decoder layer does between its matrix products, each pass over memory once, in float32 inside.

#include <omp.h>

#include <algorithm>

#include "simd.h"

namespace {

// Below this much work, waking other threads costs more than they save.
constexpr int64_t kParallelElements = 1 << 14;

inline int threads_for(int64_t elements, int num_threads) { return elements < kParallelElements ? 1 : num_threads; }

// A row's values times 1 / rms and the weight; weight and result are of out_dtype.
inline void normalize(const void* x, int64_t from, int width, DType dtype, const void* weight, float eps, void* out,
                      int64_t to, DType out_dtype) {
  Vec squares{};
  for (int i = 0; i < width; i += kLanes) {
    Vec v = load_as_float(x, from + i, dtype, nullptr);
    squares = fma(v, v, squares);
  }
  const Vec factor = splat(1.0f / __builtin_sqrtf(sum(squares) / width + eps));
  for (int i = 0; i < width; i += kLanes) {
    Vec v = load_as_float(x, from + i, dtype, nullptr) * factor;
    store_from_float(out, to + i, out_dtype, v * load_as_float(weight, i, out_dtype, nullptr));
  }
}

}  // namespace

extern "C" {

// hidden += delta (unless null); out = hidden / rms(hidden) * weight. All [rows, width] dense; hidden is float32, the
// others are of one dtype.
void tandem_add_rms_norm(float* hidden, const void* delta, const void* weight, void* out, int64_t rows, int32_t width,
                         int32_t dtype_code, float eps, int32_t num_threads) {
  const DType dtype = (DType)dtype_code;
#pragma omp parallel for num_threads(threads_for(rows * width, num_threads)) schedule(static)
  for (int64_t r = 0; r < rows; ++r) {
    if (delta)
      for (int64_t i = r * width; i < (r + 1) * width; i += kLanes)
        store(hidden + i, load(hidden + i) + load_as_float(delta, i, dtype, nullptr));
    normalize(hidden, r * width, width, DType::kFloat32, weight, eps, out, r * width, dtype);
  }
}

// gate_up [rows, 2 * width] -> out [rows, width] = silu(gate) * up, both dense.
void tandem_silu_mul(const void* gate_up, void* out, int64_t rows, int32_t width, int32_t dtype_code,
                     int32_t num_threads) {
  const DType dtype = (DType)dtype_code;
#pragma omp parallel for num_threads(threads_for(rows * width, num_threads)) schedule(static)
  for (int64_t r = 0; r < rows; ++r)
    for (int i = 0; i < width; i += kLanes) {
      Vec gate = load_as_float(gate_up, 2 * r * width + i, dtype, nullptr);
      Vec up = load_as_float(gate_up, (2 * r + 1) * width + i, dtype, nullptr);
      // Beyond +-126 the sigmoid is 0 or 1 to float32 anyway.
      Vec exponent = gate * splat(-kLog2E);
      exponent = exponent > splat(126.0f) ? splat(126.0f) : exponent;
      store_from_float(out, r * width + i, dtype, gate / (splat(1.0f) + exp2_of(exponent)) * up);
    }
}

// Norms (unless the weights are null), rotates and stores what a fused QKV projection made of each token.
//   qkv       [tokens, num_heads + 2 * num_kv_heads, head_size] dense; queries are changed in place
//   rotations [positions, head_size] interleaved (cos, sin); cache [blocks, 2, num_kv_heads, block_size, head_size]
// Returns the first token whose position or slot lies outside, or -1.
int64_t tandem_rope_store(void* qkv, const int64_t* positions, const int64_t* slots, const float* rotations,
                          const void* q_norm, const void* k_norm, void* cache, int64_t tokens, int64_t num_positions,
                          int64_t num_slots, int32_t num_heads, int32_t num_kv_heads, int32_t head_size,
                          int32_t block_size, int32_t dtype_code, float eps, int32_t num_threads) {
  const DType dtype = (DType)dtype_code;
  const int bytes = bytes_of(dtype);
  for (int64_t t = 0; t < tokens; ++t)
    if (positions[t] < 0 || positions[t] >= num_positions || slots[t] < 0 || slots[t] >= num_slots) return t;
  const int heads = num_heads + 2 * num_kv_heads;
#pragma omp parallel for num_threads(threads_for(tokens * heads * head_size, num_threads)) schedule(static)
  for (int64_t t = 0; t < tokens; ++t) {
    const float* by = rotations + positions[t] * head_size;
    for (int h = 0; h < heads; ++h) {
      const int64_t from = (t * heads + h) * head_size;
      const bool is_query = h < num_heads, is_value = h >= num_heads + num_kv_heads;
      const int kv_head = is_query ? 0 : (h - num_heads) % num_kv_heads;
      const int64_t to = (((slots[t] / block_size * 2 + is_value) * num_kv_heads + kv_head) * block_size +
                          slots[t] % block_size) *
                         head_size;
      if (is_value) {
        std::memcpy((char*)cache + to * bytes, (const char*)qkv + from * bytes, int64_t(head_size) * bytes);
        continue;
      }
      const void* norm = is_query ? q_norm : k_norm;
      if (norm) normalize(qkv, from, head_size, dtype, norm, eps, qkv, from, dtype);
      for (int d = 0; d < head_size; d += kLanes) {
        Vec rotated = rotate(load_as_float(qkv, from + d, dtype, nullptr), load(by + d));
        if (is_query) store_from_float(qkv, from + d, dtype, rotated);
        else store_from_float(cache, to + d, dtype, rotated);
      }
    }
  }
  return -1;
}
}
