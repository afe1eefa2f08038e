// Matrix products with packed weights: x [rows, depth] times weight [columns, depth] transposed.
#pragma once

#include "amx.h"
#include "simd.h"
#include "team.h"

// Weights are packed once into panels of 32 columns, so that the inner loop reads them in order:
//
//   kFloat32, kBFloat16   [panel][k][32 columns]   k counts 32-bit lanes of depth: a float, or a pair of bfloat16
//   the others            [panel][block][bytes]    32, 128 or 256 of depth with scales per column; quantized.cpp
enum class Packing : int32_t {
  kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kQ4K = 4, kQ6K = 5, kInt4Zeros = 6, kLut4 = 7
};

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
  const int32_t* order;  // [depth]: the input that each step of depth of quantized pieces multiplies, or null; same in all
  const uint8_t* table;  // [16]: what the codes of kLut4 mean, plus 128
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

// Adds the bias and stores columns `column` .. `column` + kLanes - 1 of a row, but none beyond the piece's last.
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

// Rows of a product's left side. Quantized weights read only what quantize_row made of them.
struct Activations {
  const void* x;  // [rows, depth] dense
  DType dtype;
  int64_t rows;
  void* quantized;  // quantized_bytes(rows, depth), aligned to 64 bytes
  const int32_t* order = nullptr;  // of the weight that will multiply them
};

// Neighbouring rows whose codes lie together: the rows of one AMX tile, or of some blocks of a product.
constexpr int kTileRows = kHasTiles ? 16 : kLanes == 16 ? 24 : 4;
// Up to this many rows, one product of AMX's tiles multiplies two groups.
constexpr int kPairedRows = 8;

// What a product needs to know of 32 codes of a row; code = round(x / scale), scale = largest magnitude / 127.
struct GroupTerms {
  float scale, sum;   // sum of the codes, times scale
  int32_t first_sum;  // of the first 16 codes
  int32_t shift;      // -128 times the sum of all codes
};

inline int64_t quantized_bytes(int64_t rows, int depth) {
  const int64_t pairs = (depth / kGroup + 1) / 2, padded = (rows + kTileRows - 1) / kTileRows * kTileRows;
  return padded * 2 * pairs * int64_t(kGroup + sizeof(GroupTerms));
}

// Activations of 8 bits:
//
//   terms   [row / kTileRows][group][kTileRows]
//   codes   [row / kTileRows][group][kTileRows][32]
//           With AMX and at most kPairedRows rows, [pair of groups][16][64]: rows 0 to 7 have the first group in their
//           first half, rows 8 to 15 the second group in their second half, and zeros elsewhere. One product of this
//           tile with the codes of two groups of weights then sums the two apart.
class QuantizedRows {
 public:
  QuantizedRows(const Activations& of, int depth) : groups(depth / kGroup), paired(of.rows <= kPairedRows) {
    const int64_t pairs = (groups + 1) / 2, padded = (of.rows + kTileRows - 1) / kTileRows * kTileRows;
    first_codes = (int8_t*)of.quantized;
    first_terms = (GroupTerms*)(first_codes + padded * 2 * pairs * kGroup);
  }

  GroupTerms* terms(int64_t row, int group) const {
    return first_terms + (row / kTileRows * groups + group) * kTileRows + row % kTileRows;
  }
  int8_t* codes(int64_t row, int group) const {
    if (is_paired()) return first_codes + distance<true>(group) + row * 64;
    return first_codes + (row / kTileRows * groups * kTileRows + row % kTileRows) * kGroup + distance<false>(group);
  }
  // Bytes from a row's first group to another one.
  template <bool Paired>
  static int64_t distance(int group) {
    return Paired ? group / 2 * (16 * 64) + group % 2 * (kPairedRows * 64 + kGroup) : int64_t(group) * kTileRows * kGroup;
  }
  int64_t distance(int group) const { return is_paired() ? distance<true>(group) : distance<false>(group); }
  // Bytes from a row's codes to the next one's, within kTileRows.
  int64_t stride() const { return is_paired() ? 64 : kGroup; }
  bool is_paired() const { return kHasTiles && paired; }

  // Only if the rows are paired: writes the zeros beside a row's codes. If the number of groups is odd, the last pair's
  // second group gets codes of 0.
  void clear_beside(int64_t row) const {
    for (int pair = 0; pair < (groups + 1) / 2; ++pair) {
      int8_t* first = codes(row, 2 * pair);
      std::memset(first + kGroup, 0, kGroup);
      std::memset(first + kPairedRows * 64, 0, 2 * pair + 1 < groups ? kGroup : 2 * kGroup);
    }
  }

 private:
  int groups;
  bool paired;
  int8_t* first_codes;
  GroupTerms* first_terms;
};

void quantize_row(const Activations& to, int64_t row, int depth);
// A row that quantize_row has made, as another row.
void copy_quantized_row(const Activations& from, int64_t row, const Activations& to, int64_t to_row, int depth);

// One of several products in one call: rows times a weight. All weights of a call have pieces of equal shapes and packings.
struct LinearGroup {
  const TandemLinear* weight;
  Activations x;
  int64_t rows;
  void* out;  // [rows, stride]
};

// Called by every thread of a team; returns when all are done.
void linear_groups_in_team(Team& team, const LinearGroup* groups, int count, DType out_dtype);
// One group. out is [rows, stride].
inline void linear_in_team(Team& team, const TandemLinear* weight, const Activations& x, int64_t rows, void* out,
                           DType out_dtype) {
  const LinearGroup group = {weight, x, rows, out};
  linear_groups_in_team(team, &group, 1, out_dtype);
}
// A quantized piece of each weight; called by every thread of a team, which does not wait for the others.
void quantized_piece(Team& team, const LinearGroup* groups, int count, int piece, DType out_dtype);

// Shares the work of several groups, size(g) pieces of each. A thread calls begin(g) before the first work(g, i) that it
// does of a group.
template <class Size, class Begin, class Work>
inline void share_groups(Team& team, int count, Size size, Begin begin, Work work) {
  int64_t total = 0;
  for (int g = 0; g < count; ++g) total += size(g);
  // A thread's pieces have growing numbers.
  int group = -1;
  int64_t first = 0, end = 0;
  team.share(total, [&](int64_t i) {
    if (i >= end) {
      for (; i >= end; end += size(group)) first = end, ++group;
      begin(group);
    }
    work(group, i - first);
  });
}
