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
//   kInt4Zeros four groups: scale [32] float16 | zero [32] float16
//                         codes [4][32 columns][4]
//   kLut4   one group:    scale [32] float16
//                         codes [4][32 columns][4], which stand for bytes of the weight's table
//
// A weight is code * scale + minimum; the minimum is -128 * scale (kInt8, kLut4) or -32 * scale (kQ6K) where none is
// stored, and zero * scale with kInt4Zeros. Of 4 bits, row k has code 4 k + j in the lower half of a byte and code 16 + 4 k + j in the upper half. Of the upper 2 bits of
// kQ6K, row h has those of code 16 h + 4 k + j in bits 2 k of byte j.
//
// GGUF's Q8_0, Q4_0, Q4_1, Q4_K and Q6_K are such groups, as are the weights of AWQ, GPTQ and MXFP4, so they are taken as
// they are. With activations
// a = s * b:
//
//   sum w a = scale * s * (sum code b) + minimum * s * (sum b)
//
// The inner sums are exact in integers; groups are summed in float32, in order: a row's bits depend on nothing else.
// Outliers among the activations cost precision in their own 32 neighbours only, unlike a scale per row.

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "linear.h"
#include "scratch.h"

namespace {

constexpr int kQuads = kGroup / 4;
constexpr int kPanelVecs = kPanel / kLanes;
// Activations in one pass over the weights stay in the second-level cache.
constexpr int64_t kPassBytes = 512 << 10;
// Weights are prefetched this many bytes ahead; 8 KiB measured best with AVX-512, 1 to 8 KiB alike with AVX2.
constexpr int kAhead = 8192;
// Rows of a block of a product, by all rows of its tile. With AVX-512 the sums of 8 rows leave too few registers, but
// another block would read the weights again, which costs more where there are few.
constexpr int kMostBlockRows = kLanes == 16 && !kHasTiles ? 8 : 4;
constexpr int block_rows_of(int64_t rows) { return kMostBlockRows == 8 && rows > 16 ? 6 : kMostBlockRows; }
// With more rows than this, a panel is unpacked into scratch memory once for all rows: what AMX needs. Elsewhere it gains
// only where unpacking is slow: not on AMD's processors, which are those that use bfloat16 products without AMX, nor with
// AVX2 for codes of 8 bits. docs/decisions/matrix-units.md has the figures.
template <Packing Kind>
constexpr int64_t kPackedRows = kHasTiles                              ? 4
                                : kLanes == 16 && kHasBFloat16Products ? INT64_MAX
                                : kLanes == 16                         ? 8
                                : Kind == Packing::kInt8               ? INT64_MAX
                                : Kind == Packing::kQ6K || Kind == Packing::kLut4 ? 12
                                                                       : 32;
// Least rows of a part of the work, since each part unpacks a panel.
constexpr int64_t kLeastRows = 64;

template <Packing Kind>
struct Format {
  static constexpr bool kIsK = Kind == Packing::kQ4K || Kind == Packing::kQ6K, kIsLut = Kind == Packing::kLut4;
  // Bits of a code in memory, and as it is multiplied.
  static constexpr int kStoredBits = Kind == Packing::kInt8 ? 8 : Kind == Packing::kQ6K ? 6 : 4;
  static constexpr int kBits = kIsLut ? 8 : kStoredBits;
  static constexpr bool kHasMinimum = kBits == 4;
  // Codes of 8 bits minus 128, where the instruction takes signed bytes.
  static constexpr bool kIsShifted = kBits == 8 && kDotProductIsSigned;
  // Groups of a block of the packing; parts of a group that have their own scale.
  static constexpr int kGroups = kIsK ? 8 : Kind == Packing::kInt4Zeros ? 4 : 1, kParts = Kind == Packing::kQ6K ? 2 : 1;
  static constexpr int kHeadBytes = (kHasMinimum ? 4 : 2) * kPanel;
  static constexpr int kFactorBytes = kIsK ? 2 * kPanel : 0;
  static constexpr int kGroupBytes = kFactorBytes + kPanel * kGroup * kStoredBits / 8;

