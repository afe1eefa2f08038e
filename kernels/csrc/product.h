// The inner loop of matrix products in vectors: some rows times a block of columns, sums in registers.
#pragma once

#include <type_traits>

#include "amx.h"
#include "cpu.h"
#include "simd.h"

// Kinds of products. The right side holds 32-bit lanes: a float, or two bfloat16 numbers, neighbours along depth.
struct Float32 {
  using Left = float;
  using Right = float;
};
// Pairs times pairs, by one instruction: where kHasBFloat16Products.
struct BFloat16 {
  using Left = uint16_t;
  using Right = uint16_t;
};
// Floats times pairs, which become two floats in registers. It gives the bits of Float32 on the same numbers.
struct Widened {
  using Left = float;
  using Right = uint16_t;
};
// Pairs times pairs, by tiles of AMX (tile_product.h): where kHasTiles.
struct Tiled {
  using Left = uint16_t;
  using Right = uint16_t;
};
// The fastest kind for bfloat16 with this instruction set.
using FastBFloat16 =
    std::conditional_t<kHasTiles, Tiled, std::conditional_t<kHasBFloat16Products, BFloat16, Widened>>;

template <class Element>
constexpr int kPerLane = 4 / sizeof(Element);
// Lanes of the left side for each lane of the right side.
template <class Type>
constexpr int kLeftLanes = kPerLane<typename Type::Right> / kPerLane<typename Type::Left>;

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// A vector of the right side, as lane i of the left side multiplies it.
template <class Type>
inline Vec right_side(const uint32_t* b, int i) {
  const Vec lanes = load((const float*)b);
  if constexpr (!std::is_same_v<Type, Widened>) return lanes;
  // A bfloat16 number is the upper half of a float.
  return i == 0 ? (Vec)((VecInt)lanes << 16) : (Vec)((VecInt)lanes & (int32_t)0xffff0000);
}

// c + a * b per lane; with BFloat16, c + a.even * b.even + a.odd * b.odd.
template <class Type>
inline Vec multiply_add(uint32_t a, Vec b, Vec c) {
  static_assert(!std::is_same_v<Type, Tiled>);
  if constexpr (std::is_same_v<Type, BFloat16>) return add_pair_products(c, a, b);
  else return fma(splat(float_of(a)), b, c);
}

// Rows of a product whose accumulators stay in registers, with 4 vectors per row and 32 registers, or 2 and 16. Vectors
// of b and one of a take 5 or 3 more, and the mask that widens another one.
template <class Type>
constexpr int kMostRows = kLanes == 8 && std::is_same_v<Type, Widened> ? 5 : 6;

// How a product uses the old values of c: it ignores them, starts its sums from them, or adds its sums to them.
enum class Sum { kFresh, kContinued, kAdded };

// c [Rows, Vecs * kLanes] (+)= a [Rows, depth] x b [depth, Vecs * kLanes], where depth counts lanes of b; a row of a
// has kLeftLanes times as many. a_stride is in lanes. The rows of b are b_stride apart; its columns may lie in several
// panels of PanelVecs vectors, panel_stride apart. With Fetch, what lies `ahead` of b is fetched meanwhile.
template <class Type, int Rows, int Vecs, Sum Mode, int PanelVecs = Vecs, bool Fetch = false>
__attribute__((always_inline)) inline void product_block(const uint32_t* a, int64_t a_stride, const uint32_t* b,
                                                         int64_t b_stride, float* c, int64_t c_stride, int depth,
                                                         int64_t panel_stride = 0, int64_t ahead = 0) {
  Vec acc[Rows][Vecs];
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v)
      acc[r][v] = Mode == Sum::kContinued ? load(c + r * c_stride + v * kLanes) : Vec{};
  for (int k = 0; k < depth; ++k) {
    if constexpr (Fetch)
      for (int n = 0; n < Vecs * kLanes; n += 16) fetch(b + ahead + k * b_stride + n);
    for (int i = 0; i < kLeftLanes<Type>; ++i) {
      // Loads b again for the second lane: there are too few registers to keep it.
      if constexpr (kLeftLanes<Type> > 1) asm("" : "+r"(b));
      Vec row[Vecs];
      for (int v = 0; v < Vecs; ++v)
        row[v] = right_side<Type>(b + v / PanelVecs * panel_stride + k * b_stride + v % PanelVecs * kLanes, i);
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vecs; ++v)
          acc[r][v] = multiply_add<Type>(a[r * a_stride + k * kLeftLanes<Type> + i], row[v], acc[r][v]);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v) {
      float* to = c + r * c_stride + v * kLanes;
      store(to, Mode == Sum::kAdded ? load(to) + acc[r][v] : acc[r][v]);
    }
}
