// One vector type per instruction set, and the few operations the kernels are written in.
//
//   AVX-512          16 lanes, 32 registers
//   AVX-512 + BF16   the same, and products of bfloat16 pairs summed in float32 (vdpbf16ps)
//   AVX2             8 lanes, 16 registers
//
// Every file is compiled once per instruction set; tandem_kernels.native loads the best the CPU has. Arithmetic is
// written with GCC's vector extensions; intrinsics appear where these have no word for an operation.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));

// What lies in a tensor. Quantized bytes other than integers mean table[byte].
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kByte = 3, kInt8 = 4 };

// Not Vec{} + x, which is an addition: it makes a zero of minus zero.
#if defined(__AVX512F__)
inline Vec splat(float x) { return (Vec)_mm512_set1_ps(x); }
#else
inline Vec splat(float x) { return (Vec)_mm256_set1_ps(x); }
#endif
inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

#if defined(__AVX512F__)
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
#else
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
#endif

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline void to_bf16(uint16_t* p, Vec v) {
#if defined(__AVX512BF16__)
  __m256bh narrow = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &narrow, sizeof narrow);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) p[i] = bf16_of(lanes[i]);
#endif
}

// 2^x for x <= 127, relative error about 1e-7; exactly 1 at 0, exactly 0 below -125.
inline Vec exp2_of(Vec x) {
  // So large that its last bit counts ones: a sum with it is rounded to an integer, which stands in the lowest bits.
  const Vec ones = splat(12582912.0f), sum = x + ones, f = x - (sum - ones);
  // Minimax coefficients of 2^f on [-0.5, 0.5] in relative error (9e-8), with the constant held at 1.
  Vec p = splat(0.0013264699f);
  p = fma(p, f, splat(0.0096715093f));
  p = fma(p, f, splat(0.05550734f));
  p = fma(p, f, splat(0.24022242f));
  p = fma(p, f, splat(0.693147f));
  p = fma(p, f, splat(1.0f));
  return x < splat(-125.0f) ? Vec{} : (Vec)((VecInt)p + ((VecInt)sum << 23));
}
constexpr float kLog2E = 1.44269504088896340736f;

// Element i of a tensor of dtype, as one vector of kLanes from there.
inline Vec load_as_float(const void* data, int64_t i, DType dtype, const float* table) {
  switch (dtype) {
    case DType::kFloat32: return load((const float*)data + i);
    case DType::kBFloat16: return from_bf16((const uint16_t*)data + i);
    case DType::kFloat16: return from_f16((const uint16_t*)data + i);
    case DType::kInt8: return from_int8((const int8_t*)data + i);
    default: return lookup(table, (const uint8_t*)data + i);
  }
}
inline void store_from_float(void* data, int64_t i, DType dtype, Vec v) {
  switch (dtype) {
    case DType::kFloat32: return store((float*)data + i, v);
    case DType::kBFloat16: return to_bf16((uint16_t*)data + i, v);
    default: return to_f16((uint16_t*)data + i, v);
  }
}
inline int bytes_of(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : dtype == DType::kByte || dtype == DType::kInt8 ? 1 : 2;
}
