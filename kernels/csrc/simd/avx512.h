// The operations of simd.h with AVX-512: 16 lanes, 32 registers.
#pragma once

inline Vec splat(float x) { return (Vec)_mm512_set1_ps(x); }
inline float sum(Vec v) { return _mm512_reduce_add_ps((__m512)v); }
inline int32_t sum(VecInt v) { return _mm512_reduce_add_epi32((__m512i)v); }
inline float largest(Vec v) { return _mm512_reduce_max_ps((__m512)v); }
inline bool any_above(Vec v, float x) {
  return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_GT_OQ) != 0;
}
inline Vec fma(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline Vec from_bf16(const uint16_t* p) {
  return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
inline Vec from_f16(const uint16_t* p) { return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline void to_f16(uint16_t* p, Vec v) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec lookup(const float* table, const uint8_t* p) {
  return (Vec)_mm512_i32gather_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)), table, 4);
}
inline Vec from_int8(const int8_t* p) {
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
// To the nearest integer, ties to even.
inline VecInt round(Vec v) { return (VecInt)_mm512_cvtps_epi32((__m512)v); }
// Lanes of -128 .. 127.
inline void to_int8(int8_t* p, VecInt v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)v)); }
// Complex products of interleaved (re, im) lanes.
inline Vec rotate(Vec x, Vec by) {
  __m512 swapped = _mm512_permute_ps((__m512)x, 0xB1);
  __m512 im = _mm512_mul_ps(swapped, _mm512_movehdup_ps((__m512)by));
  return (Vec)_mm512_fmaddsub_ps((__m512)x, _mm512_moveldup_ps((__m512)by), im);
}
inline void to_bf16(uint16_t* p, Vec v) {
#if defined(__AVX512BF16__)
  const __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &narrow, sizeof narrow);
#else
  const VecInt bits = (VecInt)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
  const VecInt is_nan = (bits & 0x7fffffff) > 0x7f800000;
  const VecInt upper = (is_nan ? bits | 0x400000 : rounded) >> 16;
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)upper));
#endif
}

// 16 bytes; each byte of the indices, below 16, becomes the table's.
inline VecInt load_table(const uint8_t* p) {
  return (VecInt)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p));
}
inline VecInt lookup(VecInt table, VecInt indices) {
  return (VecInt)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
}

#if defined(__AVX512VNNI__)
constexpr bool kHasDotProduct = true, kDotProductIsSigned = false;
inline VecInt add_products(VecInt sum, VecInt codes, int32_t by) {
  return (VecInt)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, _mm512_set1_epi32(by));
}
#else
constexpr bool kHasDotProduct = false, kDotProductIsSigned = false;
VecInt add_products(VecInt sum, VecInt codes, int32_t by);
#endif
inline VecInt products(VecInt codes, int32_t by) {
  return (VecInt)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(by));
}
inline VecInt add_halves(VecInt a, VecInt b) { return (VecInt)_mm512_add_epi16((__m512i)a, (__m512i)b); }
inline VecInt joined(VecInt halves) { return (VecInt)_mm512_madd_epi16((__m512i)halves, _mm512_set1_epi16(1)); }

#if defined(__AVX512BF16__)
constexpr bool kHasBFloat16Products = true;
inline Vec add_pair_products(Vec sum, uint32_t a, Vec b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}
#else
constexpr bool kHasBFloat16Products = false;
Vec add_pair_products(Vec sum, uint32_t a, Vec b);
#endif

inline void pair_up(const uint16_t* a, const uint16_t* b, uint32_t* out) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)a));
  const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)b));
  _mm512_storeu_si512(out, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}

inline void transpose(const uint32_t* const* rows, int64_t from, uint32_t* out, int64_t out_stride) {
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(rows[i] + from);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + i * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 8) * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(out + (i + 4) * out_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(out + (i + 12) * out_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
}
