// Matrix products with weights in float32 or bfloat16.
//
// A decode step has few rows and waits for the weights' memory, so its cost hardly grows up to a dozen rows; a
// prompt chunk has hundreds and waits for the multipliers. One packing serves both. A result sums over depth in the
// same order, whatever the number of rows: bits do not depend on the batch.

#include "linear.h"

#include <algorithm>
#include <utility>

#include "product.h"
#include "scratch.h"

namespace {

constexpr int kPanelVecs = kPanel / kLanes;

// 24 accumulators with 32 registers: a dozen rows of one panel, or half a dozen of two, which loads less per product.
constexpr int kFewRows = kLanes == 16 ? 12 : 6, kFewVecs = kLanes == 4 ? 4 : 2;
constexpr int kManyRows = 6, kManyVecs = kLanes == 8 ? 2 : 4;
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

// Rows of Vecs * kLanes columns from `column` on, through registers into out.
template <class Type, int Rows, int Vecs>
void block(const Call& c, int64_t row, int column) {
  const int lanes = c.weight.depth / Type::kPerLane;
  const int64_t panel = int64_t(column / kPanel) * lanes * kPanel;
  alignas(64) float sums[Rows][Vecs * kLanes];
  for (int from = 0; from < lanes; from += kDepthBlock) {
    const auto product = from == 0 ? product_block<Type, Rows, Vecs, Sum::kFresh, std::min(Vecs, kPanelVecs)>
                                   : product_block<Type, Rows, Vecs, Sum::kAdded, std::min(Vecs, kPanelVecs)>;
    product((const uint32_t*)c.x.x + row * lanes + from, lanes,
            (const uint32_t*)c.weight.packed + panel + column % kPanel + int64_t(from) * kPanel, kPanel, sums[0],
            Vecs * kLanes, std::min(kDepthBlock, lanes - from), int64_t(lanes) * kPanel, 0);
  }
  for (int r = 0; r < Rows; ++r)
    for (int n = 0; n < Vecs * kLanes; n += kLanes) {
      store_columns(c.weight, c.out, row + r, column + n, c.out_dtype, load(sums[r] + n));
    }
}

template <class Type, int Vecs, int... Rows>
void some_rows(std::integer_sequence<int, Rows...>, int rows, const Call& c, int64_t row, int column) {
  using Block = void (*)(const Call&, int64_t, int);
  static constexpr Block kBlocks[] = {block<Type, Rows + 1, Vecs>...};
  kBlocks[rows - 1](c, row, column);
}

// Rows first .. end of Vecs * kLanes columns, in blocks of nearly equal size.
template <class Type, int MostRows, int Vecs>
void column_block(const Call& c, int64_t first, int64_t end, int column) {
  const int64_t rows = end - first, blocks = (rows + MostRows - 1) / MostRows;
  for (int64_t i = 0; i < blocks; ++i) {
    const int64_t from = first + rows * i / blocks, to = first + rows * (i + 1) / blocks;
    some_rows<Type, Vecs>(std::make_integer_sequence<int, MostRows>{}, int(to - from), c, from, column);
  }
}

template <class Type, int MostRows, int Vecs>
void all_columns(Team& team, const Call& c) {
  constexpr int kWidth = std::max(Vecs * kLanes, kPanel);
  const int columns = panels_of(c.weight) * kPanel, steps = (columns + kWidth - 1) / kWidth;
  for (int64_t first = 0; first < c.rows; first += kRowChunk) {
    const int64_t end = std::min(first + kRowChunk, c.rows);
    team.share(steps, [&](int64_t step) {
      for (int column = int(step) * kWidth; column < std::min(int(step + 1) * kWidth, columns);) {
        // The last panel may stand alone, where two would be taken.
        if (Vecs > kPanelVecs && columns - column <= kPanel) {
          column_block<Type, MostRows, kPanelVecs>(c, first, end, column);
          column += kPanel;
        } else {
          column_block<Type, MostRows, Vecs>(c, first, end, column);
          column += Vecs * kLanes;
        }
      }
    });
  }
}

template <class Type>
void run(Team& team, const Call& c) {
  if (c.rows <= 2 * kFewRows) all_columns<Type, kFewRows, kFewVecs>(team, c);
  else all_columns<Type, kManyRows, kManyVecs>(team, c);
}

}  // namespace

void linear_in_team(Team& team, const TandemLinear* weight, const Activations& x, int64_t rows, void* out,
                    DType out_dtype) {
  for (int n = 0; n < weight->pieces; ++n) {
    const Call call = {weight[n], x, rows, out, out_dtype};
    switch ((Packing)weight[n].packing) {
      case Packing::kFloat32: run<Float32>(team, call); break;
      case Packing::kBFloat16: run<BFloat16>(team, call); break;
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