  static int64_t panel_bytes(int groups) {
    return int64_t(groups / kGroups) * kHeadBytes + int64_t(groups) * kGroupBytes;
  }
  // What the code that means 0 adds to a row's sum over a part, with the sign changed.
  static int32_t offset(const GroupTerms& terms, int part) {
    if constexpr (kHasMinimum || kIsShifted) return 0;
    if constexpr (kParts == 1) return terms.shift;
    const int first = -32 * terms.first_sum;
    return part ? terms.shift / 4 - first : first;
  }
};

inline VecInt load_int(const void* p) {
  VecInt v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
inline void store_int(void* p, VecInt v) { std::memcpy(p, &v, sizeof v); }

inline VecInt low_nibbles(VecInt bytes) { return bytes & 0x0f0f0f0f; }
inline VecInt high_nibbles(VecInt bytes) { return (bytes >> 4) & 0x0f0f0f0f; }

// GCC would add the products of a group in pairs, and hold more of them than there are registers.
inline VecInt in_order(VecInt sum) {
  asm("" : "+v"(sum));
  return sum;
}

struct Call {
  const TandemLinear& weight;
  QuantizedRows x;
  void* out;
  DType out_dtype;
};

// A panel as it is packed.
template <Packing Kind>
struct Packed {
  const TandemLinear& weight;
  int64_t panel;

  template <int Vecs>
  class Columns;
};

// Vecs * kLanes of its columns from `at` on, group by group.
template <Packing Kind>
template <int Vecs>
class Packed<Kind>::Columns {
  using F = Format<Kind>;

 public:
  Columns(const Packed& from, int at)
      : next((const uint8_t*)from.weight.packed + from.panel * F::panel_bytes(from.weight.depth / kGroup)), at(at) {
    if constexpr (F::kIsLut) table = load_table(from.weight.table) ^ (F::kIsShifted ? (int32_t)0x80808080 : 0);
  }

  // Called with 0, 1, 2, ...
  __attribute__((always_inline)) void open(int group) {
    if (group % F::kGroups == 0) {
      head = (const uint16_t*)next + at;
      next += F::kHeadBytes;
      if constexpr (F::kGroups > 1)
        for (int v = 0; v < Vecs; ++v) {
          scales[v] = from_f16(head + v * kLanes);
          if constexpr (F::kHasMinimum) minimums[v] = from_f16(head + kPanel + v * kLanes);
          if constexpr (Kind == Packing::kInt4Zeros) minimums[v] *= scales[v];
        }
    }
    // The hardware sees neither the next panel while blocks of rows read this one again, nor every line of a part of a
    // panel: a step of 8 rows takes .8 of the time so with AVX-512, up to half with AVX2.
    for (int line = 0; line < F::kGroupBytes; line += 64) __builtin_prefetch(next + kAhead + line);
    factors = (const int8_t*)next + at;
    packed = next + F::kFactorBytes + at * 4;
    next += F::kGroupBytes;
  }

  // Four codes in each lane.
  __attribute__((always_inline)) VecInt codes(int quad, int v) const {
    if constexpr (F::kStoredBits == 8) return F::kIsShifted ? line(quad, v) ^ (int32_t)0x80808080 : line(quad, v);
    const int lower = quad % (kQuads / 2), half = quad / (kQuads / 2);
    const VecInt both = line(lower, v), codes = half ? high_nibbles(both) : low_nibbles(both);
    if constexpr (F::kIsLut) return lookup(table, codes);
    if constexpr (F::kBits == 4) return codes;
    const VecInt upper = line(kQuads / 2 + half, v);
    const int shift = 2 * lower - 4;
    return codes | ((shift < 0 ? upper << -shift : upper >> shift) & 0x30303030);
  }

  // Scale of a code in a part of the group, and the minimum that is added to each weight.
  __attribute__((always_inline)) Vec scale(int part, int v) const {
    if constexpr (F::kGroups == 1) return from_f16(head + v * kLanes);
    if constexpr (!F::kIsK) return scales[v];
    return scales[v] * from_int8(factors + part * kPanel + v * kLanes);
  }
  __attribute__((always_inline)) Vec minimum(int v) const {
    if constexpr (F::kGroups == 1) return from_f16(head + kPanel + v * kLanes);
    if constexpr (!F::kIsK) return minimums[v];
    return minimums[v] * from_int8(factors + kPanel + v * kLanes);
  }

 private:
  VecInt line(int n, int v) const { return load_int(packed + (n * kPanel + v * kLanes) * 4); }

  const uint8_t* next;
  const int at;
  const uint16_t* head;
  const int8_t* factors;
  const uint8_t* packed;
  // Those of the current block's groups, where they are shared.
  Vec scales[Vecs] = {}, minimums[Vecs] = {};
  VecInt table{};
};

// The panel that is unpacked next is prefetched bit by bit while this one is multiplied. Memory would stand still then, and
// the cores while panels are unpacked.
class NextPanel {
 public:
  // Fetched by that many calls of fetch_some.
  void begin(const uint8_t* from, int64_t bytes, int64_t calls) {
    at = from;
    end = from + bytes;
    per_call = (bytes / calls + 63) / 64 * 64;
  }
  void fetch_some() {
    for (const uint8_t* until = std::min(at + per_call, end); at < until; at += 64) __builtin_prefetch(at);
  }

 private:
  const uint8_t *at = nullptr, *end = nullptr;
  int64_t per_call = 0;
};

// A panel in scratch memory: a byte per code, and a float for each scale.
template <Packing Kind>
struct Unpacked {
  using F = Format<Kind>;
  uint8_t* codes;            // [groups, rounded up to pairs][kQuads][kPanel][4]
  float *scales, *minimums;  // [groups][kParts][kPanel], [groups][kPanel]
  NextPanel& next;

  Unpacked(Scratch& scratch, int groups, NextPanel& next) : next(next) {
    const int64_t code_bytes = int64_t(groups + groups % 2) * kGroup * kPanel, floats = int64_t(groups) * kPanel;
    codes = (uint8_t*)scratch.of(code_bytes + floats * (F::kParts + 1) * sizeof(float));
    scales = (float*)(codes + code_bytes);
    minimums = scales + floats * F::kParts;
  }

  // It will be read in `passes` passes, which are to prefetch the next one.
  void load_panel(const TandemLinear& weight, int64_t panel, int64_t passes) const {
    const int64_t groups = weight.depth / kGroup, bytes = F::panel_bytes(int(groups));
    const bool is_last = panel + 1 == panels_of(weight);
    next.begin((const uint8_t*)weight.packed + (panel + 1) * bytes, is_last ? 0 : bytes, passes * groups);
    typename Packed<Kind>::template Columns<kPanelVecs> from({weight, panel}, 0);
    for (int g = 0; g < groups; ++g) {
      from.open(g);
      for (int quad = 0; quad < kQuads; ++quad)
        for (int v = 0; v < kPanelVecs; ++v) store_int(codes_at(g, quad, v * kLanes), from.codes(quad, v));
      for (int v = 0; v < kPanelVecs; ++v) {
        for (int part = 0; part < F::kParts; ++part) ::store(scales_at(g, part, v * kLanes), from.scale(part, v));
        if constexpr (F::kHasMinimum) ::store(minimums + g * kPanel + v * kLanes, from.minimum(v));
      }
    }
  }

  uint8_t* codes_at(int64_t group, int quad, int column) const {
    return codes + ((group * kQuads + quad) * kPanel + column) * 4;
  }
  float* scales_at(int group, int part, int column) const {
    return scales + (group * F::kParts + part) * kPanel + column;
  }

  // As those of a packed panel.
  template <int Vecs>
  class Columns {
   public:
    Columns(const Unpacked& from, int at) : from(from), at(at) {}

    void open(int g) {
      group = g;
      from.next.fetch_some();
    }
    VecInt codes(int quad, int v) const { return load_int(from.codes_at(group, quad, at + v * kLanes)); }
    Vec scale(int part, int v) const { return load(from.scales_at(group, part, at + v * kLanes)); }
    Vec minimum(int v) const { return load(from.minimums + group * kPanel + at + v * kLanes); }

   private:
    const Unpacked& from;
    const int at;
    int group = 0;
  };
};

// Codes times activations of -127 .. 127, summed over a group or half of it, for some rows and columns. Without an
// instruction for it, 16 bits hold what a group adds to them of 4-bit codes (at most 16 * 15 * 127 = 30,480) and what two
// quads add of 6-bit codes (4 * 63 * 127 = 32,004); codes of 8 bits are two planes of 4 bits, each with its own sum.
template <int Bits, int Rows, int Vecs>
struct Sums {
  static constexpr bool kIsWide = kHasDotProduct || Bits == 6;
  static constexpr int kPlanes = !kIsWide && Bits == 8 ? 2 : 1;
  VecInt planes[kPlanes][Rows][Vecs] = {};

  // offset(r) belongs to each sum of row r.
  template <class Offset>
  __attribute__((always_inline)) explicit Sums(Offset offset) {
    if constexpr (kIsWide)
      for (int r = 0; r < Rows; ++r)
        for (int v = 0; v < Vecs; ++v) planes[0][r][v] += offset(r);
  }

  // Codes of two quads of depth, times those of rows `stride` bytes apart.
  __attribute__((always_inline)) void add(const int8_t* rows, int64_t stride, int quad, int other_quad,
                                          const VecInt* codes, const VecInt* other_codes) {
    if constexpr (kHasDotProduct) {
      add_one(rows + 4 * quad, stride, codes);
      add_one(rows + 4 * other_quad, stride, other_codes);
    } else {
      for (int r = 0; r < Rows; ++r) {
        int32_t by, other;
        std::memcpy(&by, rows + r * stride + 4 * quad, 4);
        std::memcpy(&other, rows + r * stride + 4 * other_quad, 4);
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
  }

  __attribute__((always_inline)) void add_one(const int8_t* rows, int64_t stride, const VecInt* codes) {
    for (int r = 0; r < Rows; ++r) {
      int32_t by;
      std::memcpy(&by, rows + r * stride, 4);
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

// Rows of one tile x Vecs * kLanes columns, from `column` on. Out of line, so that each has registers of its own.
template <Packing Kind, int Rows, int Vecs, class Panel>
__attribute__((noinline)) void block(const Call& c, int64_t row, int column, const Panel& panel) {
  using F = Format<Kind>;
  typename Panel::template Columns<Vecs> columns(panel, column % kPanel);
  const int64_t stride = c.x.stride();
  Vec total[Rows][Vecs] = {};
  const GroupTerms* terms = c.x.terms(row, 0);
  const int8_t* first_group = c.x.codes(row, 0);
  for (int g = 0, groups = c.weight.depth / kGroup; g < groups; ++g, terms += kTileRows) {
    columns.open(g);
    const int8_t* rows = first_group + c.x.distance(g);
#pragma GCC unroll 2
    for (int part = 0; part < F::kParts; ++part) {
      const auto offset = [&](int r) { return F::offset(terms[r], part); };
      Sums<F::kBits, Rows, Vecs> sums(offset);
#pragma GCC unroll 4
      for (int k = 0; k < kQuads / F::kParts; k += 2) {
        // Two quads whose codes lie in the same bytes, if there are any.
        const int quad = F::kParts == 1 ? k / 2 : part * kQuads / 2 + k;
        const int other_quad = F::kParts == 1 ? quad + kQuads / 2 : quad + 1;
        VecInt codes[2][Vecs];
        for (int v = 0; v < Vecs; ++v) {
          codes[0][v] = columns.codes(quad, v);
          codes[1][v] = columns.codes(other_quad, v);
        }
        sums.add(rows, stride, quad, other_quad, codes[0], codes[1]);
      }
      for (int r = 0; r < Rows; ++r) {
        const Vec unit = splat(terms[r].scale), sum = splat(terms[r].sum);
        for (int v = 0; v < Vecs; ++v) {
          const Vec dot = __builtin_convertvector(sums.of(r, v, offset), Vec) * unit;
          total[r][v] = fma(dot, columns.scale(part, v), total[r][v]);
          if constexpr (F::kHasMinimum) total[r][v] = fma(sum, columns.minimum(v), total[r][v]);
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r)
    for (int v = 0; v < Vecs; ++v)
      store_columns(c.weight, c.out, row + r, column + v * kLanes, c.out_dtype, total[r][v]);
}

// Rows of one tile x one panel.
template <Packing Kind, int Rows, class Panel>
void panel_block(const Call& c, int64_t row, int64_t first_column, const Panel& panel) {
  // As many sums as registers hold, on AVX2; one row takes a whole panel if it can, which reads memory in order.
  constexpr bool kFew = kLanes == 8 && Format<Kind>::kBits == 8 && Rows > 1;
  constexpr bool kMany = kLanes < 16 && Format<Kind>::kBits < 8 && Rows == 1;
  constexpr int kVecs = kFew ? 1 : kMany ? 4 : 2;
  for (int at = 0; at < kPanel; at += kVecs * kLanes)
    block<Kind, Rows, kVecs>(c, row, int(first_column) + at, panel);
}

// Calls work(rows as a constant) for rows of 1 .. Most.
template <int Most, class Work>
inline void with_constant(int rows, Work work) {
  if constexpr (Most > 1)
    if (rows < Most) return with_constant<Most - 1>(rows, work);
  work(std::integral_constant<int, Most>());
}

// Rows first .. end - 1 x one panel, in blocks of nearly equal size within tiles.
template <Packing Kind, class Panel>
void block_rows(const Call& c, int64_t first, int64_t end, int64_t first_column, const Panel& panel) {
  for (int64_t tile = first; tile < end; tile += kTileRows) {
    const int rows = int(std::min<int64_t>(kTileRows, end - tile)), most = block_rows_of(rows);
    const int blocks = (rows + most - 1) / most;
    for (int i = 0; i < blocks; ++i) {
      const int from = rows * i / blocks, to = rows * (i + 1) / blocks;
      with_constant<kMostBlockRows>(to - from, [&](auto count) {
        panel_block<Kind, decltype(count)::value>(c, tile + from, first_column, panel);
      });
    }
  }
}

// Products of AMX's tiles. Each yields the sums of a unit: a part of a group for 16 rows, or if the rows are paired, two
// groups for 8 rows each (codes of 6 bits: one part for 8 rows). The sums pass through memory to vector registers, where
// they are scaled. The scaling of some units overlaps with the products of the next ones.
template <Packing Kind, bool Paired>
struct TileProduct {
  using F = Format<Kind>;
  static constexpr bool kJoinsGroups = Paired && F::kParts == 1;
  static constexpr int kUnitRows = Paired && !kJoinsGroups ? kPairedRows : 16;
  static constexpr int kUnitDepth = kJoinsGroups ? 2 * kGroup : kGroup / F::kParts;
  // Tiles 0 to 3 have sums, 4 and 5 activations, 6 and 7 codes of 16 columns.
  static constexpr int kBatch = 4;

  static TileConfig config() {
    TileConfig made;
    for (int t = 0; t < 8; ++t)
      t < 4   ? made.shape(t, kUnitRows, 64)
      : t < 6 ? made.shape(t, kUnitRows, kUnitDepth)
              : made.shape(t, kUnitDepth / 4, 64);
    return made;
  }

  // `rows` rows of a tile x 16 columns; up to Rows are computed.
  template <int Rows>
  static void run(const Call& c, int64_t row, int rows, int column, const Unpacked<Kind>& panel) {
    alignas(64) int32_t sums[2][kBatch][16][16];
    Vec total[Rows] = {};
    // Local copies of the addresses: the compiler assumes that tile loads and stores touch any memory, and would reload
    // them from the objects.
    const int groups = c.weight.depth / kGroup, units = kJoinsGroups ? (groups + 1) / 2 : groups * F::kParts;
    const int8_t* activations = c.x.codes(row, 0);
    const uint8_t* codes = panel.codes_at(0, 0, column % kPanel);
    const GroupTerms* terms = c.x.terms(row, 0);
    const float* scales = panel.scales_at(0, 0, column % kPanel);
    const float* minimums = panel.minimums + column % kPanel;
    NextPanel& next = panel.next;

    const auto multiply = [&](int unit, auto slot, int half) __attribute__((always_inline)) {
      constexpr int kSlot = decltype(slot)::value;
      if (unit >= units) return;
      const int group = kJoinsGroups ? 2 * unit : unit / F::kParts, part = kJoinsGroups ? 0 : unit % F::kParts;
      tile_zero<kSlot>();
      tile_load<4 + kSlot % 2>(activations + QuantizedRows::distance<Paired>(group) + part * kUnitDepth,
                               Paired ? 64 : kGroup);
      tile_load<6 + kSlot % 2>(codes + unit * (kUnitDepth * kPanel), kPanel * 4);
      tile_dot_int8<kSlot, 4 + kSlot % 2, 6 + kSlot % 2>();
      tile_store<kSlot>(sums[half][kSlot], 64);
    };
    const auto multiply_batch = [&](int first, int half) __attribute__((always_inline)) {
      multiply(first, std::integral_constant<int, 0>(), half);
      multiply(first + 1, std::integral_constant<int, 1>(), half);
      multiply(first + 2, std::integral_constant<int, 2>(), half);
      multiply(first + 3, std::integral_constant<int, 3>(), half);
    };
    const auto settle = [&](int group, int part, const int32_t (*of)[16]) __attribute__((always_inline)) {
      next.fetch_some();
      const GroupTerms* of_rows = terms + int64_t(group) * kTileRows;
      const Vec scale = load(scales + (group * F::kParts + part) * kPanel);
      const Vec minimum = F::kHasMinimum ? load(minimums + group * kPanel) : Vec{};
      for (int r = 0; r < Rows; ++r) {
        const VecInt sum = load_int(of[r]) + F::offset(of_rows[r], part);
        total[r] = fma(__builtin_convertvector(sum, Vec) * splat(of_rows[r].scale), scale, total[r]);
        if constexpr (F::kHasMinimum) total[r] = fma(splat(of_rows[r].sum), minimum, total[r]);
      }
    };

    multiply_batch(0, 0);
    for (int unit = 0, half = 0; unit < units; unit += kBatch, half ^= 1) {
      multiply_batch(unit + kBatch, half ^ 1);
      for (int i = 0; i < std::min(kBatch, units - unit); ++i) {
        if constexpr (kJoinsGroups) {
          const int group = 2 * (unit + i);
          settle(group, 0, sums[half][i]);
          if (group + 1 < groups) settle(group + 1, 0, sums[half][i] + kPairedRows);
        } else {
          settle((unit + i) / F::kParts, (unit + i) % F::kParts, sums[half][i]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      if (r < rows) store_columns(c.weight, c.out, row + r, column, c.out_dtype, total[r]);
  }
};

// Rows first .. end - 1 x one panel.
template <Packing Kind>
void tile_rows(const Call& c, int64_t first, int64_t end, int64_t first_column, const Unpacked<Kind>& panel) {
  const bool paired = c.x.is_paired();
  for (int64_t row = first; row < end; row += kTileRows)
    for (int column = int(first_column); column < first_column + kPanel; column += 16) {
      const int rows = int(std::min<int64_t>(kTileRows, end - row));
      if (paired)
        with_constant<kPairedRows / 2>((rows + 1) / 2, [&](auto twos) {
          TileProduct<Kind, true>::template run<2 * decltype(twos)::value>(c, row, rows, column, panel);
        });
      else
        with_constant<kTileRows / 4>((rows + 3) / 4, [&](auto fours) {
          TileProduct<Kind, false>::template run<4 * decltype(fours)::value>(c, row, rows, column, panel);
        });
    }
}

// One piece of each group's weight.
template <Packing Kind>
void run(Team& team, const LinearGroup* groups, int count, int piece, DType out_dtype) {
  const TandemLinear& shape = groups->weight[piece];
  const int64_t panels = panels_of(shape);
  // Rows are divided so that a part stays in the cache and all threads have work, and evenly: a few rows left over would
  // count as much as the others when threads take their shares.
  const int64_t wanted = std::max<int64_t>(1, 4 * team.size() / (panels * count));
  const auto part_rows_of = [&](int64_t rows) {
    const int64_t most = std::clamp(rows / wanted, kLeastRows, std::max(kLeastRows, kPassBytes / shape.depth));
    const int64_t tiles = (rows + kTileRows - 1) / kTileRows, parts = std::max<int64_t>(1, (rows + most - 1) / most);
    return std::max<int64_t>(1, (tiles + parts - 1) / parts) * kTileRows;
  };
  static thread_local Scratch scratch;
  NextPanel next;
  std::optional<Unpacked<Kind>> unpacked;
  std::optional<Tiles> tiles;
  int64_t part_rows = 0;
  share_groups(
      team, count,
      [&](int g) {
        const int64_t each = part_rows_of(groups[g].rows);
        return (groups[g].rows + each - 1) / each * panels;
      },
      [&](int g) {
        part_rows = part_rows_of(groups[g].rows);
        if (groups[g].rows <= kPackedRows<Kind>) return;
        if (!unpacked) unpacked.emplace(scratch, shape.depth / kGroup, next);
        if constexpr (kHasTiles) {
          const bool paired = QuantizedRows(groups[g].x, shape.depth).is_paired();
          tiles.emplace(paired ? TileProduct<Kind, true>::config() : TileProduct<Kind, false>::config());
        }
      },
      [&](int g, int64_t i) {
        const LinearGroup& group = groups[g];
        const Call c = {group.weight[piece], QuantizedRows(group.x, shape.depth), group.out, out_dtype};
        const int64_t part = i < panels ? 0 : i / panels, panel = i - part * panels, first = part * part_rows,
                      end = std::min(first + part_rows, group.rows);
        if (group.rows <= kPackedRows<Kind>) {
          block_rows<Kind>(c, first, end, panel * kPanel, Packed<Kind>{c.weight, panel});
        } else if constexpr (kHasTiles) {
          unpacked->load_panel(c.weight, panel, kPanel / 16 * ((end - first + kTileRows - 1) / kTileRows));
          tile_rows<Kind>(c, first, end, panel * kPanel, *unpacked);
        } else {
          unpacked->load_panel(c.weight, panel, (end - first + kMostBlockRows - 1) / kMostBlockRows);
          block_rows<Kind>(c, first, end, panel * kPanel, *unpacked);
        }
      });
}

}  // namespace

// Some elements of a row, one by one.
static void gather(const Activations& from, int64_t first, const int32_t* at, float* out) {
  for (int i = 0; i < kGroup; ++i) {
    if (from.dtype == DType::kFloat32) out[i] = ((const float*)from.x)[first + at[i]];
    else {
      const uint32_t bits = uint32_t(((const uint16_t*)from.x)[first + at[i]]) << 16;
      std::memcpy(out + i, &bits, 4);
    }
  }
}

void quantize_row(const Activations& to, int64_t row, int depth) {
  constexpr int kCount = kGroup / kLanes;
  const QuantizedRows rows(to, depth);
  for (int g = 0; g < depth / kGroup; ++g) {
    const int64_t at = row * depth + g * kGroup;
    int8_t* codes = rows.codes(row, g);
    alignas(64) float picked[kGroup];
    if (to.order) gather(to, row * depth, to.order + g * kGroup, picked);
    Vec x[kCount], top{};
    VecInt is_nan{};
    for (int v = 0; v < kCount; ++v) {
      x[v] = to.order ? load(picked + v * kLanes) : load_as_float(to.x, at + v * kLanes, to.dtype, nullptr);
      top = maximum(top, maximum(x[v], -x[v]));
      is_nan |= x[v] != x[v];
    }
    // Below this the quotient overflows; such a group counts as zero. A NaN, which has no code, is in the factor.
    const float peak = sum(is_nan) ? NAN : largest(top), most = peak < 1e-35f ? 0.0f : peak;
    const float inverse = most > 0 ? 127.0f / most : 0.0f;
    VecInt totals[2] = {};
    for (int v = 0; v < kCount; ++v) {
      const VecInt code = round(x[v] * splat(inverse));
      totals[2 * v / kCount] += code;
      to_int8(codes + v * kLanes, code);
    }
    // Both halves in one sum: each is at most 16 * 127 = 2032.
    const int halves = sum(totals[0] + (totals[1] << 16));
    const int first = int16_t(halves), all = first + ((halves - first) >> 16);
    *rows.terms(row, g) = {most / 127.0f, most / 127.0f * all, first, -128 * all};
  }
  if (rows.is_paired()) rows.clear_beside(row);
}

void copy_quantized_row(const Activations& from, int64_t row, const Activations& to, int64_t to_row, int depth) {
  const QuantizedRows source(from, depth), target(to, depth);
  for (int g = 0; g < depth / kGroup; ++g) {
    std::memcpy(target.codes(to_row, g), source.codes(row, g), kGroup);
    *target.terms(to_row, g) = *source.terms(row, g);
  }
  if (target.is_paired()) target.clear_beside(to_row);
}

void quantized_piece(Team& team, const LinearGroup* groups, int count, int piece, DType out_dtype) {
  switch ((Packing)groups->weight[piece].packing) {
    case Packing::kInt8: run<Packing::kInt8>(team, groups, count, piece, out_dtype); break;
    case Packing::kInt4: run<Packing::kInt4>(team, groups, count, piece, out_dtype); break;
    case Packing::kQ4K: run<Packing::kQ4K>(team, groups, count, piece, out_dtype); break;
    case Packing::kInt4Zeros: run<Packing::kInt4Zeros>(team, groups, count, piece, out_dtype); break;
    case Packing::kLut4: run<Packing::kLut4>(team, groups, count, piece, out_dtype); break;
    default: run<Packing::kQ6K>(team, groups, count, piece, out_dtype);
  }
}
