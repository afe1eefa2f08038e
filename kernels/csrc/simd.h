// One vector type per instruction set, and the few operations the kernels are written in.
//
//   simd/avx512.h     16 lanes, 32 registers; with VNNI dot products of bytes, with BF16 of bfloat16 pairs
//   simd/avx2.h       8 lanes, 16 registers
//   simd/neon.h       4 lanes, 32 registers, dot products of bytes; with BF16 of bfloat16 pairs
//   simd/emulated.h   plain C++ with the bits of AVX-512 and AMX, for tests
//
// Every file is compiled once per instruction set; tandem_kernels.native loads the best the CPU has. Arithmetic is
// written with GCC's vector extensions; only simd/, cpu.h and amx.h use intrinsics or assembly.
#pragma once

#if !defined(__ARM_NEON)
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(TANDEM_EMULATED)
constexpr int kLanes = 16;
#elif defined(__ARM_NEON)
constexpr int kLanes = 4;
#else
constexpr int kLanes = 8;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t VecInt __attribute__((vector_size(kLanes * 4)));

// What lies in a tensor. Quantized bytes other than integers mean table[byte].
enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kByte = 3, kInt8 = 4 };

inline Vec load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }
inline Vec maximum(Vec a, Vec b) { return a > b ? a : b; }

// Round to nearest, ties to even; a NaN stays one.
inline uint16_t bf16_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t(bits >> 16 | 64);
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// What a file of simd/ defines, for kLanes lanes:
//
//   splat            x in all lanes; not Vec{} + x, an addition that turns -0 into 0
//   sum, largest     over all lanes
//   any_above        whether any lane is larger than x
//   fma              a * b + c, rounded once
//   from_bf16, from_f16, from_int8, to_bf16, to_f16, to_int8    to and from float32; to_int8 takes -128 .. 127
//   lookup           table[byte]: floats, or with load_table 16 bytes by indices below 16
//   round            to the nearest integer, ties to even
//   rotate           complex products of interleaved (re, im) lanes
//   transpose        kLanes rows of kLanes 32-bit elements: row i at rows[i] + from -> column i at out
//   pair_up          two rows of 16-bit elements -> (a, b) per 32-bit lane
//   add_pair_products   c + a.even * b.even + a.odd * b.odd of bfloat16 pairs: where kHasBFloat16Products
//   add_products     adds four codes times four signed bytes to each lane: where kHasDotProduct. Codes are unsigned
//                    bytes, or signed ones where kDotProductIsSigned
//   products, add_halves, joined   elsewhere: sums of two such products per 16-bit half of a lane; adds halves; adds the
//                    two halves of each lane
#if defined(TANDEM_EMULATED)
#include "simd/emulated.h"
#elif defined(__AVX512F__)
#include "simd/avx512.h"
#elif defined(__ARM_NEON)
#include "simd/neon.h"
#else
#include "simd/avx2.h"
#endif

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

// sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), which neither overflows nor cancels badly.
inline Vec tanh_of(Vec x) {
  const Vec size = maximum(x, -x), e = exp2_of(size * splat(-2 * kLog2E));
  // Near 0 the difference 1 - e loses digits: use the series there.
  const Vec square = x * x;
  const Vec series = size * (splat(1.0f) - square * (splat(1 / 3.0f) - square * splat(2 / 15.0f)));
  const Vec tanh = size < splat(0.03f) ? series : (splat(1.0f) - e) / (splat(1.0f) + e);
  return x < Vec{} ? -tanh : tanh;
}

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
