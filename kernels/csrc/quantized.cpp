// Matrix products in 8-bit integers: activations quantized on the way, in groups of 32, by weights of 8, 6 or 4 bits.
//
// A panel's 32 columns lie in blocks along depth, each with a head and groups of 32; codes are unsigned:
//
//   kInt8   one group:    scale [32] float16
//                         codes [8][32 columns][4]
//   kInt4   one group:    scale [32] float16 | minimum [32] float16
//                         codes [4][32 columns][4]
//   kQ4K    eight groups: scale [32] float16 | minimum [32] float16
//                         factors of these [2][32] int8 | codes [4][32 columns][4]
//   kQ6K    eight groups: scale [32] float16
//                         factors of it [2][32] int8, for 16 of depth each | lower bits [4][32 columns][4] |
//                         upper bits [2][32 columns][4]
//
// A weight is code * scale + minimum; the minimum is -128 * scale (kInt8) or -32 * scale (kQ6K) where none is stored. Of 4
// bits, row k has code 4 k + j in the lower half of a byte and code 16 + 4 k + j in the upper half. Of the upper 2 bits of
// kQ6K, row h has those of code 16 h + 4 k + j in bits 2 k of byte j.
//
// GGUF's Q8_0, Q4_0, Q4_1, Q4_K and Q6_K are such groups, so their weights are taken as they are. With activations
// a = s * b:
//
//   sum w a = scale * s * (sum code b) + minimum * s * (sum b)
//
// The inner sums are exact in integers; groups are summed in float32, in order: a row's bits depend on nothing else.
// Outliers among the activations cost precision in their own 32 neighbours only, unlike a scale per row.

#include <algorithm>
#include <utility>

#include "linear.h"

