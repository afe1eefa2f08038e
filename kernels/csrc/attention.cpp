// turbo_attention on the CPU: flash attention over paged K and V, for trees, decode steps and prefill chunks.
//
//   task    a sequence, a K/V head, some of its new tokens (all query heads of the group are rows of one
//           matrix: row = token * group + head), and a range of splits
//   split   kSplit consecutive keys, computed on their own: running maximum, sum and weighted V per row
//   tile    64 keys of a split; K and V are copied into the order the products want, once for all rows
//
// A row's result is the merge of its splits in their order, whether one task ran all of them (prefill) or every
// split was a task of its own (decode, so that one long sequence occupies all threads). Splits and tiles lie at
// fixed key positions, and a key that a row does not see changes none of its sums. So a row's bits do not depend
// on the batch, the number of threads, or where a prompt was cut into chunks.
//
// Nor on drafts: a node's ancestors lie scattered among the tree's slots, but where the tree begins each node gets
// tiles of its own, in which they lie where plain decoding would have put them. A tile costs little to copy.
//
// Products are made in float32, or in bfloat16 with float32 sums where the CPU has instructions for that.

#include "attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "cache.h"
#include "product.h"

namespace {

constexpr int kTile = 64;
// Neighbouring keys that are fetched ahead together; blocks are multiples of it.
constexpr int kStrip = 16;
constexpr int kSplit = 512;
constexpr float kMinusInfinity = -INFINITY;

#if defined(__AVX512F__)
constexpr int kRows = 6, kVecs = 4;  // 24 accumulators, 4 vectors of b and one of a in 32 registers
#else
constexpr int kRows = 6, kVecs = 2;  // 12, 2 and 1 in 16
#endif

// What a product reads of a tile: K or V, rows `stride` lanes apart; the next tile's lies `ahead` of it, 0: not to be
// fetched.
struct Operand {
  const uint32_t* data;
  int64_t stride;
  int64_t ahead;
};

template <class Type, int Rows, Sum Mode, bool Fetch>
inline void product_rows(const uint32_t* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride, int depth,
                         int columns) {
  int n = 0;
  for (; n + kVecs * kLanes <= columns; n += kVecs * kLanes)
    product_block<Type, Rows, kVecs, Mode, kVecs, Fetch>(a, a_stride, b.data + n, b.stride, c + n, c_stride, depth, 0,
                                                         b.ahead);
  for (; n < columns; n += kLanes)
    product_block<Type, Rows, 1, Mode, 1, Fetch>(a, a_stride, b.data + n, b.stride, c + n, c_stride, depth, 0, b.ahead);
}

template <class Type, Sum Mode, bool Fetch>
inline void product(int rows, const uint32_t* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride,
                    int depth, int columns) {
  switch (rows) {
    case 1: return product_rows<Type, 1, Mode, Fetch>(a, a_stride, b, c, c_stride, depth, columns);
    case 2: return product_rows<Type, 2, Mode, Fetch>(a, a_stride, b, c, c_stride, depth, columns);
    case 3: return product_rows<Type, 3, Mode, Fetch>(a, a_stride, b, c, c_stride, depth, columns);
    case 4: return product_rows<Type, 4, Mode, Fetch>(a, a_stride, b, c, c_stride, depth, columns);
    case 5: return product_rows<Type, 5, Mode, Fetch>(a, a_stride, b, c, c_stride, depth, columns);
    default: return product_rows<Type, 6, Mode, Fetch>(a, a_stride, b, c, c_stride, depth, columns);
  }
}

// Of `parts` products with the same b, each fetches another part of what lies ahead before it starts. A single one
// fetches while it runs: all at once would hold up its own loads.
template <class Type, Sum Mode>
inline void product(int rows, const uint32_t* a, int64_t a_stride, const Operand& b, float* c, int64_t c_stride,
                    int depth, int columns, int part, int parts) {
  if (parts == 1 && b.ahead) return product<Type, Mode, true>(rows, a, a_stride, b, c, c_stride, depth, columns);
  if (b.ahead)
    for (int i = depth * part / parts; i < depth * (part + 1) / parts; ++i)
      for (int n = 0; n < columns; n += 16) fetch(b.data + b.ahead + i * b.stride + n);
  product<Type, Mode, false>(rows, a, a_stride, b, c, c_stride, depth, columns);
}

// Transposes kLanes rows of kLanes 32-bit elements: row i at rows[i] + from -> column i at out.
inline void transpose(const uint32_t* const* rows, int64_t from, uint32_t* out, int64_t out_stride) {
#if defined(__AVX512F__)
  __m512i r[16], t[16];
  for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(rows[i] + from);
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    _mm512_storeu_si512(out + i * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
    _mm512_storeu_si512(out + (i + 8) * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    _mm512_storeu_si512(out + (i + 4) * out_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88));
    _mm512_storeu_si512(out + (i + 12) * out_stride, _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd));
  }
#else
  __m256 r[8], t[8];
  for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps((const float*)(rows[i] + from));
  for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    r[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
    r[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
    r[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
    r[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
  }
  for (int i = 0; i < 4; ++i) {
    _mm256_storeu_ps((float*)(out + i * out_stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x20));
    _mm256_storeu_ps((float*)(out + (i + 4) * out_stride), _mm256_permute2f128_ps(r[i], r[i + 4], 0x31));
  }
#endif
}

constexpr int kMaxTreeNodes = 64;

struct Task {
  int seq, kv_head, first_token, num_tokens, first_split, num_splits;
  int64_t partial;  // where its state goes, in floats; -1: it writes the output itself
};

// A row's softmax so far: weights are 2^(score - base), with scores in units of log2.
struct State {
  float* base;  // [rows]; minus infinity before the first visible key
  float* sum;   // [rows, kLanes], the weights by lane
  float* acc;   // [rows, head_size], weighted V
  static int64_t floats(int64_t rows, int64_t head_size) { return rows * (1 + kLanes + head_size); }
};

// The base follows the maximum when that has outgrown it by so much: weights stay far from overflow, and most
// tiles need no rescaling of what came before (after FlashAttention-4's conditional rescaling).
constexpr float kSlack = 8;

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
      alone += int64_t(c.num_kv_heads) * ((n + tokens_per_task() - 1) / tokens_per_task());
    }
    // Tasks that write their output themselves cost least; too few of them would leave threads idle.
    const bool split = alone < 4 * c.num_threads && c.num_threads > 1;
    static thread_local std::vector<float> kept;
    partials = &kept;
    int64_t floats = 0;
    for (int b = 0; b < c.num_seqs; ++b) {
      const int n = num_new(b);
      for (int first = 0; first < n; first += tokens_per_task()) {
        int count = std::min(tokens_per_task(), n - first);
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
            floats += State::floats(int64_t(count) * group, c.head_size);
          }
        }
      }
    }
    if (int64_t(kept.size()) < floats) kept.resize(floats);
  }

  void run_in_team(Team& team, const void* cache) {
#if defined(__AVX512BF16__)
    if ((DType)c.query_dtype == DType::kBFloat16 && c.head_size % 32 == 0) return run_in_team<BFloat16>(team, cache);
#endif
    run_in_team<Float32>(team, cache);
  }

 private:
  template <class Type>
  void run_in_team(Team& team, const void* cache) {
    Workspace work = workspace<Type>();
    work.cache = cache;
    team.race(int64_t(tasks.size()), [&](int64_t i) { compute<Type>(tasks[i], work); });
    team.wait();
    if (merges.empty()) return;
    team.share(int64_t(merges.size()), [&](int64_t i) { merge(merges[i]); });
    team.wait();
  }

  // 64 keys as the products read them: K [D / per lane][64 keys] and V [64 / per lane][D], of 32-bit lanes.
  struct Tile {
    Operand keys, values;
  };
  // Per thread, reused from task to task.
  struct Workspace {
    void *query, *keys, *values, *raw, *weights;
    float* scores;
    float* token_scales[2];  // of K and V, per key of the tile
    float* state[2];  // total and split
    const void* cache;
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

  // Enough rows to pay for copying the keys, few enough that the state stays in the second-level cache.
  int tokens_per_task() const { return std::max(1, std::max(16, 16384 / c.head_size) / group); }

  int first_split(int b, int first_token) const {
    if (c.window == 0) return 0;
    // No node of a tree comes before its root.
    const int earliest = context(b) + (is_tree(b) ? 0 : first_token);
    return std::max(0, earliest - c.window + 1) / kSplit;
  }

  template <class Type>
  Workspace workspace() const {
    using Element = typename Type::Element;
    const int64_t rows = int64_t(tokens_per_task()) * group, D = c.head_size;
    const int64_t tile = int64_t(kTile) * D * sizeof(Element);
    const int64_t state = State::floats(rows, D) * 4;
    int64_t offset = 0;
    auto take = [&offset](int64_t bytes) {
      int64_t at = offset;
      offset += (bytes + 63) / 64 * 64;
      return at;
    };
    const int64_t query = take(rows * D * sizeof(Element)), keys = take(tile), values = take(tile),
                  raw = take(2 * tile), weights = take(kRows * kTile * sizeof(Element)),
                  scores = take(kRows * kTile * 4), scales = take(2 * kTile * 4), total = take(state),
                  split = take(state);
    static thread_local std::vector<char> memory;
    if (int64_t(memory.size()) < offset + 64) memory.resize(offset + 64);
    char* base = (char*)(((uintptr_t)memory.data() + 63) / 64 * 64);
    return {base + query, base + keys, base + values, base + raw, base + weights,
            (float*)(base + scores), {(float*)(base + scales), (float*)(base + scales) + kTile},
            {(float*)(base + total), (float*)(base + split)}, nullptr};
  }

  static State state_at(float* memory, int64_t rows) {
    return {memory, memory + rows, memory + rows * (1 + kLanes)};
  }

  // The rows' queries, in the dtype of the products.
  template <class Type>
  void load_query(const Task& task, void* out) const {
    const int D = c.head_size;
    const DType dtype = (DType)c.query_dtype;
    for (int i = 0; i < task.num_tokens; ++i) {
      int64_t token = c.query_start_loc[task.seq] + task.first_token + i;
      int64_t from = token * c.query_stride + int64_t(task.kv_head) * group * D;
      int64_t to = int64_t(i) * group * D;
      if constexpr (Type::kPerLane == 2) {
        std::memcpy((uint16_t*)out + to, (const uint16_t*)c.query + from, int64_t(group) * D * 2);
      } else {
        for (int d = 0; d < group * D; d += kLanes)
          store((float*)out + to + d, load_as_float(c.query, from + d, dtype, nullptr));
      }
    }
  }

  // Where a key's K lies in the cache, in elements; V follows cache_strides[1] later.
  int64_t element_of(const int32_t* blocks, int kv_head, int key) const {
    return blocks[key / c.block_size] * c.cache_strides[0] + kv_head * c.cache_strides[2] +
           int64_t(key % c.block_size) * c.head_size;
  }

  // The 64 keys from first_key on; those from `end` on are zero. With a path, keys from the context's end on are its
  // nodes in their order.
  template <class Type>
  Tile load_tile(const Task& task, int first_key, int end, uint64_t path, const Workspace& work) const {
    if (c.interleaved) {
      if (first_key + kTile <= (path ? context(task.seq) : end)) return whole_tile<Type>(task, first_key, end, work);
      return partial_tile<Type>(task, first_key, end, path, work);
    }
    using Element = typename Type::Element;
    const int D = c.head_size, bytes = bytes_of((DType)c.cache_dtype);
    const DType dtype = (DType)c.cache_dtype;
    const bool direct = dtype == (Type::kPerLane == 2 ? DType::kBFloat16 : DType::kFloat32);
    static constexpr int kMaxHead = 256;
    alignas(64) static const Element zeros[kMaxHead] = {};
    const Element* rows[2][kTile];
    const int32_t* blocks = c.block_table + int64_t(task.seq) * c.max_blocks;
    const int tree = path ? context(task.seq) : end;
    for (int key = tree; key < first_key; ++key) path &= path - 1;  // nodes of the tiles before
    for (int t = 0; t < kTile;) {
      if (first_key + t >= end) {
        rows[0][t] = rows[1][t] = zeros;
        work.token_scales[0][t] = work.token_scales[1][t] = 0;
        ++t;
        continue;
      }
      int key = first_key + t, run = 1;
      if (key >= tree) {
        key = tree + __builtin_ctzll(path);
        path &= path - 1;
      } else {
        // Neighbours of one block at once: divisions are slow.
        run = std::min({kTile - t, c.block_size - key % c.block_size, std::min(tree, end) - key});
      }
      int64_t at = element_of(blocks, task.kv_head, key);
      for (int i = 0; i < run; ++i, ++t, at += D) {
        load_token_scales(task, blocks, key + i, t, work);
        for (int part = 0; part < 2; ++part) {
          const int64_t from = at + part * c.cache_strides[1];
          if (direct) {
            rows[part][t] = (const Element*)work.cache + from;
            continue;
          }
          Element* copy = (Element*)work.raw + (int64_t(part) * kTile + t) * D;
          for (int d = 0; d < D; d += kLanes) {
            Vec v = load_as_float(work.cache, from + d, dtype, c.table);
            if constexpr (Type::kPerLane == 2) to_bf16((uint16_t*)copy + d, v);
            else store((float*)copy + d, v);
          }
          rows[part][t] = copy;
        }
      }
    }
    // The next tile is on its way from memory while this one is worked on: a tile's rows are too short and too
    // scattered for the processor to guess them.
    const char* ahead[kTile / kStrip] = {};
    if (first_key + kTile < end)
      for (int t = 0; t < kTile && first_key + kTile + t < tree; t += kStrip)
        ahead[t / kStrip] = (const char*)work.cache + element_of(blocks, task.kv_head, first_key + kTile + t) * bytes;
    auto fetch_ahead = [&](int t, int part, int64_t from, int64_t to) {
      if (!ahead[t / kStrip]) return;
      const char* strip = ahead[t / kStrip] + part * c.cache_strides[1] * bytes;
      for (int64_t line = from; line < to; line += 64) fetch(strip + line);
    };
    const int depth = D / Type::kPerLane;
    const int64_t strip_bytes = int64_t(kStrip) * D * bytes;
    for (int t = 0; t < kTile; t += kLanes) {
      for (int d = 0; d < depth; d += kLanes)
        transpose((const uint32_t* const*)rows[0] + t, d, (uint32_t*)work.keys + int64_t(d) * kTile + t, kTile);
      if (t % kStrip == 0) fetch_ahead(t, 0, 0, strip_bytes);
    }
    for (int t = 0; t < kTile; t += Type::kPerLane) {
      uint32_t* out = (uint32_t*)work.values + int64_t(t / Type::kPerLane) * D;
      fetch_ahead(t, 1, t % kStrip * strip_bytes / kStrip, (t % kStrip + Type::kPerLane) * strip_bytes / kStrip);
#if defined(__AVX512BF16__)
      if constexpr (Type::kPerLane == 2) {
        const __m512i even = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7,
                                              38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        for (int d = 0; d < D; d += 16) {
          __m512i a = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(rows[1][t] + d)));
          __m512i b = _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)(rows[1][t + 1] + d)));
          _mm512_storeu_si512(out + d, _mm512_permutex2var_epi16(a, even, b));
        }
        continue;
      }
