// The inner loop of every matrix product here: some rows times a block of columns, sums in registers.
#pragma once

#include "cpu.h"
#include "simd.h"

// What one operand holds per 32-bit lane: a float, or a pair of neighbouring bfloat16 numbers.
struct Float32 {
  using Element = float;
  static constexpr int kPerLane = 1;
};
struct BFloat16 {
  using Element = uint16_t;
  static constexpr int kPerLane = 2;
};

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// c + a * b per lane; with bfloat16, c + a.even * b.even + a.odd * b.odd.
template <class Type>
inline Vec multiply_add(uint32_t a, Vec b, Vec c) {
  if constexpr (Type::kPerLane == 1) {
    return fma(splat(float_of(a)), b, c);
  } else {
    if constexpr (kHasBFloat16Products) return add_pair_products(c, a, b);
    // A bfloat16 is the upper half of a float.
    c = fma(splat(float_of(a << 16)), (Vec)((VecInt)b << 16), c);
    return fma(splat(float_of(a & 0xffff0000u)), (Vec)((VecInt)b & (int32_t)0xffff0000), c);
  }
}

// What a product does with what c held: nothing, go on summing from it, or add the new sum to it.
enum class Sum { kFresh, kContinued, kAdded };

// c [Rows, Vecs * kLanes] (+)= a [Rows, depth] x b [depth, Vecs * kLanes], where depth counts 32-bit lanes. The rows of
// b are b_stride apart; its columns may lie in several panels of PanelVecs vectors, panel_stride apart. With Fetch, what
// lies `ahead` of b is fetched meanwhile.
template <class Type, int Rows, int Vecs, Sum Mode, int PanelVecs = Vecs, bool Fetch = false>
inline void product_block(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, float* c,
                          int64_t c_stride, int depth, int64_t panel_stride = 0, int64_t ahead = 0) {
  Vec acc[Rows][Vecs];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v)
      acc[r][v] = Mode == Sum::kContinued ? load(c + r * c_stride + v * kLanes) : Vec{};
  for (int k = 0; k < depth; ++k) {
    Vec row[Vecs];
    for (int v = 0; v < Vecs; ++v)
      row[v] = load((const float*)(b + v / PanelVecs * panel_stride + k * b_stride) + v % PanelVecs * kLanes);
    if constexpr (Fetch)
      for (int v = 0; v < Vecs; v += 16 / kLanes) fetch(b + ahead + k * b_stride + v * kLanes);
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vecs; ++v) acc[r][v] = multiply_add<Type>(a[r * a_stride + k], row[v], acc[r][v]);
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v) {
      float* to = c + r * c_stride + v * kLanes;
      store(to, Mode == Sum::kAdded ? load(to) + acc[r][v] : acc[r][v]);
    }
}
