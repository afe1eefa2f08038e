// Matrix products with weights in float32 or bfloat16.
//
// A decode step has few rows and waits for the weights' memory, so its cost hardly grows up to a dozen rows; a
// prompt chunk has hundreds and waits for the multipliers. One packing serves both, in vectors and in AMX's tiles. A
// result sums over depth in the same order, whatever the number of rows: bits do not depend on the batch.

#include "linear.h"

#include <algorithm>
#include <utility>

#include "product.h"
#include "scratch.h"
#include "tile_product.h"

namespace {

constexpr int kPanelVecs = kPanel / kLanes;

// With 16 lanes and 32 registers a block has twelve rows of one panel, or six of two, which loads less per product.
template <class Type>
constexpr int kFewRows = kLanes == 16 ? 2 * kMostRows<Type> : kMostRows<Type>;
constexpr int kFewVecs = kLanes == 4 ? 4 : 2, kManyVecs = kLanes == 8 ? 2 : 4;
// Lanes of depth summed in one go. Sums of sums round less than one long sum, whose error grows with its length.
constexpr int kDepthBlock = 384;
// Rows that pass over all panels at once; each further pass reads the weights from memory again.
constexpr int kRowChunk = 1024;

struct Call {
  const TandemLinear& weight;
  const Activations& x;
  int64_t rows;
  void* out;
  DType out_dtype;
};

// Rows of Vecs * kLanes columns from `column` on, through registers into out. left: row `row` of x.
template <class Type, int Rows, int Vecs>
void block(const Call& c, const uint32_t* left, int64_t row, int column) {
  const int lanes = c.weight.depth / kPerLane<typename Type::Right>;
  const int64_t panel = int64_t(column / kPanel) * lanes * kPanel;
  alignas(64) float sums[Rows][Vecs * kLanes];
  for (int from = 0; from < lanes; from += kDepthBlock) {
    const auto product = from == 0 ? product_block<Type, Rows, Vecs, Sum::kFresh, std::min(Vecs, kPanelVecs)>
                                   : product_block<Type, Rows, Vecs, Sum::kAdded, std::min(Vecs, kPanelVecs)>;
    product(left + from * kLeftLanes<Type>, lanes * kLeftLanes<Type>,
            (const uint32_t*)c.weight.packed + panel + column % kPanel + int64_t(from) * kPanel, kPanel, sums[0],
            Vecs * kLanes, std::min(kDepthBlock, lanes - from), int64_t(lanes) * kPanel, 0);
  }
  for (int r = 0; r < Rows; ++r)
    for (int n = 0; n < Vecs * kLanes; n += kLanes) {
      store_columns(c.weight, c.out, row + r, column + n, c.out_dtype, load(sums[r] + n));
    }
}

template <class Type, int Vecs, int... Rows>
void some_rows(std::integer_sequence<int, Rows...>, int rows, const Call& c, const uint32_t* left, int64_t row,
               int column) {
  using Block = void (*)(const Call&, const uint32_t*, int64_t, int);
  static constexpr Block kBlocks[] = {block<Type, Rows + 1, Vecs>...};
  kBlocks[rows - 1](c, left, row, column);
}

// Some neighbouring rows, as the left side of a product.
struct Rows {
  int64_t first, end;
  const uint32_t* left;
  int64_t stride;  // in lanes
};

// Vecs * kLanes columns of the rows, in blocks of nearly equal size.
template <class Type, int MostRows, int Vecs>
void column_block(const Call& c, const Rows& rows, int column) {
  const int64_t count = rows.end - rows.first, blocks = (count + MostRows - 1) / MostRows;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t from = count * i / blocks, to = count * (i + 1) / blocks;
    some_rows<Type, Vecs>(std::make_integer_sequence<int, MostRows>{}, int(to - from), c,
                          rows.left + from * rows.stride, rows.first + from, column);
  }
}

template <class Type, int MostRows, int Vecs>
void all_columns(Team& team, const Call& c, const Rows& rows) {
  constexpr int kWidth = std::max(Vecs * kLanes, kPanel);
  const int columns = panels_of(c.weight) * kPanel, steps = (columns + kWidth - 1) / kWidth;
  team.share(steps, [&](int64_t step) {
    for (int column = int(step) * kWidth; column < std::min(int(step + 1) * kWidth, columns);) {
      // A block may be two panels wide; the last panel can be single.
      if (Vecs > kPanelVecs && columns - column <= kPanel) {
        column_block<Type, MostRows, kPanelVecs>(c, rows, column);
        column += kPanel;
      } else {
        column_block<Type, MostRows, Vecs>(c, rows, column);
        column += Vecs * kLanes;
      }
    }
  });
}

