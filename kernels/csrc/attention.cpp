// turbo_attention on the CPU: flash attention over paged K and V, for trees, decode steps and prefill chunks.
//
//   task    a sequence, a K/V head, some of its new tokens (all query heads of the group are rows of one
//           matrix: row = token * group + head), and a range of splits
//   split   kSplit consecutive keys, computed on their own: running maximum, sum and weighted V per row
//   tile    64 keys of a split, K and V in the order the products want (tiles.h), for all rows
//
// A row's result is the merge of its splits in their order, whether one task ran all of them (prefill) or every
// split was a task of its own (decode, so that one long sequence occupies all threads). Splits and tiles lie at
// fixed key positions, and a key that a row does not see changes none of its sums. So a row's bits do not depend
// on the batch, the number of threads, or where a prompt was cut into chunks.
//
// Nor on drafts: a node's ancestors lie scattered among the tree's slots, but where the tree begins each node gets
// tiles of its own, in which they lie where plain decoding would have put them. A tile costs little to copy.
//
// Products are made in float32, or in bfloat16 with float32 sums where the CPU is fast at that. Elsewhere an
// interleaved bfloat16 cache is widened in registers, with the bits of the products in float32.

#include "attention.h"

#include <algorithm>
#include <optional>
#include <vector>

#include "product.h"
#include "scratch.h"
#include "softmax.h"
#include "tile_product.h"
#include "tiles.h"

namespace {

constexpr int kSplit = 512;

// Rows of a block. With AMX two products of 32 rows, so that the stores of the first one's scores are complete before
// these are read.
template <class Type>
constexpr int kRows = std::is_same_v<Type, Tiled> ? 64 : kMostRows<Type>;

// Vectors of b in a product. One or two rows take more of them, because each accumulator waits for its last sum.
constexpr int vectors_of(int rows) { return kLanes != 8 ? 4 : rows == 1 ? 8 : rows == 2 ? 4 : 2; }

// c [rows, columns] (+)= a [rows, depth of Left] x b. Inlined, here and below: where strides are constants, addresses
// need no registers.
template <class Type, int Rows, Sum Mode, bool Fetch>
__attribute__((always_inline)) inline void product_rows(const void* a, const Operand& b, float* c, int depth,
                                                        int columns) {
  constexpr int kVecs = vectors_of(Rows);
  const int64_t a_stride = depth / kPerLane<typename Type::Left>;
  const int lanes = depth / kPerLane<typename Type::Right>;
  int n = 0;
  for (; n + kVecs * kLanes <= columns; n += kVecs * kLanes)
    product_block<Type, Rows, kVecs, Mode, kVecs, Fetch>((const uint32_t*)a, a_stride, b.data + n, b.stride, c + n,
                                                         columns, lanes, 0, b.ahead);
  for (; n < columns; n += kLanes)
    product_block<Type, Rows, 1, Mode, 1, Fetch>((const uint32_t*)a, a_stride, b.data + n, b.stride, c + n, columns,
                                                 lanes, 0, b.ahead);
}

template <class Type, Sum Mode, bool Fetch>
__attribute__((always_inline)) inline void product(int rows, const void* a, const Operand& b, float* c, int depth,
                                                   int columns) {
  switch (rows) {
    case 1: return product_rows<Type, 1, Mode, Fetch>(a, b, c, depth, columns);
    case 2: return product_rows<Type, 2, Mode, Fetch>(a, b, c, depth, columns);
    case 3: return product_rows<Type, 3, Mode, Fetch>(a, b, c, depth, columns);
    case 4: return product_rows<Type, 4, Mode, Fetch>(a, b, c, depth, columns);
    case 5: return product_rows<Type, 5, Mode, Fetch>(a, b, c, depth, columns);
    default: return product_rows<Type, 6, Mode, Fetch>(a, b, c, depth, columns);
  }
}

// Reads and writes rows up to a multiple of what the tiles were configured for.
template <Sum Mode>
inline void tiled_product(int rows, const uint16_t* a, const Operand& b, float* c, int depth, int columns) {
  for (int r = 0; r < rows; r += 32)
    for (int n = 0; n < columns; n += kTileColumns) {
      const auto some_rows = rows - r > 16 ? tile_product<true, Mode> : tile_product<false, Mode>;
      some_rows(a + int64_t(r) * depth, depth * 2, b.data + n, b.stride * 4, c + int64_t(r) * columns + n, columns * 4,
                depth);
    }
}

// `parts` products share b. Each prefetches one part of the next tile before it starts. A single product in vectors
// prefetches while it runs: prefetches all at once would delay its own loads.
template <class Type, Sum Mode>
__attribute__((always_inline)) inline void product(int rows, const void* a, const Operand& b, float* c, int depth,
                                                   int columns, int part, int parts) {
  constexpr bool kTiled = std::is_same_v<Type, Tiled>;
  if constexpr (!kTiled)
    if (parts == 1 && b.ahead) return product<Type, Mode, true>(rows, a, b, c, depth, columns);
  const int lanes = depth / kPerLane<typename Type::Right>;
  if (b.ahead)
    for (int i = lanes * part / parts; i < lanes * (part + 1) / parts; ++i)
      for (int n = 0; n < columns; n += 16) fetch(b.data + b.ahead + i * b.stride + n);
  if constexpr (kTiled) tiled_product<Mode>(rows, (const uint16_t*)a, b, c, depth, columns);
  else product<Type, Mode, false>(rows, a, b, c, depth, columns);
}

constexpr int kMaxTreeNodes = 64;

struct Task {
  int seq, kv_head, first_token, num_tokens, first_split, num_splits;
  int64_t partial;  // where its state goes, in floats; -1: it writes the output itself
};

}  // namespace

