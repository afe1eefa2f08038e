// Matrix products with packed weights: x [rows, depth] times weight [columns, depth] transposed.
#pragma once

#include "simd.h"
#include "team.h"

// Weights are packed once into panels of 32 columns, so that the inner loop reads them in order:
//
//   kFloat32, kBFloat16   [panel][k][32 columns]   k counts 32-bit lanes of depth: a float, or a pair of bfloat16
//   the others            [panel][block][bytes]    32 or 256 of depth with scales per column; quantized.cpp
enum class Packing : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kQ4K = 4, kQ6K = 5 };

constexpr int kPanel = 32;
constexpr int kGroup = 32;

// A weight is an array of pieces, each with its own packing, which compute neighbouring columns of the result; most have
// one. A last panel that is not full ends in zeros. What a bad depth or column count would break is checked in Python.
extern "C" struct TandemLinear {
  const void* packed;
  const float* bias;  // [columns], or null
  int32_t columns, depth, packing;
  int32_t first, stride;  // the result's first column of this piece, and all its columns
  int32_t pieces;         // from this one on
};

inline bool is_quantized(const TandemLinear* weight) {
  for (int n = 0; n < weight->pieces; ++n)
    if (weight[n].packing >= int(Packing::kInt8)) return true;
  return false;
}

inline int panels_of(const TandemLinear& piece) { return (piece.columns + kPanel - 1) / kPanel; }

// Lanes of which only the first `count` are columns of the piece; out of line, to leave registers to the inner loops.
__attribute__((noinline, cold)) inline void store_some_columns(const TandemLinear& piece, void* out, int64_t at,
                                                               int column, int count, DType dtype, Vec v) {
  float lanes[kLanes] = {};
  if (piece.bias) {
    std::memcpy(lanes, piece.bias + column, count * sizeof(float));
    v += load(lanes);
  }
  store_from_float(lanes, 0, dtype, v);
  std::memcpy((char*)out + at * bytes_of(dtype), lanes, size_t(count) * bytes_of(dtype));
}

// Stores the piece's columns `column` .. + kLanes of a row of out, as far as there are so many, and adds the bias.
inline void store_columns(const TandemLinear& piece, void* out, int64_t row, int column, DType dtype, Vec v) {
  const int64_t at = row * piece.stride + piece.first + column;
  const int count = piece.columns - column;
  if (__builtin_expect(count >= kLanes, 1)) {
    if (piece.bias) v += load(piece.bias + column);
    store_from_float(out, at, dtype, v);
  } else if (count > 0) {
    store_some_columns(piece, out, at, column, count, dtype, v);
  }
}

// A group of 32 along depth, of some neighbouring rows: code = round(x / scale), scale = largest magnitude / 127.
constexpr int kTileRows = 4;
struct RowGroup {
  int8_t codes[kTileRows][kGroup];
  float scales[kTileRows], sums[kTileRows];  // of the codes: scale * sum
  int32_t first_sums[kTileRows];             // of the first 16 codes
  int32_t shifts[kTileRows];                 // -128 times the sum of all codes
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

// Called by every thread of a team; returns when all are done. out is [rows, stride].
void linear_in_team(Team& team, const TandemLinear* weight, const Activations& x, int64_t rows, void* out,
                    DType out_dtype);
// One piece, this thread's share of it.
void quantized_piece(Team& team, const TandemLinear& piece, const Activations& x, int64_t rows, void* out,
                     DType out_dtype);
