// A mixture of experts for some rows at once.
//
//   logits      router's product in float32, [rows, experts]
//   choice      each row's top_k experts and their weights: float32, ties to the lower index
//   sort        the pairs (row, rank of a chosen expert), by expert
//   gate, up    products of each used expert with its rows, shared by the team as (expert, panel)
//   act, down   the same
//   sum         of a row's experts in the order of their ranks, then the shared MLP: float32
//
// A row's sums see neither other rows nor the place of a row among those of an expert, so its bits do not depend on the
// batch. Only experts that were chosen are read.

#include "moe.h"

#include <algorithm>
#include <limits>

#include "scratch.h"

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

bool reads_dense(const TandemLinear* weight) {
  return std::any_of(weight, weight + weight->pieces, [](const TandemLinear& piece) {
    return piece.packing < int(Packing::kInt8);
  });
}

// Where everything lies between the steps of a call. Computed by each thread, equally.
struct Work {
  float* wide;       // [rows, hidden] of x in float32
  float* logits;     // [rows, experts]
  int32_t* chosen;   // [rows, top_k], largest score first
  float* weights;    // [rows, top_k]
  int32_t* place;    // [rows, top_k]: of the pair among all pairs, sorted by expert
  int32_t* pair;     // [rows * top_k]: its inverse
  int32_t* group_of; // [rows * top_k]: of the sorted pairs
  int32_t* first;    // [used + 1]: the groups' first sorted pairs
  int32_t* used;     // [1]: number of groups
  LinearGroup *up, *down;  // [used]
  char *rows_in, *gate_up, *product;  // [rows * top_k] of hidden, of gate and up, of inner numbers
  char *quantized_in, *quantized_product;
  float* partial;  // [rows * top_k, hidden]
  char *shared_gate_up, *shared_product, *shared_quantized;
  float* shared;  // [rows, hidden]
  int64_t bytes;

  Work(const TandemMoe& m, int64_t rows, DType dtype, void* memory) {
    char* const base = (char*)memory;
    int64_t end = 0;
    auto take = [&](auto*& pointer, int64_t count, int64_t element = sizeof *pointer) {
      pointer = (std::remove_reference_t<decltype(pointer)>)(base + end);
      end += (count * element + 63) / 64 * 64;
    };
    const int64_t hidden = m.router->depth, pairs = rows * m.top_k, element = bytes_of(dtype);
    const int64_t groups = std::min<int64_t>(pairs, m.experts);
    take(wide, dtype == DType::kFloat32 ? 0 : rows * hidden);
    take(logits, rows * m.experts);
    take(chosen, pairs);
    take(weights, pairs);
    take(place, pairs);
    take(pair, pairs);
    take(group_of, pairs);
    take(first, groups + 1);
    take(used, 1);
    take(up, groups);
    take(down, groups);
    const bool quantized_up = is_quantized(m.gate_up), quantized_down = is_quantized(m.down);
    take(rows_in, reads_dense(m.gate_up) ? pairs * hidden : 0, element);
    take(gate_up, pairs * m.gate_up->stride, element);
    take(product, pairs * m.down->depth, element);
    take(quantized_in, quantized_up ? region(pairs, groups, m.gate_up->depth) : 0);
    take(quantized_product, quantized_down ? region(pairs, groups, m.down->depth) : 0);
    take(partial, pairs * hidden);
    const int64_t shared_rows = m.shared_gate_up ? rows : 0;
    take(shared_gate_up, shared_rows ? rows * m.shared_gate_up->stride : 0, element);
    take(shared_product, shared_rows ? rows * m.shared_down->depth : 0, element);
    take(shared_quantized, shared_rows && is_quantized(m.shared_down) ? quantized_bytes(rows, m.shared_down->depth) : 0);
    take(shared, shared_rows * hidden);
    bytes = end;
  }

  // Each group's quantized rows begin with a tile of their own.
  static int64_t region(int64_t pairs, int64_t groups, int depth) {
    return quantized_bytes(pairs, depth) + groups * quantized_bytes(kTileRows, depth) + groups * 64;
  }
};

// The indices of the `count` largest numbers, largest first, the lower of equals first; count is at most size. A NaN
// beyond the first `count` numbers is not taken.
void top_of(const float* values, int size, int count, int32_t* out) {
  for (int n = 0; n < size; ++n) {
    int at = n;
    if (n >= count) {
      at = count - 1;
      if (!(values[n] > values[out[at]])) continue;
    }
    for (; at > 0 && values[n] > values[out[at - 1]]; --at) out[at] = out[at - 1];
    out[at] = n;
  }
}

// exp(x - most) of all numbers, in place; returns their sum. `count` is a multiple of kLanes.
float exponentials(float* values, int count) {
  Vec most = splat(kLowest), total{};
  for (int i = 0; i < count; i += kLanes) most = maximum(most, load(values + i));
  const Vec top = splat(largest(most));
  for (int i = 0; i < count; i += kLanes) {
    const Vec e = exp2_of((load(values + i) - top) * splat(kLog2E));
    store(values + i, e);
    total += e;
  }
  return sum(total);
}

