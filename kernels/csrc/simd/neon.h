// The operations of simd.h with NEON and its dot products: 4 lanes, 32 registers.
#pragma once

#include <arm_neon.h>

inline Vec splat(float x) { return (Vec)vdupq_n_f32(x); }
inline float sum(Vec v) { return (v[0] + v[2]) + (v[1] + v[3]); }
inline int32_t sum(VecInt v) { return vaddvq_s32((int32x4_t)v); }
inline float largest(Vec v) { return vmaxvq_f32((float32x4_t)v); }
inline bool any_above(Vec v, float x) { return vmaxvq_u32(vcgtq_f32((float32x4_t)v, vdupq_n_f32(x))) != 0; }
inline Vec fma(Vec a, Vec b, Vec c) { return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
inline Vec from_bf16(const uint16_t* p) { return (Vec)vshll_n_u16(vld1_u16(p), 16); }
inline Vec from_f16(const uint16_t* p) { return (Vec)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
inline void to_f16(uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v))); }
inline Vec lookup(const float* table, const uint8_t* p) { return Vec{table[p[0]], table[p[1]], table[p[2]], table[p[3]]}; }
inline Vec from_int8(const int8_t* p) {
  uint32_t bytes;
  std::memcpy(&bytes, p, 4);
  const int16x8_t words = vmovl_s8(vcreate_s8(bytes));
  return (Vec)vcvtq_f32_s32(vmovl_s16(vget_low_s16(words)));
}
inline VecInt round(Vec v) { return (VecInt)vcvtnq_s32_f32((float32x4_t)v); }
inline void to_int8(int8_t* p, VecInt v) {
  const int16x4_t words = vmovn_s32((int32x4_t)v);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(words, words));
  std::memcpy(p, &bytes, 4);
}
inline Vec rotate(Vec x, Vec by) {
  const float32x4_t re = vtrn1q_f32((float32x4_t)by, (float32x4_t)by), im = vtrn2q_f32((float32x4_t)by, (float32x4_t)by);
  const Vec turned = (Vec)vrev64q_f32((float32x4_t)x) * (Vec)im;
  const VecInt minus_even = {INT32_MIN, 0, INT32_MIN, 0};
  return fma(x, (Vec)re, (Vec)((VecInt)turned ^ minus_even));
}
inline void to_bf16(uint16_t* p, Vec v) {
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  const bfloat16x4_t narrow = vcvt_bf16_f32((float32x4_t)v);
  std::memcpy(p, &narrow, sizeof narrow);
#else
  const VecInt bits = (VecInt)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
  const VecInt is_nan = (bits & 0x7fffffff) > 0x7f800000;
  vst1_u16(p, vshrn_n_u32((uint32x4_t)(is_nan ? bits | 0x400000 : rounded), 16));
#endif
}

inline VecInt load_table(const uint8_t* p) { return (VecInt)vld1q_u8(p); }
inline VecInt lookup(VecInt table, VecInt indices) {
  return (VecInt)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)indices);
}

constexpr bool kHasDotProduct = true, kDotProductIsSigned = true;
inline VecInt add_products(VecInt sum, VecInt codes, int32_t by) {
  return (VecInt)vdotq_s32((int32x4_t)sum, (int8x16_t)codes, (int8x16_t)vdupq_n_s32(by));
}
VecInt products(VecInt codes, int32_t by);
VecInt add_halves(VecInt a, VecInt b);
VecInt joined(VecInt halves);

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
constexpr bool kHasBFloat16Products = true;
inline Vec add_pair_products(Vec sum, uint32_t a, Vec b) {
  return (Vec)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)vdupq_n_u32(a), (bfloat16x8_t)b);
}
#else
constexpr bool kHasBFloat16Products = false;
Vec add_pair_products(Vec sum, uint32_t a, Vec b);
#endif

inline void pair_up(const uint16_t* a, const uint16_t* b, uint32_t* out) {
  const uint16x4x2_t pairs = {vld1_u16(a), vld1_u16(b)};
  vst2_u16((uint16_t*)out, pairs);
}

inline void transpose(const uint32_t* const* rows, int64_t from, uint32_t* out, int64_t out_stride) {
  uint32x4_t r[4];
  for (int i = 0; i < 4; ++i) r[i] = vld1q_u32(rows[i] + from);
  for (int i = 0; i < 2; ++i) {
    // Columns i and i + 2.
    const uint32x4_t a = i ? vtrn2q_u32(r[0], r[1]) : vtrn1q_u32(r[0], r[1]);
    const uint32x4_t b = i ? vtrn2q_u32(r[2], r[3]) : vtrn1q_u32(r[2], r[3]);
    vst1q_u32(out + i * out_stride, (uint32x4_t)vtrn1q_u64((uint64x2_t)a, (uint64x2_t)b));
    vst1q_u32(out + (i + 2) * out_stride, (uint32x4_t)vtrn2q_u64((uint64x2_t)a, (uint64x2_t)b));
  }
}