class Attention {
 public:
  explicit Attention(const TandemAttention& call) : c(call), group(call.num_heads / call.num_kv_heads) {}

  // Whether the metadata is consistent and reads nothing outside the cache.
  bool check() const {
    const int32_t* start = c.query_start_loc;
    if (start[0] != 0 || start[c.num_seqs] > c.num_tokens) return false;
    for (int b = 0; b < c.num_seqs; ++b) {
      const int n = start[b + 1] - start[b];
      if (n < 0 || n > c.seq_lens[b]) return false;
      if (n == 0) continue;
      if (int64_t(c.max_blocks) * c.block_size < c.seq_lens[b]) return false;
      const int32_t* blocks = c.block_table + int64_t(b) * c.max_blocks;
      for (int i = 0; i * c.block_size < c.seq_lens[b]; ++i)
        if (blocks[i] < 0 || blocks[i] >= c.num_blocks) return false;
      if (is_tree(b))
        for (int i = 0; i < n; ++i)
          if (!(c.ancestor_bits[start[b] + i] >> i & 1)) return false;
    }
    return true;
  }

  // Tasks for all of the step's layers. They are run from one thread's call at a time, so that memory is shared.
  void plan() {
    int64_t alone = 0;
    for (int b = 0; b < c.num_seqs; ++b) {
      const int n = num_new(b);
      alone += int64_t(c.num_kv_heads) * ((n + tokens_of_task(n) - 1) / tokens_of_task(n));
    }
    // Tasks that write their output themselves cost least; too few of them would leave threads idle.
    const bool split = alone < 4 * c.num_threads && c.num_threads > 1;
    static thread_local std::vector<float> kept;
    partials = &kept;
    int64_t floats = 0;
    for (int b = 0; b < c.num_seqs; ++b) {
      const int n = num_new(b);
      for (int first = 0; first < n; first += tokens_of_task(n)) {
        int count = std::min(tokens_of_task(n), n - first);
        int keys = is_tree(b) ? c.seq_lens[b] : context(b) + first + count;
        int begin = first_split(b, first), end = (keys + kSplit - 1) / kSplit;
        for (int h = 0; h < c.num_kv_heads; ++h) {
          if (!split || end - begin == 1) {
            tasks.push_back({b, h, first, count, begin, end - begin, -1});
            continue;
          }
          merges.push_back({int(tasks.size()), end - begin});
          for (int s = begin; s < end; ++s) {
            tasks.push_back({b, h, first, count, s, 1, floats});
            floats += State::floats(padded_rows(tasks.back()), c.v_dim);
          }
        }
      }
    }
    if (int64_t(kept.size()) < floats) kept.resize(floats);
  }

  void run_in_team(Team& team, const AttentionConstants& layer) {
    if (is_fast_bfloat16()) run_in_team<FastBFloat16>(team, layer);
    else run_in_team<Float32>(team, layer);
  }

