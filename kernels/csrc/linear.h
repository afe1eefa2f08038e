// Matrix products with packed weights: x [rows, depth] times weight [columns, depth] transposed.
#pragma once

#include "simd.h"
#include "team.h"

// Weights are packed once into panels of 32 columns, so that the inner loop reads them in order:
//
//   kFloat32, kBFloat16   [panel][k][32 columns]   k counts 32-bit lanes of depth: a float, or a pair of bfloat16
//   kInt8, kInt4          [panel][group][Group]    32 of depth with a scale per column; quantized.cpp
enum class Packing : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3 };

constexpr int kPanel = 32;
constexpr int kGroup = 32;

// What a bad depth or column count would break is checked in Python.
extern "C" struct TandemLinear {
  const void* packed;
  const void* bias;  // [columns] of the activations' dtype, or null
  int32_t columns, depth, packing;
};

inline bool is_quantized(const TandemLinear& weight) { return weight.packing >= int(Packing::kInt8); }

// A group of 32 along depth, of some neighbouring rows: code = round(x / scale), scale = largest magnitude / 127.
constexpr int kTileRows = kLanes / 4;
struct RowGroup {
  int8_t codes[kTileRows][kGroup];
  float scales[kTileRows], sums[kTileRows];  // of the codes: scale * sum
  int32_t shifts[kTileRows];                 // -128 * sum
};

// Rows of a product's left side. Quantized weights read only what quantize_row made of them.
struct Activations {
  const void* x;  // [rows, depth] dense
  DType dtype;
  RowGroup* groups;  // [rows / kTileRows, depth / 32]
};

// How many groups `rows` rows take.
inline int64_t row_groups(int64_t rows, int depth) { return (rows + kTileRows - 1) / kTileRows * (depth / kGroup); }

void quantize_row(const Activations& to, int64_t row, int depth);

// Both are called by every thread of a team, and return when all are done. out is [rows, columns].
void linear_in_team(Team& team, const TandemLinear& weight, const Activations& x, int64_t rows, void* out,
                    DType out_dtype);
void quantized_linear_in_team(Team& team, const TandemLinear& weight, const Activations& x, int64_t rows, void* out,
                              DType out_dtype);