inline int padded(int count) { return (count + kLanes - 1) / kLanes * kLanes; }

// The experts of one row and their weights.
void choose(const TandemMoe& m, const float* logits, int32_t* chosen, float* weights) {
  const int experts = m.experts, width = padded(experts);
  static thread_local Scratch memory;
  float* scores = (float*)memory.of((2 * width + m.groups + padded(m.top_k)) * sizeof(float) + m.top_groups * sizeof(int));
  float *ranks = scores + width, *group_ranks = ranks + width, *some = group_ranks + m.groups;
  int32_t* groups = (int32_t*)(some + padded(m.top_k));
  std::memcpy(scores, logits, experts * sizeof(float));
  std::fill(scores + experts, scores + width, kLowest);
  if (m.score == int(RouterScore::kSoftmax)) {
    const Vec total = splat(exponentials(scores, width));
    for (int i = 0; i < width; i += kLanes) store(scores + i, load(scores + i) / total);
  } else if (m.score == int(RouterScore::kSigmoid)) {
    for (int i = 0; i < width; i += kLanes) {
      const Vec exponent = load(scores + i) * splat(-kLog2E);
      store(scores + i, splat(1.0f) / (splat(1.0f) + exp2_of(exponent > splat(126.0f) ? splat(126.0f) : exponent)));
    }
  }
  for (int e = 0; e < experts; ++e) ranks[e] = scores[e] + (m.correction ? m.correction[e] : 0.0f);
  if (m.groups > 1) {
    const int size = experts / m.groups, best = std::min(size, 2);
    for (int g = 0; g < m.groups; ++g) {
      int32_t two[2];
      top_of(ranks + g * size, size, best, two);
      group_ranks[g] = ranks[g * size + two[0]] + (best == 2 ? ranks[g * size + two[1]] : 0.0f);
    }
    top_of(group_ranks, m.groups, m.top_groups, groups);
    for (int g = 0; g < m.groups; ++g)
      if (std::find(groups, groups + m.top_groups, g) == groups + m.top_groups)
        std::fill_n(ranks + g * size, size, kLowest);
  }
  top_of(ranks, experts, m.top_k, chosen);
  for (int k = 0; k < m.top_k; ++k) weights[k] = scores[chosen[k]];
  float divisor = 1.0f;
  if (m.score == int(RouterScore::kTopSoftmax)) {
    std::copy_n(weights, m.top_k, some);
    std::fill(some + m.top_k, some + padded(m.top_k), kLowest);
    divisor = exponentials(some, padded(m.top_k));
    std::copy_n(some, m.top_k, weights);
  } else if (m.renorm) {
    divisor = 0.0f;
    for (int k = 0; k < m.top_k; ++k) divisor += weights[k];
    divisor = std::max(divisor, 1e-20f);
  }
  for (int k = 0; k < m.top_k; ++k) weights[k] = weights[k] / divisor * m.scale;
}

// Counting sort of all pairs by expert, and the groups of products.
void sort(const TandemMoe& m, const Work& work, int64_t rows, DType dtype) {
  const int64_t pairs = rows * m.top_k, hidden = m.router->depth, element = bytes_of(dtype);
  static thread_local Scratch memory;
  int32_t* next = (int32_t*)memory.of((m.experts + 1) * sizeof(int32_t));
  std::fill_n(next, m.experts + 1, 0);
  for (int64_t p = 0; p < pairs; ++p) ++next[work.chosen[p] + 1];
  int used = 0, begin = 0;
  char *in = work.quantized_in, *product = work.quantized_product;
  for (int e = 0; e < m.experts; ++e) {
    const int count = next[e + 1];
    next[e] = begin;
    if (count == 0) continue;
    const TandemLinear *up = m.gate_up + e * m.gate_up->pieces, *down = m.down + e * m.down->pieces;
    const Activations x = {work.rows_in + begin * hidden * element, dtype, count, in, up->order};
    const Activations inner = {work.product + int64_t(begin) * down->depth * element, dtype, count, product, down->order};
    work.up[used] = {up, x, count, work.gate_up + int64_t(begin) * m.gate_up->stride * element};
    work.down[used] = {down, inner, count, work.partial + begin * hidden};
    in += (quantized_bytes(count, m.gate_up->depth) + 63) / 64 * 64;
    product += (quantized_bytes(count, m.down->depth) + 63) / 64 * 64;
    std::fill_n(work.group_of + begin, count, used);
    work.first[used++] = begin;
    begin += count;
  }
  work.first[used] = begin;
  *work.used = used;
  for (int64_t p = 0; p < pairs; ++p) {
    work.place[p] = next[work.chosen[p]]++;
    work.pair[work.place[p]] = int32_t(p);
  }
}