 private:
  template <class Type>
  void run_in_team(Team& team, const AttentionConstants& layer) {
    const Workspace work = workspace<Type>();
    if constexpr (std::is_same_v<Type, Tiled>) {
      std::optional<Tiles> tiles;  // released before the thread waits
      int rows = 0;
      team.share(int64_t(tasks.size()), [&](int64_t i) {
        if (const int needed = tile_rows(tasks[i]); needed != rows) {
          tiles.emplace(bfloat16_tiles(needed, needed));
          rows = needed;
        }
        compute<Type>(tasks[i], layer, work);
      });
    } else {
      team.share(int64_t(tasks.size()), [&](int64_t i) { compute<Type>(tasks[i], layer, work); });
    }
    team.wait();
    if (merges.empty()) return;
    team.share(int64_t(merges.size()), [&](int64_t i) { merge(merges[i], layer); });
    team.wait();
  }

  // Widening pays where it saves the copy of a cache.
  bool is_fast_bfloat16() const {
    return (DType)c.query_dtype == DType::kBFloat16 && c.k_dim % 32 == 0 && c.v_dim % 32 == 0 &&
           (!std::is_same_v<FastBFloat16, Widened> || c.interleaved);
  }

  // Products take a task's rows in multiples of this.
  int tile_rows(const Task& task) const {
    if (!std::is_same_v<FastBFloat16, Tiled> || !is_fast_bfloat16()) return 1;
    return task.num_tokens * group <= 8 ? 8 : 16;
  }

  // Rows of a task in memory. What those beyond its own hold reaches no other row.
  int padded_rows(const Task& task) const { return round_up(task.num_tokens * group, tile_rows(task)); }

  static int round_up(int rows, int multiple) { return (rows + multiple - 1) / multiple * multiple; }

  // Per thread, reused from task to task.
  struct Workspace {
    void *query, *weights;
    int* positions;   // of the rows
    float* scores;
    float* state[2];  // total and split
    float* some_acc;  // of a block whose sums have no padding behind them
    TileMemory tile;
  };
  struct Merge {
    int first_task, num_tasks;
  };

  const TandemAttention c;
  const int group;
  std::vector<Task> tasks;
  std::vector<Merge> merges;
  std::vector<float>* partials = nullptr;

  int num_new(int b) const { return c.query_start_loc[b + 1] - c.query_start_loc[b]; }

  int context(int b) const { return c.seq_lens[b] - num_new(b); }

  bool is_tree(int b) const {
    const int n = num_new(b);
    return c.ancestor_bits && n > 0 && n <= kMaxTreeNodes && c.ancestor_bits[c.query_start_loc[b]] != 0;
  }

  // A tree's node and its ancestors, as bits of the tree's slots.
  uint64_t path(int b, int node) const {
    return (uint64_t)c.ancestor_bits[c.query_start_loc[b] + node] & below(num_new(b));
  }

  // Where plain decoding would have put a new token.
  int position(int b, int token) const {
    return context(b) + (is_tree(b) ? __builtin_popcountll(path(b, token)) - 1 : token);
  }

  // Enough rows to pay for reading the keys, few enough that the state stays in the second-level cache and that threads end
  // at about the same time.
  int most_tokens() const { return std::max(1, 128 / group); }

  // A sequence's n new tokens in tasks of nearly equal size: a few tokens left over would read all keys for themselves.
  int tokens_of_task(int n) const {
    const int tasks = std::max(1, (n + most_tokens() - 1) / most_tokens());
    return std::max(1, (n + tasks - 1) / tasks);
  }

  int first_split(int b, int first_token) const {
    if (c.window == 0) return 0;
    // No node of a tree comes before its root.
    const int earliest = context(b) + (is_tree(b) ? 0 : first_token);
    return std::max(0, earliest - c.window + 1) / kSplit;
  }

  template <class Type>
  Workspace workspace() const {
    using Left = typename Type::Left;
    using Right = typename Type::Right;
    const int64_t rows = padded_rows({.num_tokens = most_tokens()});
    const int64_t key_tile = int64_t(kTile) * c.k_dim * sizeof(Right), value_tile = int64_t(kTile) * c.v_dim * sizeof(Right);
    const int64_t state = State::floats(rows, c.v_dim) * 4;
    int64_t offset = 0;
    auto take = [&offset](int64_t bytes) {
      int64_t at = offset;
      offset += (bytes + 63) / 64 * 64;
      return at;
    };
    // A node of a tree begins at any row, and a block of tiles from there may end 15 rows beyond the task's.
    const int64_t query = take((rows + 15) * c.k_dim * sizeof(Left)), positions = take(rows * sizeof(int)),
                  keys = take(key_tile), values = take(value_tile), raw = take(key_tile + value_tile),
                  weights = take(kRows<Type> * kTile * sizeof(Left)),
                  scores = take(kRows<Type> * kTile * 4), scales = take(2 * kTile * 4), total = take(state),
                  split = take(state), some_acc = take(std::is_same_v<Type, Tiled> ? kRows<Type> * c.v_dim * 4 : 0);
    static thread_local Scratch memory;
    char* base = memory.of(offset);
    return {base + query,
            base + weights,
            (int*)(base + positions),
            (float*)(base + scores),
            {(float*)(base + total), (float*)(base + split)},
            (float*)(base + some_acc),
            {base + keys, base + values, base + raw, {(float*)(base + scales), (float*)(base + scales) + kTile}}};
  }