#endif
      std::memcpy(out, rows[1][t], D * 4);
    }
    return copied(work);
  }

  void load_token_scales(const Task& task, const int32_t* blocks, int key, int t, const Workspace& work) const {
    auto load = [&](const float* scales, const int64_t* strides, int part) {
      if (!scales) return;
      work.token_scales[part][t] = scales[blocks[key / c.block_size] * strides[0] + task.kv_head * strides[1] +
                                          key % c.block_size * strides[2]];
    };
    load(c.k_token_scale, c.k_token_scale_strides, 0);
    load(c.v_token_scale, c.v_token_scale_strides, 1);
  }

  // Of an interleaved cache: where it lies; the next one is fetched ahead.
  template <class Type>
  Tile whole_tile(const Task& task, int first_key, int end, const Workspace& work) const {
    const int32_t* blocks = c.block_table + int64_t(task.seq) * c.max_blocks;
    auto at = [&](int key, int part) {
      const int64_t lane = part == 0 ? key % c.block_size : int64_t(key % c.block_size) / Type::kPerLane * c.head_size;
      return (const uint32_t*)piece(work.cache, blocks[key / c.block_size], part, task.kv_head) + lane;
    };
    // A tile is too short, and the next too far, for the processor to guess what comes.
    const bool has_next = first_key + kTile < end;
    auto operand = [&](int part, int64_t stride) {
      const uint32_t* data = at(first_key, part);
      return Operand{data, stride, has_next ? at(first_key + kTile, part) - data : 0};
    };
    return {operand(0, c.block_size), operand(1, c.head_size)};
  }

  // Of an interleaved cache: a copy, so that what lies beyond `end` does not count, whatever it is.
  template <class Type>
  Tile partial_tile(const Task& task, int first_key, int end, uint64_t path, const Workspace& work) const {
    using Element = typename Type::Element;
    const int D = c.head_size, tree = path ? context(task.seq) : end;
    const int32_t* blocks = c.block_table + int64_t(task.seq) * c.max_blocks;
    const HeadShape shape = {c.block_size, D, (DType)c.cache_dtype, true}, tile = {kTile, D, (DType)c.cache_dtype, true};
    std::memset(work.keys, 0, tile.bytes());
    std::memset(work.values, 0, tile.bytes());
    for (int key = tree; key < first_key; ++key) path &= path - 1;  // nodes of the tiles before
    int t = 0;
    if (const int count = std::min(tree, end) - first_key; count > 0) {
      // A tile lies within one block.
      const int offset = first_key % c.block_size;
      const uint32_t* keys = (const uint32_t*)piece(work.cache, blocks[first_key / c.block_size], 0, task.kv_head);
      for (int lane = 0; lane < D / Type::kPerLane; ++lane)
        std::memcpy((uint32_t*)work.keys + lane * kTile, keys + int64_t(lane) * c.block_size + offset, count * 4);
      const char* values = piece(work.cache, blocks[first_key / c.block_size], 1, task.kv_head);
      const int whole = count / Type::kPerLane * Type::kPerLane;
      std::memcpy(work.values, values + int64_t(offset) * D * sizeof(Element), int64_t(whole) * D * sizeof(Element));
      for (t = whole; t < count; ++t) {
        shape.get_value(values, offset + t, work.raw);
        tile.put_value(work.values, t, work.raw);
      }
      t = count;
    }
    for (; t < kTile && first_key + t < end; ++t, path &= path - 1) {
      const int key = tree + __builtin_ctzll(path), offset = key % c.block_size;
      shape.get_key(piece(work.cache, blocks[key / c.block_size], 0, task.kv_head), offset, work.raw);
      tile.put_key(work.keys, t, work.raw);
      shape.get_value(piece(work.cache, blocks[key / c.block_size], 1, task.kv_head), offset, work.raw);
      tile.put_value(work.values, t, work.raw);
    }
    return copied(work);
  }

  Tile copied(const Workspace& work) const {
    return {{(const uint32_t*)work.keys, kTile, 0}, {(const uint32_t*)work.values, c.head_size, 0}};
  }

  const char* piece(const void* cache, int block, int part, int kv_head) const {
    return (const char*)cache +
           (block * c.cache_strides[0] + part * c.cache_strides[1] + kv_head * c.cache_strides[2]) *
               bytes_of((DType)c.cache_dtype);
  }

  // Which of a tile's keys a token at a position sees, as bits.
  uint64_t visible(int position, int first_key) const {
    return below(position + 1 - first_key) & ~below(c.window ? position - c.window + 1 - first_key : 0);
  }

  // The lowest `count` of 64 bits, for any count.
  static uint64_t below(int count) {
    return count <= 0 ? 0 : count >= 64 ? ~uint64_t(0) : (uint64_t(1) << count) - 1;
  }

  template <class Type>
  void compute(const Task& task, const Workspace& work) {
    const int D = c.head_size, rows = task.num_tokens * group;
    load_query<Type>(task, work.query);
    State total = state_at(task.partial < 0 ? work.state[0] : partials->data() + task.partial, rows);
    State split = state_at(work.state[1], rows);
    const bool tree = is_tree(task.seq);
    const int context = this->context(task.seq);
    const int keys = tree ? c.seq_lens[task.seq] : context + task.first_token + task.num_tokens;
    for (int s = 0; s < task.num_splits; ++s) {
      State& state = s == 0 ? total : split;
      std::fill_n(state.base, rows, kMinusInfinity);
      std::memset(state.sum, 0, int64_t(rows) * (kLanes + D) * 4);  // and acc, which follows
      const int begin = (task.first_split + s) * kSplit, end = std::min(begin + kSplit, keys);
      for (int first_key = begin; first_key < end; first_key += kTile) {
        if (!tree || first_key + kTile <= context) {
          attend_tile<Type>(task, first_key, 0, rows, state, load_tile<Type>(task, first_key, keys, 0, work), work);
          continue;
        }
        for (int i = 0; i < task.num_tokens; ++i) {
          const int node = task.first_token + i, length = position(task.seq, node) + 1;
          if (first_key >= length) continue;
          const Tile tile = load_tile<Type>(task, first_key, length, path(task.seq, node), work);
          attend_tile<Type>(task, first_key, i * group, (i + 1) * group, state, tile, work);
        }
      }
      if (s > 0) merge_states(total, split, rows);
    }
    if (task.partial < 0) write(task, total);
  }

  // Rows first_row .. last_row - 1 of the task with a tile.
  template <class Type>
  void attend_tile(const Task& task, int first_key, int first_row, int last_row, State& state, const Tile& tile,
                   const Workspace& work) const {
    using Element = typename Type::Element;
    const int D = c.head_size, depth = D / Type::kPerLane;
    const float scale = c.scale * (c.k_scale ? c.k_scale[task.kv_head] : 1.0f);
    const int parts = (last_row - first_row + kRows - 1) / kRows;
    for (int first = first_row, part = 0; first < last_row; first += kRows, ++part) {
      const int count = std::min(kRows, last_row - first);
      uint64_t seen[kRows], any = 0, all = ~uint64_t(0);
      for (int r = 0; r < count; ++r) {
        seen[r] = visible(position(task.seq, task.first_token + (first + r) / group), first_key);
        any |= seen[r];
        all &= seen[r];
      }
      if (any == 0) continue;
      const bool full = ~all == 0;
      product<Type, Sum::kFresh>(count, (const uint32_t*)work.query + int64_t(first) * depth, depth,
                                 tile.keys, work.scores, kTile, depth, kTile, part, parts);
      for (int r = 0; r < count; ++r) {
        float* scores = work.scores + r * kTile;
        if (c.k_token_scale)
          for (int t = 0; t < kTile; t += kLanes)
            store(scores + t, load(scores + t) * load(work.token_scales[0] + t));
        float unit = scale * kLog2E;  // from a score to log2 of its weight
        if (c.softcap != 0) {
          cap(scores, scale);
          unit = kLog2E;
        }
        if (!full) {
          for (int t = 0; t < kTile; ++t) scores[t] = seen[r] >> t & 1 ? scores[t] : kMinusInfinity;
        }
        soften<Type>(scores, unit, first + r, state, c.v_token_scale ? work.token_scales[1] : nullptr,
                     (Element*)work.weights + r * kTile);
      }
      product<Type, Sum::kContinued>(count, (const uint32_t*)work.weights, kTile / Type::kPerLane,
                                     tile.values, state.acc + int64_t(first) * D, D, kTile / Type::kPerLane, D, part, parts);
    }
  }

  // scores -> softcap * tanh(scores * scale / softcap)
  void cap(float* scores, float scale) const {
    for (int t = 0; t < kTile; t += kLanes) {
      // tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), which neither overflows nor cancels badly.
      Vec x = load(scores + t) * splat(scale / c.softcap);
      Vec size = maximum(x, -x);
      Vec e = exp2_of(size * splat(-2 * kLog2E));
      // Near 0 the difference 1 - e loses digits: use the series there.
      Vec square = x * x;
      Vec series = size * (splat(1.0f) - square * (splat(1 / 3.0f) - square * splat(2 / 15.0f)));
      Vec tanh = size < splat(0.03f) ? series : (splat(1.0f) - e) / (splat(1.0f) + e);
      store(scores + t, (x < Vec{} ? -tanh : tanh) * splat(c.softcap));
    }
  }

  // One row of scores joins its state; writes the weights 2^(score - maximum), times V's scales per key or null.
  template <class Type>
  void soften(const float* scores, float unit, int row, State& state, const float* value_scales,
              typename Type::Element* weights) const {
    constexpr int kCount = kTile / kLanes;
    Vec s[kCount];
    for (int v = 0; v < kCount; ++v) s[v] = load(scores + v * kLanes);
    Vec top = s[0] * splat(unit);
    for (int v = 1; v < kCount; ++v) top = maximum(s[v] * splat(unit), top);
    float base = state.base[row];
    if (any_above(top, base + kSlack)) {
      const float old = base;
      state.base[row] = base = largest(top);
      if (old != kMinusInfinity) {
        const float shrink = power(old - base);
        store(state.sum + row * kLanes, load(state.sum + row * kLanes) * splat(shrink));
        float* acc = state.acc + int64_t(row) * c.head_size;
        for (int d = 0; d < c.head_size; d += kLanes) store(acc + d, load(acc + d) * splat(shrink));
      }
    }
    // A row that has seen no key yet has only scores of minus infinity, whose weight is 0 from any base.
    const Vec from = splat(base == kMinusInfinity ? 0.0f : -base);
    Vec total{};
    for (int v = 0; v < kCount; ++v) {
      s[v] = exp2_of(fma(s[v], splat(unit), from));
      total += s[v];
      if (value_scales) s[v] *= load(value_scales + v * kLanes);
    }
#if defined(__AVX512BF16__)
    if constexpr (Type::kPerLane == 2) {
      for (int v = 0; v < kCount; v += 2) {
        __m512bh pair = _mm512_cvtne2ps_pbh((__m512)s[v + 1], (__m512)s[v]);
        std::memcpy(weights + v * kLanes, &pair, sizeof pair);
      }
    }
#endif
    if constexpr (Type::kPerLane == 1)
      for (int v = 0; v < kCount; ++v) store((float*)weights + v * kLanes, s[v]);
    store(state.sum + row * kLanes, load(state.sum + row * kLanes) + total);
  }

  static float power(float x) { return exp2_of(splat(x))[0]; }

  // total <- total and split together, as if one softmax had seen the keys of both.
  void merge_states(State& total, const State& split, int rows) const {
    const int D = c.head_size;
    for (int r = 0; r < rows; ++r) {
      if (split.base[r] == kMinusInfinity) continue;
      const float base = std::max(total.base[r], split.base[r]);
      const Vec a = splat(power(total.base[r] - base)), b = splat(power(split.base[r] - base));
      total.base[r] = base;
      auto add = [&](float* to, const float* from) { store(to, fma(load(to), a, load(from) * b)); };
      add(total.sum + r * kLanes, split.sum + r * kLanes);
      for (int64_t d = int64_t(r) * D; d < int64_t(r + 1) * D; d += kLanes) add(total.acc + d, split.acc + d);
    }
  }

  void merge(const Merge& merge) const {
    const Task& first = tasks[merge.first_task];
    const int rows = first.num_tokens * group;
    State total = state_at(partials->data() + first.partial, rows);
    for (int i = 1; i < merge.num_tasks; ++i)
      merge_states(total, state_at(partials->data() + tasks[merge.first_task + i].partial, rows), rows);
    write(first, total);
  }

  void write(const Task& task, const State& state) const {
    const int D = c.head_size;
    const float v_scale = c.v_scale ? c.v_scale[task.kv_head] : 1.0f;
    for (int r = 0; r < task.num_tokens * group; ++r) {
      const int head = task.kv_head * group + r % group;
      const int64_t token = c.query_start_loc[task.seq] + task.first_token + r / group;
      float factor = v_scale, total = sum(load(state.sum + r * kLanes));
      if (c.sinks) {
        const float sink = c.sinks[head] * kLog2E, base = std::max(sink, state.base[r]);
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

void AttentionStep::run_in_team(Team& team, const void* cache) { attention->run_in_team(team, cache); }

// Returns 0, having written nothing, when the metadata is inconsistent.
extern "C" int32_t tandem_attention(const TandemAttention* call) {
  AttentionStep step(*call);
  if (!step.plan()) return 0;
  with_team(call->num_threads, [&](Team& team) { step.run_in_team(team, call->cache); });
  return 1;
}