namespace {

constexpr int kQuads = kGroup / 4;
// Activations in one pass over the weights stay in the second-level cache.
constexpr int64_t kPassBytes = 512 << 10;
// Weights are asked for so many bytes before they are used; 1 to 8 KiB measure alike.
constexpr int kAhead = 4096;

template <Packing Kind>
struct Format {
  static constexpr bool kIsK = Kind == Packing::kQ4K || Kind == Packing::kQ6K;
  static constexpr int kBits = Kind == Packing::kInt8 ? 8 : Kind == Packing::kQ6K ? 6 : 4;
  static constexpr bool kHasMinimum = kBits == 4;
  static constexpr int kGroups = kIsK ? 8 : 1;
  static constexpr int kHeadBytes = (kHasMinimum ? 4 : 2) * kPanel;
  static constexpr int kFactorBytes = kIsK ? 2 * kPanel : 0;
  static constexpr int kGroupBytes = kFactorBytes + kPanel * kGroup * kBits / 8;
};

inline VecInt load_int(const void* p) {
  VecInt v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline VecInt low_nibbles(VecInt bytes) { return bytes & 0x0f0f0f0f; }
inline VecInt high_nibbles(VecInt bytes) { return (bytes >> 4) & 0x0f0f0f0f; }

// GCC would add the products of a group in pairs, and hold more of them than there are registers.
inline VecInt in_order(VecInt sum) {
  asm("" : "+v"(sum));
  return sum;
}

struct Call {
  const TandemLinear& weight;
  const Activations& x;
  void* out;
  DType out_dtype;
};

// Codes times activations of -127 .. 127, summed over a group or half of it, for some rows and columns. Without an
// instruction for it, 16 bits hold what a group adds to them of 4-bit codes (at most 16 * 15 * 127 = 30,480) and what two
// quads add of 6-bit codes (4 * 63 * 127 = 32,004); codes of 8 bits are two planes of 4 bits, each with its own sum.
template <int Bits, int Rows, int Vecs>
struct Sums {
  static constexpr bool kIsWide = kHasDotProduct || Bits == 6;
  static constexpr int kPlanes = !kIsWide && Bits == 8 ? 2 : 1;
  VecInt planes[kPlanes][Rows][Vecs] = {};

  // offset(r) belongs to each sum of row r: the code that means 0, times the activations.
  template <class Offset>
  __attribute__((always_inline)) explicit Sums(Offset offset) {
    if constexpr (kIsWide)
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vecs; ++v) planes[0][r][v] += offset(r);
  }

  // Codes of two quads of depth.
  __attribute__((always_inline)) void add(const RowGroup& group, int quad, int other_quad, const VecInt* codes,
                                          const VecInt* other_codes) {
    if constexpr (kHasDotProduct) {
      add_one(group, quad, codes);
      add_one(group, other_quad, other_codes);
      return;
    }
    for (int r = 0; r < Rows; ++r) {
      int32_t by, other;
      std::memcpy(&by, group.codes[r] + 4 * quad, 4);
      std::memcpy(&other, group.codes[r] + 4 * other_quad, 4);
      for (int v = 0; v < Vecs; ++v) {
        VecInt& sum = planes[0][r][v];
        if constexpr (Bits == 6) {
          sum = in_order(sum + joined(add_halves(products(codes[v], by), products(other_codes[v], other))));
        } else {
          constexpr bool kSplit = Bits == 8;
          sum = in_order(add_halves(sum, products(kSplit ? low_nibbles(codes[v]) : codes[v], by)));
          sum = in_order(add_halves(sum, products(kSplit ? low_nibbles(other_codes[v]) : other_codes[v], other)));
          if constexpr (kSplit) {
            VecInt& upper = planes[1][r][v];
            upper = in_order(add_halves(upper, products(high_nibbles(codes[v]), by)));
            upper = in_order(add_halves(upper, products(high_nibbles(other_codes[v]), other)));
          }
        }
      }
    }
  }

  __attribute__((always_inline)) void add_one(const RowGroup& group, int quad, const VecInt* codes) {
    for (int r = 0; r < Rows; ++r) {
      int32_t by;
      std::memcpy(&by, group.codes[r] + 4 * quad, 4);
      for (int v = 0; v < Vecs; ++v) planes[0][r][v] = add_products(planes[0][r][v], codes[v], by);
    }
  }

  template <class Offset>
  VecInt of(int r, int v, Offset offset) const {
    if constexpr (!kIsWide) {
      VecInt sum = joined(planes[0][r][v]);
      if constexpr (kPlanes == 2) sum += (joined(planes[1][r][v]) << 4) + offset(r);
      return sum;
    }
    return planes[0][r][v];
  }
};

// Rows of one tile x Vecs * kLanes columns from `column` on.
template <Packing Kind, int Rows, int Vecs>
void block(const Call& c, int64_t row, int column) {
  using F = Format<Kind>;
  const int groups = c.weight.depth / kGroup;
  const int64_t at = column % kPanel;
  const int64_t panel_bytes = int64_t(groups / F::kGroups) * F::kHeadBytes + int64_t(groups) * F::kGroupBytes;
  const uint8_t* weights = (const uint8_t*)c.weight.packed + column / kPanel * panel_bytes;
  const RowGroup* group = c.x.groups + row / kTileRows * groups;
  Vec total[Rows][Vecs] = {}, scale[Vecs] = {}, minimum[Vecs] = {};
  for (int g = 0; g < groups; ++g, ++group, weights += F::kGroupBytes) {
    if (g % F::kGroups == 0) {
      const uint16_t* head = (const uint16_t*)weights + at;
      for (int v = 0; v < Vecs; ++v) {
        scale[v] = from_f16(head + v * kLanes);
        if constexpr (F::kHasMinimum) minimum[v] = from_f16(head + kPanel + v * kLanes);
      }
      weights += F::kHeadBytes;
    }
    // A part of a panel leaves out every other line, which the hardware does not foresee; it takes up to half as long so.
    if constexpr (kLanes == 8)
      for (int line = 0; line < F::kGroupBytes; line += 64) __builtin_prefetch(weights + kAhead + line);
    const int8_t* factors = (const int8_t*)weights + at;
    const uint8_t* packed = weights + F::kFactorBytes + at * 4;
    const auto load_codes = [&](int line, int v) { return load_int(packed + (line * kPanel + v * kLanes) * 4); };
    // Adds what the sums mean, of one group or one of its halves.
    const auto settle = [&](const Sums<F::kBits, Rows, Vecs>& sums, const int8_t* factor, auto offset) {
      for (int r = 0; r < Rows; ++r) {
        const Vec unit = splat(group->scales[r]), sum = splat(group->sums[r]);
        for (int v = 0; v < Vecs; ++v) {
          const Vec dot = __builtin_convertvector(sums.of(r, v, offset), Vec) * unit;
          const Vec by = F::kIsK ? scale[v] * from_int8(factor + v * kLanes) : scale[v];
          total[r][v] = fma(dot, by, total[r][v]);
          if constexpr (F::kHasMinimum) {
            const Vec least = F::kIsK ? minimum[v] * from_int8(factor + kPanel + v * kLanes) : minimum[v];
            total[r][v] = fma(sum, least, total[r][v]);
          }
        }
      }
    };
    if constexpr (Kind == Packing::kQ6K) {
      for (int half = 0; half < 2; ++half) {
        const auto offset = [&](int r) {
          const int first = -32 * group->first_sums[r];
          return half ? group->shifts[r] / 4 - first : first;
        };
        Sums<F::kBits, Rows, Vecs> sums(offset);
        for (int k = 0; k < kQuads / 2; k += 2) {
          VecInt codes[2][Vecs];
          for (int i = 0; i < 2; ++i)
            for (int v = 0; v < Vecs; ++v) {
              const VecInt both = load_codes(k + i, v);
              const VecInt upper = load_codes(kQuads / 2 + half, v);
              const int shift = 2 * (k + i) - 4;
              codes[i][v] = (half ? high_nibbles(both) : low_nibbles(both)) |
                            ((shift < 0 ? upper << -shift : upper >> shift) & 0x30303030);
            }
          const int quad = half * kQuads / 2 + k;
          sums.add(*group, quad, quad + 1, codes[0], codes[1]);
        }
        settle(sums, factors + half * kPanel, offset);
      }
    } else {
      const auto offset = [&](int r) { return F::kHasMinimum ? 0 : group->shifts[r]; };
      Sums<F::kBits, Rows, Vecs> sums(offset);
      for (int k = 0; k < kQuads / 2; ++k) {
        VecInt codes[2][Vecs];
        for (int v = 0; v < Vecs; ++v) {
          if constexpr (F::kBits == 8) {
            codes[0][v] = load_codes(k, v);
            codes[1][v] = load_codes(k + kQuads / 2, v);
          } else {
            const VecInt bytes = load_codes(k, v);
            codes[0][v] = low_nibbles(bytes);
            codes[1][v] = high_nibbles(bytes);
          }
        }
        sums.add(*group, k, k + kQuads / 2, codes[0], codes[1]);
      }
      settle(sums, factors, offset);
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v) {
      store_columns(c.weight, c.out, row + r, column + v * kLanes, c.out_dtype, total[r][v]);
    }
}

// Rows of one tile x one panel.
template <Packing Kind, int Rows>
void panel_block(const Call& c, int64_t row, int column) {
  // As many sums as registers hold, on AVX2; one row takes a whole panel if it can, which reads memory in order.
  constexpr bool kFew = kLanes == 8 && Kind == Packing::kInt8 && Rows > 1;
  constexpr bool kMany = kLanes == 8 && Kind != Packing::kInt8 && Rows == 1;
  constexpr int kVecs = kFew ? 1 : kMany ? 4 : 2;
  for (int n = 0; n < kPanel; n += kVecs * kLanes) block<Kind, Rows, kVecs>(c, row, column + n);
}

template <Packing Kind, int... Rows>
void some_rows(std::integer_sequence<int, Rows...>, int rows, const Call& c, int64_t row, int column) {
  using Block = void (*)(const Call&, int64_t, int);
  static constexpr Block kBlocks[] = {panel_block<Kind, Rows + 1>...};
  kBlocks[rows - 1](c, row, column);
}

template <Packing Kind>
void run(Team& team, const Call& c, int64_t rows) {
  const int64_t pass = std::max<int64_t>(1, kPassBytes / c.weight.depth / kTileRows) * kTileRows;
  for (int64_t first = 0; first < rows; first += pass) {
    const int64_t end = std::min(first + pass, rows);
    team.share(panels_of(c.weight), [&](int64_t panel) {
      for (int64_t row = first; row < end; row += kTileRows)
        some_rows<Kind>(std::make_integer_sequence<int, kTileRows>{}, int(std::min<int64_t>(kTileRows, end - row)), c,
                        row, int(panel) * kPanel);
    });
  }
}

}  // namespace

void quantize_row(const Activations& to, int64_t row, int depth) {
  constexpr int kCount = kGroup / kLanes;
  RowGroup* group = to.groups + row / kTileRows * (depth / kGroup);
  const int r = int(row % kTileRows);
  for (int64_t at = row * depth; at < (row + 1) * depth; at += kGroup, ++group) {
    Vec x[kCount], top{};
    for (int v = 0; v < kCount; ++v) {
      x[v] = load_as_float(to.x, at + v * kLanes, to.dtype, nullptr);
      top = maximum(top, maximum(x[v], -x[v]));
    }
    // Below this the quotient overflows; such a group counts as zero.
    const float peak = largest(top), most = peak < 1e-35f ? 0.0f : peak, inverse = most > 0 ? 127.0f / most : 0.0f;
    VecInt totals[2] = {};
    for (int v = 0; v < kCount; ++v) {
      const VecInt code = round(x[v] * splat(inverse));
      totals[2 * v / kCount] += code;
      to_int8(group->codes[r] + v * kLanes, code);
    }
    // Both halves in one sum: each is at most 16 * 127 = 2032.
    const int halves = sum(totals[0] + (totals[1] << 16));
    const int first = int16_t(halves), all = first + ((halves - first) >> 16);
    group->first_sums[r] = first;
    group->shifts[r] = -128 * all;
    group->scales[r] = most / 127.0f;
    group->sums[r] = group->scales[r] * all;
  }
}

void quantized_piece(Team& team, const TandemLinear& piece, const Activations& x, int64_t rows, void* out,
                     DType out_dtype) {
  const Call call = {piece, x, out, out_dtype};
  switch ((Packing)piece.packing) {
    case Packing::kInt8: run<Packing::kInt8>(team, call, rows); break;
    case Packing::kInt4: run<Packing::kInt4>(team, call, rows); break;
    case Packing::kQ4K: run<Packing::kQ4K>(team, call, rows); break;
    default: run<Packing::kQ6K>(team, call, rows);
  }
}