inline float sigmoid(float x) {
  const Vec exponent = splat(std::min(x * -kLog2E, 126.0f));
  return 1.0f / (1.0f + exp2_of(exponent)[0]);
}

}  // namespace

int64_t moe_bytes(const TandemMoe& moe, int64_t rows, DType dtype) { return Work(moe, rows, dtype, nullptr).bytes; }

void moe_in_team(Team& team, const TandemMoe& m, const Activations& x, int64_t rows, void* out, void* memory) {
  const DType dtype = x.dtype;
  const Work work(m, rows, dtype, memory);
  const int hidden = m.router->depth;
  const int64_t pairs = rows * m.top_k, element = bytes_of(dtype);
  Activations wide = {x.x, DType::kFloat32, rows, nullptr};
  // The last call's groups, which say how much was shared, may lie where this one writes.
  team.wait_for_passes();
  if (dtype != DType::kFloat32) {
    wide.x = work.wide;
    team.share(rows, [&](int64_t r) {
      for (int i = 0; i < hidden; i += kLanes)
        store(work.wide + r * hidden + i, load_as_float(x.x, r * hidden + i, dtype, nullptr));
    });
    team.wait();
  }
  linear_in_team(team, m.router, wide, rows, work.logits, DType::kFloat32);
  team.share(rows, [&](int64_t r) {
    choose(m, work.logits + r * m.experts, work.chosen + r * m.top_k, work.weights + r * m.top_k);
  });
  team.wait();
  team.share(1, [&](int64_t) { sort(m, work, rows, dtype); });
  team.wait();

  // A sorted pair's group, and its row in there.
  const auto row_in = [&](int64_t n) { return n - work.first[work.group_of[n]]; };
  const bool quantized_up = is_quantized(m.gate_up), quantized_down = is_quantized(m.down),
             dense_up = reads_dense(m.gate_up);
  team.share(pairs, [&](int64_t n) {
    const int64_t from = work.pair[n] / m.top_k;
    if (quantized_up) copy_quantized_row(x, from, work.up[work.group_of[n]].x, row_in(n), hidden);
    if (dense_up)
      std::memcpy(work.rows_in + n * hidden * element, (const char*)x.x + from * hidden * element, hidden * element);
  });
  team.wait();
  linear_groups_in_team(team, work.up, *work.used, dtype);
  team.share(pairs, [&](int64_t n) {
    const int group = work.group_of[n];
    activate_row(work.up[group].out, dtype, m.act, work.down[group].x, row_in(n), m.down->depth, quantized_down);
  });
  team.wait();
  linear_groups_in_team(team, work.down, *work.used, DType::kFloat32);
  team.pass();

  if (m.shared_gate_up) {
    linear_in_team(team, m.shared_gate_up, x, rows, work.shared_gate_up, dtype);
    const Activations inner = {work.shared_product, dtype, rows, work.shared_quantized, m.shared_down->order};
    team.share(rows, [&](int64_t r) {
      activate_row(work.shared_gate_up, dtype, m.act, inner, r, m.shared_down->depth, is_quantized(m.shared_down));
    });
    team.wait();
    linear_in_team(team, m.shared_down, inner, rows, work.shared, DType::kFloat32);
  }
  team.share(rows, [&](int64_t r) {
    float gate = 1.0f;
    if (m.shared_gate) {
      Vec dot{};
      for (int i = 0; i < hidden; i += kLanes)
        dot = fma(load((const float*)wide.x + r * hidden + i), load(m.shared_gate + i), dot);
      gate = sigmoid(sum(dot));
    }
    for (int i = 0; i < hidden; i += kLanes) {
      Vec total{};
      for (int64_t p = r * m.top_k; p < (r + 1) * m.top_k; ++p)
        total = fma(load(work.partial + int64_t(work.place[p]) * hidden + i), splat(work.weights[p]), total);
      if (m.shared_gate_up) total = fma(load(work.shared + r * hidden + i), splat(gate), total);
      store_from_float(out, r * hidden + i, dtype, total);
    }
  });
  team.wait();
}

// x [rows, hidden] dense -> out [rows, hidden] of the same dtype.
extern "C" void tandem_moe(const TandemMoe* moe, const void* x, void* out, int64_t rows, int32_t dtype,
                           int32_t num_threads) {
  Activations activations = {x, (DType)dtype, rows, nullptr};
  static thread_local Scratch quantized, memory;
  const int hidden = moe->router->depth;
  const bool quantize = moe_reads_quantized(*moe);
  if (quantize) activations.quantized = quantized.of(quantized_bytes(rows, hidden));
  void* work = memory.of(moe_bytes(*moe, rows, (DType)dtype));
  with_team(num_threads, [&](Team& team) {
    if (quantize) {
      team.share(rows, [&](int64_t r) { quantize_row(activations, r, hidden); });
      team.wait();
    }
    moe_in_team(team, *moe, activations, rows, out, work);
  });
}
