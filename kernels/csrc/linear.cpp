// Matrix products with weights in float32 or bfloat16.
//
// A decode step has few rows and waits for the weights' memory, so its cost hardly grows up to a dozen rows; a
// prompt chunk has hundreds and waits for the multipliers. One packing serves both, in vectors and in AMX's tiles. A
// result sums over depth in the same order, whatever the number of rows: bits do not depend on the batch.

#include "linear.h"

#include <algorithm>
#include <optional>
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

template <int Vecs>
constexpr int kStepColumns = std::max(Vecs * kLanes, kPanel);

template <int Vecs>
int64_t column_steps(const TandemLinear& piece) {
  return (panels_of(piece) * kPanel + kStepColumns<Vecs> - 1) / kStepColumns<Vecs>;
}

template <class Type, int MostRows, int Vecs>
void column_step(const Call& c, const Rows& rows, int64_t step) {
  const int columns = panels_of(c.weight) * kPanel, first = int(step) * kStepColumns<Vecs>;
  for (int column = first; column < std::min(first + kStepColumns<Vecs>, columns);) {
    // A block may be two panels wide; the last panel can be single.
    if (Vecs > kPanelVecs && columns - column <= kPanel) {
      column_block<Type, MostRows, kPanelVecs>(c, rows, column);
      column += kPanel;
    } else {
      column_block<Type, MostRows, Vecs>(c, rows, column);
      column += Vecs * kLanes;
    }
  }
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

// One piece of each group's weight.
struct Pieces {
  const LinearGroup* groups;
  int count, piece;
  DType out_dtype;

  Call of(int g) const { return {groups[g].weight[piece], groups[g].x, groups[g].rows, groups[g].out, out_dtype}; }
};

template <class Type>
void run(Team& team, const Pieces& pieces) {
  const auto has_few_rows = [](const Call& c) { return c.rows <= 2 * kFewRows<Type>; };
  const auto steps_of = [&](const Call& c) {
    return has_few_rows(c) ? column_steps<kFewVecs>(c.weight) : column_steps<kManyVecs>(c.weight);
  };
  std::optional<Call> call;
  int64_t steps = 0, end = 0;
  Rows rows = {};
  share_groups(
      team, pieces.count,
      [&](int g) {
        const Call c = pieces.of(g);
        return (c.rows + kRowChunk - 1) / kRowChunk * steps_of(c);
      },
      [&](int g) {
        call.emplace(pieces.of(g));
        steps = steps_of(*call);
        end = 0;
      },
      [&](int, int64_t i) {
        const Call& c = *call;
        if (i >= end) {
          const int64_t chunk = i / steps, first = chunk * kRowChunk,
                        stride = c.weight.depth / kPerLane<typename Type::Left>;
          end = (chunk + 1) * steps;
          rows = {first, std::min(first + kRowChunk, c.rows), (const uint32_t*)c.x.x + first * stride, stride};
          if constexpr (std::is_same_v<Type, Widened>) rows.left = widened(c, rows);
        }
        const int64_t step = i - (end - steps);
        if (has_few_rows(c)) column_step<Type, kFewRows<Type>, kFewVecs>(c, rows, step);
        else column_step<Type, kMostRows<Type>, kManyVecs>(c, rows, step);
      });
}

// bfloat16 with AMX. All blocks have the same number of rows, at most 32: the last one computes some rows again that
// the one before has stored.
void run_tiled(Team& team, const Pieces& pieces) {
  struct Shape {
    int64_t blocks, size, pass;
    explicit Shape(int64_t rows) {
      blocks = (rows + 31) / 32, size = blocks ? (rows + blocks - 1) / blocks : 1, pass = kRowChunk / size;
    }
  };
  std::optional<Tiles> tiles;
  share_groups(
      team, pieces.count,
      [&](int g) {
        const Call c = pieces.of(g);
        const Shape shape(c.rows);
        return (shape.blocks + shape.pass - 1) / shape.pass * panels_of(c.weight);
      },
      [&](int g) {
        const int64_t size = Shape(pieces.of(g).rows).size;
        tiles.emplace(bfloat16_tiles(int(std::min<int64_t>(size, 16)), int(std::max<int64_t>(size - 16, 0))));
      },
      [&](int g, int64_t n) {
        const Call c = pieces.of(g);
        const Shape shape(c.rows);
        const int depth = c.weight.depth;
        const int64_t size = shape.size, panel = n % panels_of(c.weight), first = n / panels_of(c.weight) * shape.pass;
        const auto product = size > 16 ? tile_product<true, Sum::kFresh> : tile_product<false, Sum::kFresh>;
        alignas(64) float sums[32][kPanel];
        const char* weights = (const char*)c.weight.packed + panel * depth * kPanel * 2;
        for (int64_t i = first; i < std::min(first + shape.pass, shape.blocks); ++i) {
          const int64_t row = std::min(i * size, c.rows - size);
          product((const uint16_t*)c.x.x + row * depth, depth * 2, weights, kPanel * 4, sums, kPanel * 4, depth);
          for (int64_t r = i * size - row; r < size; ++r)
            for (int k = 0; k < kPanel; k += kLanes)
              store_columns(c.weight, c.out, row + r, int(panel) * kPanel + k, c.out_dtype, load(sums[r] + k));
        }
      });
}

void run_bfloat16(Team& team, const Pieces& pieces) {
  // Layers of models have a depth of whole tiles; others are widened, for any number of rows.
  if constexpr (kHasTiles)
    if (pieces.of(0).weight.depth % kTileDepth == 0) return run_tiled(team, pieces);
  run<std::conditional_t<std::is_same_v<FastBFloat16, BFloat16>, BFloat16, Widened>>(team, pieces);
}

}  // namespace

void linear_groups_in_team(Team& team, const LinearGroup* groups, int count, DType out_dtype) {
  for (int n = 0; count && n < groups->weight->pieces; ++n) {
    const Pieces pieces = {groups, count, n, out_dtype};
    switch ((Packing)groups->weight[n].packing) {
      case Packing::kFloat32: run<Float32>(team, pieces); break;
      case Packing::kBFloat16: run_bfloat16(team, pieces); break;
      default: quantized_piece(team, groups, count, n, out_dtype);
    }
  }
  team.wait();
}

// x [rows, depth] dense, weights packed as linear.h says -> out [rows, stride]. x is of the weights' dtype where these are
// not quantized; depth is even (quantized: a multiple of 32).
extern "C" void tandem_packed_linear(const void* x, const TandemLinear* weight, void* out, int64_t rows, int32_t dtype,
                              int32_t out_dtype, int32_t num_threads) {
  Activations activations = {x, (DType)dtype, rows, nullptr, weight->order};
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