  State state_of(const Task& task, float* memory) const {
    const int64_t rows = padded_rows(task);
    return {memory, memory + rows, memory + rows * (1 + kLanes)};
  }

  // The rows' queries, in the dtype of the products.
  template <class Type>
  void load_query(const Task& task, void* out) const {
    const int D = c.k_dim;
    const DType dtype = (DType)c.query_dtype;
    for (int i = 0; i < task.num_tokens; ++i) {
      int64_t token = c.query_start_loc[task.seq] + task.first_token + i;
      int64_t from = token * c.query_stride + int64_t(task.kv_head) * group * D;
      int64_t to = int64_t(i) * group * D;
      if constexpr (std::is_same_v<typename Type::Left, float>) {
        for (int d = 0; d < group * D; d += kLanes)
          store((float*)out + to + d, load_as_float(c.query, from + d, dtype, nullptr));
      } else {
        std::memcpy((uint16_t*)out + to, (const uint16_t*)c.query + from, int64_t(group) * D * 2);
      }
    }
  }

  // The lowest `count` of 64 bits, for any count.
  static uint64_t below(int count) {
    return count <= 0 ? 0 : count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1;
  }

  template <class Type>
  void compute(const Task& task, const AttentionConstants& layer, const Workspace& work) {
    const int D = c.v_dim, rows = task.num_tokens * group;
    load_query<Type>(task, work.query);
    for (int r = 0; r < rows; ++r) work.positions[r] = position(task.seq, task.first_token + r / group);
    State total = state_of(task, task.partial < 0 ? work.state[0] : partials->data() + task.partial);
    State split = state_of(task, work.state[1]);
    const bool tree = is_tree(task.seq);
    const int context = this->context(task.seq);
    const TileReader<typename Type::Right> tiles(c, layer.cache, task.seq, task.kv_head, context, work.tile);
    const int keys = tree ? c.seq_lens[task.seq] : context + task.first_token + task.num_tokens;
    for (int s = 0; s < task.num_splits; ++s) {
      State& state = s == 0 ? total : split;
      std::fill_n(state.base, rows, kMinusInfinity);
      std::memset(state.sum, 0, int64_t(padded_rows(task)) * (kLanes + D) * 4);  // and acc, which follows
      const int begin = (task.first_split + s) * kSplit, end = std::min(begin + kSplit, keys);
      for (int first_key = begin; first_key < end; first_key += kTile) {
        if (!tree || first_key + kTile <= context) {
          attend_tile<Type>(task, layer, first_key, 0, rows, state, tiles.read(first_key, keys, 0), work);
          continue;
        }
        for (int i = 0; i < task.num_tokens; ++i) {
          const int length = work.positions[i * group] + 1;
          if (first_key >= length) continue;
          const Tile tile = tiles.read(first_key, length, path(task.seq, task.first_token + i));
          attend_tile<Type>(task, layer, first_key, i * group, (i + 1) * group, state, tile, work);
        }
      }
      if (s > 0) merge_states(total, split, rows, D);
    }
    if (task.partial < 0) write(task, layer, total);
  }

