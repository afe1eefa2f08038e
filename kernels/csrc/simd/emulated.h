// The operations of simd.h in plain C++, with the lanes, rounding and order of sums of AVX-512 with VNNI, BF16 and AMX.
//
// Only for tests: they give the bits of instructions that the processor does not have.
#pragma once

inline Vec splat(float x) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = x;
  return v;
}

// Halves are added until two lanes are left, as _mm512_reduce_add_ps does.
template <class V>
inline auto sum(V v) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) v[i] += v[i + half];
  return v[0];
}
inline float largest(Vec v) {
  float most = v[0];
  for (int i = 1; i < kLanes; ++i) most = v[i] > most ? v[i] : most;
  return most;
}
inline bool any_above(Vec v, float x) {
  for (int i = 0; i < kLanes; ++i)
    if (v[i] > x) return true;
  return false;
}
inline Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
inline Vec from_bf16(const uint16_t* p) {
  VecInt bits;
  for (int i = 0; i < kLanes; ++i) bits[i] = int32_t(uint32_t(p[i]) << 16);
  return (Vec)bits;
}
inline Vec from_f16(const uint16_t* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = _cvtsh_ss(p[i]);
  return v;
}
inline void to_f16(uint16_t* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = _cvtss_sh(v[i], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
inline Vec lookup(const float* table, const uint8_t* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = table[p[i]];
  return v;
}
inline Vec from_int8(const int8_t* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = p[i];
  return v;
}
inline VecInt round(Vec v) {
  VecInt out;
  for (int i = 0; i < kLanes; ++i) out[i] = int32_t(__builtin_rintf(v[i]));
  return out;
}
inline void to_int8(int8_t* p, VecInt v) {
  for (int i = 0; i < kLanes; ++i) p[i] = int8_t(v[i]);
}
inline Vec rotate(Vec x, Vec by) {
  Vec out;
  for (int i = 0; i < kLanes; i += 2) {
    out[i] = __builtin_fmaf(x[i], by[i], -(x[i + 1] * by[i + 1]));
    out[i + 1] = __builtin_fmaf(x[i + 1], by[i], x[i] * by[i + 1]);
  }
  return out;
}
// The instruction treats denormals as zeros.
inline void to_bf16(uint16_t* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) {
    uint32_t bits;
    const float x = v[i];
    std::memcpy(&bits, &x, 4);
    p[i] = bits & 0x7f800000 ? bf16_of(x) : uint16_t(bits >> 16 & 0x8000);
  }
}

inline VecInt load_table(const uint8_t* p) {
  VecInt table;
  for (int i = 0; i < kLanes * 4; i += 16) std::memcpy((char*)&table + i, p, 16);
  return table;
}
inline VecInt lookup(VecInt table, VecInt indices) {
  uint8_t bytes[kLanes * 4], from[kLanes * 4];
  std::memcpy(from, &table, sizeof from);
  std::memcpy(bytes, &indices, sizeof bytes);
  for (uint8_t& byte : bytes) byte = from[byte & 15];
  std::memcpy(&table, bytes, sizeof bytes);
  return table;
}

constexpr bool kHasDotProduct = true, kDotProductIsSigned = false;
inline VecInt add_products(VecInt sum, VecInt codes, int32_t by) {
  for (int j = 0; j < 4; ++j) sum += (codes >> 8 * j & 255) * int32_t(int8_t(by >> 8 * j));
  return sum;
}
VecInt products(VecInt codes, int32_t by);
VecInt add_halves(VecInt a, VecInt b);
VecInt joined(VecInt halves);

// With tiles, no product of pairs is computed in vectors.
constexpr bool kHasBFloat16Products = false;
Vec add_pair_products(Vec sum, uint32_t a, Vec b);

inline void pair_up(const uint16_t* a, const uint16_t* b, uint32_t* out) {
  for (int i = 0; i < kLanes; ++i) out[i] = a[i] | uint32_t(b[i]) << 16;
}

inline void transpose(const uint32_t* const* rows, int64_t from, uint32_t* out, int64_t out_stride) {
  for (int i = 0; i < kLanes; ++i)
    for (int j = 0; j < kLanes; ++j) out[j * out_stride + i] = rows[i][from + j];
}