// Each thread widens all rows, which takes about as long as computing one column.
const uint32_t* widened(const Call& c, const Rows& rows) {
  static thread_local Scratch memory;
  const int depth = c.weight.depth;
  const int64_t size = (rows.end - rows.first) * depth;
  const uint16_t* from = (const uint16_t*)c.x.x + rows.first * depth;
  float* to = (float*)memory.of(size * sizeof(float));
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) store(to + i, from_bf16(from + i));
  for (; i < size; ++i) to[i] = float_of(uint32_t(from[i]) << 16);
  return (const uint32_t*)to;
}

template <class Type>
void run(Team& team, const Call& c) {
  const int64_t stride = c.weight.depth / kPerLane<typename Type::Left>;
  for (int64_t first = 0; first < c.rows; first += kRowChunk) {
    Rows rows = {first, std::min(first + kRowChunk, c.rows), (const uint32_t*)c.x.x + first * stride, stride};
    if constexpr (std::is_same_v<Type, Widened>) rows.left = widened(c, rows);
    if (c.rows <= 2 * kFewRows<Type>) all_columns<Type, kFewRows<Type>, kFewVecs>(team, c, rows);
    else all_columns<Type, kMostRows<Type>, kManyVecs>(team, c, rows);
  }
}

// bfloat16 with AMX. All blocks have the same number of rows, at most 32: the last one computes some rows again that
// the one before has stored.
void run_tiled(Team& team, const Call& c) {
  const int depth = c.weight.depth;
  const int64_t blocks = (c.rows + 31) / 32, size = (c.rows + blocks - 1) / blocks, pass = kRowChunk / size;
  const Tiles tiles(bfloat16_tiles(int(std::min<int64_t>(size, 16)), int(std::max<int64_t>(size - 16, 0))));
  const auto product = size > 16 ? tile_product<true, Sum::kFresh> : tile_product<false, Sum::kFresh>;
  for (int64_t first = 0; first < blocks; first += pass)
    team.share(panels_of(c.weight), [&](int64_t panel) {
      alignas(64) float sums[32][kPanel];
      const char* weights = (const char*)c.weight.packed + panel * depth * kPanel * 2;
      for (int64_t i = first; i < std::min(first + pass, blocks); ++i) {
        const int64_t row = std::min(i * size, c.rows - size);
        product((const uint16_t*)c.x.x + row * depth, depth * 2, weights, kPanel * 4, sums, kPanel * 4, depth);
        for (int64_t r = i * size - row; r < size; ++r)
          for (int n = 0; n < kPanel; n += kLanes)
            store_columns(c.weight, c.out, row + r, int(panel) * kPanel + n, c.out_dtype, load(sums[r] + n));
      }
    });
}

void run_bfloat16(Team& team, const Call& c) {
  if (c.rows == 0) return;
  // Layers of models have a depth of whole tiles; others are widened, for any number of rows.
  if constexpr (kHasTiles)
    if (c.weight.depth % kTileDepth == 0) return run_tiled(team, c);
  run<std::conditional_t<std::is_same_v<FastBFloat16, BFloat16>, BFloat16, Widened>>(team, c);
}

}  // namespace

void linear_in_team(Team& team, const TandemLinear* weight, const Activations& x, int64_t rows, void* out,
                    DType out_dtype) {
  for (int n = 0; n < weight->pieces; ++n) {
    const Call call = {weight[n], x, rows, out, out_dtype};
    switch ((Packing)weight[n].packing) {
      case Packing::kFloat32: run<Float32>(team, call); break;
      case Packing::kBFloat16: run_bfloat16(team, call); break;
      default: quantized_piece(team, weight[n], x, rows, out, out_dtype);
    }
  }
  team.wait();
}

// x [rows, depth] dense, weights packed as linear.h says -> out [rows, stride]. x is of the weights' dtype where these are
// not quantized; depth is even (quantized: a multiple of 32).
extern "C" void tandem_packed_linear(const void* x, const TandemLinear* weight, void* out, int64_t rows, int32_t dtype,
                              int32_t out_dtype, int32_t num_threads) {
  Activations activations = {x, (DType)dtype, rows, nullptr};
  static thread_local Scratch quantized;
  if (is_quantized(weight)) activations.quantized = quantized.of(quantized_bytes(rows, weight->depth));
  with_team(num_threads, [&](Team& team) {
    if (is_quantized(weight)) {
      team.share(rows, [&](int64_t r) { quantize_row(activations, r, weight->depth); });
      team.wait();
    }
    linear_in_team(team, weight, activations, rows, out, (DType)out_dtype);
  });
}
