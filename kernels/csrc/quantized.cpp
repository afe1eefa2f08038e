// Matrix products in 8-bit integers: activations quantized on the way, in groups of 32, by weights of 8 or 4 bits.
//
// A group of 32 along depth, of a panel's 32 columns; a weight is code * scale + minimum, codes are unsigned:
//
//   kInt8   scale [32] float16 | codes [8][32 columns][4]                        minimum = -128 * scale, not stored
//   kInt4   scale [32] float16 | minimum [32] float16 | codes [4][32 columns][4]
//           of row k, a byte holds code 4 k + j in its lower half and code 16 + 4 k + j in its upper half
//
// GGUF's Q8_0, Q4_0 and Q4_1 are such groups, so their weights are taken as they are. With activations a = s * b:
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

template <int Bits>
constexpr int kGroupBytes = (Bits == 8 ? 2 : 4) * kPanel + kPanel * kGroup * Bits / 8;

inline VecInt load_int(const void* p) {
  VecInt v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// acc + the four products of unsigned bytes by the signed bytes of `by`, per 32-bit lane.
inline VecInt dot_add(VecInt acc, VecInt codes, int32_t by) {
#if defined(__AVX512VNNI__)
  return (VecInt)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(by));
#elif defined(__AVX512F__)
  const __m512i u = (__m512i)codes, s = _mm512_set1_epi32(by);
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(u, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(s, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u, 8), _mm512_srai_epi16(s, 8));
  return acc + (VecInt)even + (VecInt)odd;
#else
  // Widened, as the products of bytes would saturate 16 bits.
  const __m256i u = (__m256i)codes, s = _mm256_set1_epi32(by);
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(255)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return acc + (VecInt)even + (VecInt)odd;
#endif
}

struct Call {
  const TandemLinear& weight;
  const Activations& x;
  void* out;
  DType out_dtype;
};

// Rows of one tile x Vecs * kLanes columns from `column` on.
template <int Bits, int Rows, int Vecs>
void block(const Call& c, int64_t row, int column) {
  const int groups = c.weight.depth / kGroup;
  const int64_t at = column % kPanel;
  const uint8_t* weights = (const uint8_t*)c.weight.packed + int64_t(column / kPanel) * groups * kGroupBytes<Bits>;
  const RowGroup* group = c.x.groups + row / kTileRows * groups;
  Vec total[Rows][Vecs] = {};
  for (int g = 0; g < groups; ++g, ++group, weights += kGroupBytes<Bits>) {
    VecInt dot[Rows][Vecs];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vecs; ++v) dot[r][v] = VecInt{} + (Bits == 8 ? group->shifts[r] : 0);
    auto add = [&](const VecInt* codes, int quad) {
      for (int r = 0; r < Rows; ++r) {
        int32_t by;
        std::memcpy(&by, group->codes[r] + 4 * quad, 4);
        for (int v = 0; v < Vecs; ++v) dot[r][v] = dot_add(dot[r][v], codes[v], by);
      }
    };
    const uint16_t* scales = (const uint16_t*)weights + at;
    const uint8_t* packed = weights + (Bits == 8 ? 2 : 4) * kPanel + at * 4;
    Vec scale[Vecs], minimum[Vecs] = {};
    for (int v = 0; v < Vecs; ++v) scale[v] = from_f16(scales + v * kLanes);
    if constexpr (Bits == 8) {
      for (int k = 0; k < kQuads; ++k) {
        VecInt codes[Vecs];
        for (int v = 0; v < Vecs; ++v) codes[v] = load_int(packed + (k * kPanel + v * kLanes) * 4);
        add(codes, k);
      }
    } else {
      for (int v = 0; v < Vecs; ++v) minimum[v] = from_f16(scales + kPanel + v * kLanes);
      for (int k = 0; k < kQuads / 2; ++k) {
        VecInt low[Vecs], high[Vecs];
        for (int v = 0; v < Vecs; ++v) {
          const VecInt both = load_int(packed + (k * kPanel + v * kLanes) * 4);
          low[v] = both & 0x0f0f0f0f;
          high[v] = (both >> 4) & 0x0f0f0f0f;
        }
        add(low, k);
        add(high, k + kQuads / 2);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const Vec unit = splat(group->scales[r]), offset = splat(group->sums[r]);
      for (int v = 0; v < Vecs; ++v) {
        total[r][v] = fma(__builtin_convertvector(dot[r][v], Vec) * unit, scale[v], total[r][v]);
        if constexpr (Bits == 4) total[r][v] = fma(offset, minimum[v], total[r][v]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v) {
      store_columns(c.weight, c.out, row + r, column + v * kLanes, c.out_dtype, total[r][v]);
    }
}

// Rows of one tile x one panel.
template <int Bits, int Rows>
void panel_block(const Call& c, int64_t row, int column) {
  // As many sums as registers hold: two vectors of few rows, or one of many.
  constexpr int kVecs = 2;
  for (int n = 0; n < kPanel; n += kVecs * kLanes) block<Bits, Rows, kVecs>(c, row, column + n);
}

template <int Bits, int... Rows>
void some_rows(std::integer_sequence<int, Rows...>, int rows, const Call& c, int64_t row, int column) {
  using Block = void (*)(const Call&, int64_t, int);
  static constexpr Block kBlocks[] = {panel_block<Bits, Rows + 1>...};
  kBlocks[rows - 1](c, row, column);
}

template <int Bits>
void run(const Team& team, const Call& c, int64_t rows) {
  const int64_t pass = std::max<int64_t>(1, kPassBytes / c.weight.depth / kTileRows) * kTileRows;
  for (int64_t first = 0; first < rows; first += pass) {
    const int64_t end = std::min(first + pass, rows);
    team.share(panels_of(c.weight), [&](int64_t panel) {
      for (int64_t row = first; row < end; row += kTileRows)
        some_rows<Bits>(std::make_integer_sequence<int, kTileRows>{}, int(std::min<int64_t>(kTileRows, end - row)), c,
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
    VecInt total{};
    for (int v = 0; v < kCount; ++v) {
      const VecInt code = round(x[v] * splat(inverse));
      total += code;
      to_int8(group->codes[r] + v * kLanes, code);
    }
    group->scales[r] = most / 127.0f;
    group->sums[r] = group->scales[r] * sum(total);
    group->shifts[r] = -128 * sum(total);
  }
}

void quantized_piece(const Team& team, const TandemLinear& piece, const Activations& x, int64_t rows, void* out,
                     DType out_dtype) {
  const Call call = {piece, x, out, out_dtype};
  if ((Packing)piece.packing == Packing::kInt8) run<8>(team, call, rows);
  else run<4>(team, call, rows);
}
