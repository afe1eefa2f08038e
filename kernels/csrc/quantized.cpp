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

#include "linear.h"

namespace {

// Rows and vectors of columns in registers at once, each with a sum of integers and one of floats.
#if defined(__AVX512F__)
constexpr int kRows = 4, kVecs = 2;
#else
constexpr int kRows = 2, kVecs = 2;
#endif
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

// Rows x kVecs * kLanes columns from `column` on.
template <int Bits, int Rows>
void block(const Call& c, int64_t row, int column) {
  const int groups = c.weight.depth / kGroup, at = column % kPanel;
  const uint8_t* group = (const uint8_t*)c.weight.packed + int64_t(column / kPanel) * groups * kGroupBytes<Bits>;
  const int32_t* codes = (const int32_t*)c.x.codes + row * groups * kQuads;
  const float* scales = c.x.scales + row * groups;
  const int32_t* sums = c.x.sums + row * groups;
  Vec total[Rows][kVecs] = {};
  for (int g = 0; g < groups; ++g, group += kGroupBytes<Bits>, codes += kQuads) {
    VecInt dot[Rows][kVecs];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < kVecs; ++v) dot[r][v] = VecInt{} + (Bits == 8 ? -128 * sums[r * groups + g] : 0);
    auto add = [&](const VecInt* weights, int quad) {
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < kVecs; ++v)
          dot[r][v] = dot_add(dot[r][v], weights[v], codes[int64_t(r) * groups * kQuads + quad]);
    };
    Vec scale[kVecs], minimum[kVecs] = {};
    for (int v = 0; v < kVecs; ++v) scale[v] = from_f16((const uint16_t*)group + at + v * kLanes);
    if constexpr (Bits == 8) {
      for (int k = 0; k < kQuads; ++k) {
        VecInt weights[kVecs];
        for (int v = 0; v < kVecs; ++v)
          weights[v] = load_int(group + 2 * kPanel + (k * kPanel + at + v * kLanes) * 4);
        add(weights, k);
      }
    } else {
      for (int v = 0; v < kVecs; ++v) minimum[v] = from_f16((const uint16_t*)group + kPanel + at + v * kLanes);
      for (int k = 0; k < kQuads / 2; ++k) {
        VecInt low[kVecs], high[kVecs];
        for (int v = 0; v < kVecs; ++v) {
          const VecInt both = load_int(group + 4 * kPanel + (k * kPanel + at + v * kLanes) * 4);
          low[v] = both & 0x0f0f0f0f;
          high[v] = (both >> 4) & 0x0f0f0f0f;
        }
        add(low, k);
        add(high, k + kQuads / 2);
      }
    }
    for (int r = 0; r < Rows; ++r) {
      const float unit = scales[r * groups + g];
      for (int v = 0; v < kVecs; ++v) {
        total[r][v] = fma(__builtin_convertvector(dot[r][v], Vec) * splat(unit), scale[v], total[r][v]);
        if constexpr (Bits == 4) total[r][v] = fma(splat(unit * sums[r * groups + g]), minimum[v], total[r][v]);
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < kVecs; ++v) {
      const int n = column + v * kLanes;
      if (c.weight.bias) total[r][v] += load_as_float(c.weight.bias, n, c.x.dtype, nullptr);
      store_from_float(c.out, (row + r) * c.weight.columns + n, c.out_dtype, total[r][v]);
    }
}

template <int Bits>
void some_rows(int rows, const Call& c, int64_t row, int column) {
  switch (rows) {
    case 1: return block<Bits, 1>(c, row, column);
    case 2: return block<Bits, 2>(c, row, column);
#if defined(__AVX512F__)
    case 3: return block<Bits, 3>(c, row, column);
#endif
    default: return block<Bits, kRows>(c, row, column);
  }
}

template <int Bits>
void run(Team& team, const Call& c, int64_t rows) {
  const int64_t pass = std::max<int64_t>(kRows, kPassBytes / c.weight.depth / kRows * kRows);
  for (int64_t first = 0; first < rows; first += pass) {
    const int64_t count = std::min(pass, rows - first), blocks = (count + kRows - 1) / kRows;
    team.share(c.weight.columns / kPanel, [&](int64_t panel) {
      for (int64_t i = 0; i < blocks; ++i) {
        const int64_t from = first + count * i / blocks, to = first + count * (i + 1) / blocks;
        for (int n = 0; n < kPanel; n += kVecs * kLanes)
          some_rows<Bits>(int(to - from), c, from, int(panel) * kPanel + n);
      }
    });
  }
  team.wait();
}

}  // namespace

void quantize_row(const Activations& to, int64_t row, int depth) {
  constexpr int kCount = kGroup / kLanes;
  for (int64_t at = row * depth; at < (row + 1) * depth; at += kGroup) {
    Vec x[kCount], top{};
    for (int v = 0; v < kCount; ++v) {
      x[v] = load_as_float(to.x, at + v * kLanes, to.dtype, nullptr);
      top = maximum(top, maximum(x[v], -x[v]));
    }
    // Below this the quotient overflows; such a group counts as zero.
    const float most = largest(top) < 1e-35f ? 0.0f : largest(top), inverse = most > 0 ? 127.0f / most : 0.0f;
    VecInt sum{};
    for (int v = 0; v < kCount; ++v) {
#if defined(__AVX512F__)
      const VecInt code = (VecInt)_mm512_cvtps_epi32((__m512)(x[v] * splat(inverse)));
#else
      const VecInt code = (VecInt)_mm256_cvtps_epi32((__m256)(x[v] * splat(inverse)));
#endif
      sum += code;
      typedef int8_t Bytes __attribute__((vector_size(kLanes)));
      const Bytes narrow = __builtin_convertvector(code, Bytes);
      std::memcpy(to.codes + at + v * kLanes, &narrow, sizeof narrow);
    }
    int32_t whole = 0;
    for (int i = 0; i < kLanes; ++i) whole += sum[i];
    to.scales[at / kGroup] = most / 127.0f;
    to.sums[at / kGroup] = whole;
  }
}

void quantized_linear_in_team(Team& team, const TandemLinear& weight, const Activations& x, int64_t rows, void* out,
                              DType out_dtype) {
  const Call call = {weight, x, out, out_dtype};
  if ((Packing)weight.packing == Packing::kInt8) run<8>(team, call, rows);
  else run<4>(team, call, rows);
}
