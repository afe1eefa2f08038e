// The operations of simd.h with AVX2: 8 lanes, 16 registers.
#pragma once

inline Vec splat(float x) { return (Vec)_mm256_set1_ps(x); }
inline float sum(Vec v) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline int32_t sum(VecInt v) {
  __m128i q = _mm_add_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  q = _mm_add_epi32(q, _mm_shuffle_epi32(q, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(q, _mm_shuffle_epi32(q, 0xb1)));
}
inline float largest(Vec v) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}
inline bool any_above(Vec v, float x) {
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(x), _CMP_GT_OQ)) != 0;
}
inline Vec fma(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline Vec from_bf16(const uint16_t* p) {
  return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
}
inline Vec from_f16(const uint16_t* p) { return (Vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline void to_f16(uint16_t* p, Vec v) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline Vec lookup(const float* table, const uint8_t* p) {
  return (Vec)_mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)), 4);
}
inline Vec from_int8(const int8_t* p) {
  return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline VecInt round(Vec v) { return (VecInt)_mm256_cvtps_epi32((__m256)v); }
inline void to_int8(int8_t* p, VecInt v) {
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(words, words));
}
inline Vec rotate(Vec x, Vec by) {
  __m256 swapped = _mm256_permute_ps((__m256)x, 0xB1);
  __m256 im = _mm256_mul_ps(swapped, _mm256_movehdup_ps((__m256)by));
  return (Vec)_mm256_fmaddsub_ps((__m256)x, _mm256_moveldup_ps((__m256)by), im);
}
inline void to_bf16(uint16_t* p, Vec v) {
  const VecInt bits = (VecInt)v, rounded = bits + 0x7fff + (bits >> 16 & 1);
  const VecInt is_nan = (bits & 0x7fffffff) > 0x7f800000;
  const VecInt upper = (is_nan ? bits | 0x400000 : rounded) >> 16 & 0xffff;
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)upper), _mm256_extracti128_si256((__m256i)upper, 1));
  _mm_storeu_si128((__m128i*)p, words);
}

inline VecInt load_table(const uint8_t* p) {
  return (VecInt)_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
}
inline VecInt lookup(VecInt table, VecInt indices) {
  return (VecInt)_mm256_shuffle_epi8((__m256i)table, (__m256i)indices);
}

constexpr bool kHasDotProduct = false, kDotProductIsSigned = false;
VecInt add_products(VecInt sum, VecInt codes, int32_t by);
inline VecInt products(VecInt codes, int32_t by) {
  return (VecInt)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(by));
}
inline VecInt add_halves(VecInt a, VecInt b) { return (VecInt)_mm256_add_epi16((__m256i)a, (__m256i)b); }
inline VecInt joined(VecInt halves) { return (VecInt)_mm256_madd_epi16((__m256i)halves, _mm256_set1_epi16(1)); }

constexpr bool kHasBFloat16Products = false;
Vec add_pair_products(Vec sum, uint32_t a, Vec b);

inline void pair_up(const uint16_t* a, const uint16_t* b, uint32_t* out) {
  const __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)a));
  const __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)b));
  _mm256_storeu_si256((__m256i*)out, _mm256_or_si256(low, _mm256_slli_epi32(high, 16)));
}

inline void transpose(const uint32_t* const* rows, int64_t from, uint32_t* out, int64_t out_stride) {
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps((const float*)(rows[i] + from));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps((float*)(out + i * out_stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps((float*)(out + (i + 4) * out_stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
}