  // Rows first_row .. last_row - 1 of the task with a tile.
  template <class Type>
  void attend_tile(const Task& task, const AttentionConstants& layer, int first_key, int first_row, int last_row,
                   State& state, const Tile& tile, const Workspace& work) const {
    using Left = typename Type::Left;
    constexpr int kBlock = kRows<Type>;
    const int D = c.v_dim, rows = task.num_tokens * group;
    const float scale = layer.scale * (c.k_scale ? c.k_scale[task.kv_head] : 1.0f);
    const int parts = (last_row - first_row + kBlock - 1) / kBlock;
    for (int first = first_row, part = 0; first < last_row; first += kBlock, ++part) {
      const int count = std::min(kBlock, last_row - first);
      const int* positions = work.positions + first;
      int least = positions[0], most = positions[0];
      for (int r = 1; r < count; ++r) least = std::min(least, positions[r]), most = std::max(most, positions[r]);
      // A row sees the keys up to its position, and with a window only the last ones.
      if (most < first_key || (c.window && least - c.window >= first_key + kTile - 1)) continue;
      const bool full = least >= first_key + kTile - 1 && (!c.window || most - c.window < first_key);
      product<Type, Sum::kFresh>(count, (const Left*)work.query + int64_t(first) * c.k_dim, tile.keys, work.scores, c.k_dim,
                                 kTile, part, parts);
      for (int r = 0; r < count; ++r) {
        float* scores = work.scores + r * kTile;
        if (c.k_token_scale)
          for (int t = 0; t < kTile; t += kLanes)
            store(scores + t, load(scores + t) * load(work.tile.token_scales[0] + t));
        float unit = scale * kLog2E;  // from a score to log2 of its weight
        if (layer.softcap != 0) {
          cap(scores, scale, layer.softcap);
          unit = kLog2E;
        }
        if (!full) {
          const int end = positions[r] + 1 - first_key, begin = c.window ? end - c.window : 0;
          for (int t = 0; t < kTile; ++t) scores[t] = t >= begin && t < end ? scores[t] : kMinusInfinity;
        }
        soften<Type>(scores, unit, first + r, state, D, c.v_token_scale ? work.tile.token_scales[1] : nullptr,
                     (Left*)work.weights + r * kTile);
      }
      // The rows that tiles write beyond these may be the next node's.
      float* acc = state.acc + int64_t(first) * D;
      const int unit = tile_rows(task);
      const bool aside = count % unit != 0 && (first % unit != 0 || first + count != rows);
      float* sums = aside ? work.some_acc : acc;
      if (aside) std::memcpy(sums, acc, int64_t(count) * D * sizeof(float));
      product<Type, Sum::kContinued>(count, work.weights, tile.values, sums, kTile, D, part, parts);
      if (aside) std::memcpy(acc, sums, int64_t(count) * D * sizeof(float));
    }
  }

  void merge(const Merge& merge, const AttentionConstants& layer) const {
    const Task& first = tasks[merge.first_task];
    const int rows = first.num_tokens * group;
    State total = state_of(first, partials->data() + first.partial);
    for (int i = 1; i < merge.num_tasks; ++i) {
      const Task& task = tasks[merge.first_task + i];
      merge_states(total, state_of(task, partials->data() + task.partial), rows, c.v_dim);
    }
    write(first, layer, total);
  }

  void write(const Task& task, const AttentionConstants& layer, const State& state) const {
    const int D = c.v_dim;
    const float v_scale = c.v_scale ? c.v_scale[task.kv_head] : 1.0f;
    for (int r = 0; r < task.num_tokens * group; ++r) {
      const int head = task.kv_head * group + r % group;
      const int64_t token = c.query_start_loc[task.seq] + task.first_token + r / group;
      float factor = v_scale, total = sum(load(state.sum + r * kLanes));
      if (layer.sinks) {
        const float sink = layer.sinks[head] * kLog2E, base = std::max(sink, state.base[r]);
        const float shrink = power(state.base[r] - base);
        factor *= shrink;
        total = total * shrink + power(sink - base);
      }
      const Vec by = splat(total > 0 ? factor / total : 0.0f);
      for (int d = 0; d < D; d += kLanes)
        store_from_float(c.out, token * c.out_stride + int64_t(head) * D + d, (DType)c.query_dtype,
                         load(state.acc + int64_t(r) * D + d) * by);
    }
  }
};

AttentionStep::AttentionStep(const TandemAttention& call) : attention(new Attention(call)) {}
AttentionStep::AttentionStep(AttentionStep&&) = default;
AttentionStep::~AttentionStep() = default;

bool AttentionStep::plan() {
  if (!attention->check()) return false;
  attention->plan();
  return true;
}

void AttentionStep::run_in_team(Team& team, const AttentionConstants& layer) { attention->run_in_team(team, layer); }

// Returns 0, having written nothing, when the metadata is inconsistent.
extern "C" int32_t tandem_attention(const TandemAttention* call) {
  AttentionStep step(*call);
  if (!step.plan()) return 0;
  const AttentionConstants layer = {call->cache, call->sinks, call->scale, call->softcap};
  with_team(call->num_threads, [&](Team& team) { step.run_in_team(team, layer); });
  return 1;
}
