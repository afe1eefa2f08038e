// How likely a candidate is the next token: counts become probabilities, and these are mixed, learnt from the text.
//
//   cell      for each kind of evidence ("followed 2 of the 3 latest matches of 4 tokens in the corpus"), how often
//             such a candidate was right
//   mixing    logistic: the logits of the cells that speak about a candidate, times weights, summed (after Mahoney's
//             PAQ). The weights are sums of a base and of rows that the candidate's own standing chooses, so that a
//             candidate of the longest match is weighed otherwise than one that only shorter matches know.
//   accept    how often candidates were right once their parent was accepted, by their mixed logit, depth, and how well
//             the sequence is doing
//   reach     how often they were accepted at all, by the product of those chances along the path, which hang together
//   sent      how often they were accepted when they were sent, by that probability: what is chosen because it looks
//             likeliest, and in steps that look worth it, is on the whole less likely than it looks
//
// Every candidate considered at a node that was reached teaches, sent or not, so that what fell silent is heard again.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <iterator>

// Exact matches in three places, by the match's length.
enum Place { kLocal, kGlobal, kAligned, kNumPlaces };
constexpr int kLevelLength[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 24};
constexpr int kNumLevels = 10;
constexpr int kNumExact = kNumPlaces * kNumLevels;
// Successors that the model itself thought likely after the last 1, 2 and 3 tokens, the last time it was there.
constexpr int kRecycledOrders = 3;
enum Input { kRecycled = kNumExact, kRarity = kRecycled + kRecycledOrders, kBias, kNumInputs };
constexpr int kNumCells = 128;

// Evidence of n matches of which c were followed by the candidate: exact for few, coarser for many.
constexpr int compute_count_cell(int n, int c) {
  if (n <= 4) return n * (n + 1) / 2 - 1 + c;
  const int many = n <= 6 ? 0 : n <= 12 ? 1 : n <= 24 ? 2 : n <= 64 ? 3 : 4;
  // Shares of 10, 25, 50, 75 and 95 %.
  const int part = c <= 1 ? c : 2 + (20 * c >= 2 * n) + (20 * c >= 5 * n) + (20 * c >= 10 * n) + (20 * c >= 15 * n) +
                                    (20 * c >= 19 * n);
  return 14 + many * 8 + part;
}

inline int count_cell(int n, int c) {
  static constexpr auto kFew = [] {
    std::array<std::array<uint8_t, 26>, 26> cells{};
    for (int many = 1; many < 26; ++many)
      for (int right = 0; right <= many; ++right) cells[many][right] = uint8_t(compute_count_cell(many, right));
    return cells;
  }();
  return n < 26 && c <= n ? kFew[n][c] : compute_count_cell(n, c);
}

// What one candidate is judged by.
struct Evidence {
  static constexpr int kMost = kNumPlaces * 3 + kRecycledOrders + 2;
  uint8_t count = 0;
  uint8_t input[kMost], cell[kMost];
  // Rows of the weights: the longest level at which the candidate occurs, and at which anything does.
  uint8_t row[4];

  void add(int of, int in) {
    input[count] = uint8_t(of);
    cell[count++] = uint8_t(in);
  }
};

class Learner {
 public:
  static constexpr int kRows[4] = {11 * 11, 11 * 11, 3 * 25, 100};  // by global, local, aligned level, and rarity
  static constexpr int kNumRegimes = 4, kNumDepths = 7, kNumBins = 33;
  static constexpr float kIndependence[kNumRegimes] = {1, .8f, .5f, .3f};

  Learner() {
    for (int i = 0; i < kNumInputs; ++i)
      for (int k = 0; k < kNumCells; ++k) set(i, k, i < kRecycled ? .5f : i < kRarity ? .15f : .1f);
    for (int i = 0; i < kNumExact; ++i) {
      const int level = i % kNumLevels;
      const float doubt = level >= 4 ? .5f : level >= 2 ? 1.f : 2.f;
      for (int n = 1; n <= 128; n += n < 4 ? 1 : 3)
        for (int c = 0; c <= n; ++c) set(i, count_cell(n, c), std::clamp((c + .01f) / (n + doubt), .003f, .98f));
      base[i] = .3f;
    }
    for (int i = kRecycled; i < kBias; ++i) base[i] = .15f;
    for (int b = 0; b < kNumBins; ++b) sent[b] = {squash((b - kNumBins / 2) * .5f), 0};
    for (auto* table : {&accept, &reach})
      for (auto& regime : *table)
        for (auto& depth : regime) std::copy(std::begin(sent), std::end(sent), depth);
    // The better a sequence is doing, the more acceptances along a path hang together: a chain of them is likelier than
    // the product of its links.
    for (int regime = 0; regime < kNumRegimes; ++regime)
      for (auto& depth : reach[regime])
        for (Rate& bin : depth) bin.rate = std::clamp(std::pow(bin.rate, kIndependence[regime]), .0005f, .9995f);
  }

  // The mixed logit.
  float mix(const Evidence& e) const {
    const float* rows[4];
    choose(e, rows);
    float sum = .5f * (base[kBias] + rows[0][kBias] + rows[1][kBias] + rows[2][kBias] + rows[3][kBias]);
    for (int k = 0; k < e.count; ++k) {
      const int i = e.input[k];
      sum += logit[i][e.cell[k]] * (base[i] + rows[0][i] + rows[1][i] + rows[2][i] + rows[3][i]);
    }
    return std::clamp(sum, -7.5f, 7.5f);
  }

  void teach(const Evidence& e, float mixed, bool right, float rate) {
    const float step = rate * ((right ? 1.f : 0.f) - squash(mixed));
    float* rows[4];
    choose(e, const_cast<const float**>(rows));
    auto move = [&](int i, float by) {
      base[i] += by;
      for (float* row : rows) row[i] += by;
    };
    move(kBias, step * .5f);
    for (int k = 0; k < e.count; ++k) {
      const int i = e.input[k];
      move(i, step * logit[i][e.cell[k]]);
      Rate& seen = cells[i][e.cell[k]];
      seen.count = std::min(seen.count + 1, 255.f);
      set(i, e.cell[k], std::clamp(seen.rate + ((right ? 1.f : 0.f) - seen.rate) / (seen.count + 3), .001f, .995f));
    }
  }

  // One node was reached, and its candidates are about to teach: the rate at which they do.
  float next_rate() { return std::max(.001f, .003f / (1 + num_taught++ / 2000.f)); }

  // How well a sequence is doing.
  static int regime_of(float tokens_per_step) {
    return tokens_per_step < 1.8f ? 0 : tokens_per_step < 3.5f ? 1 : tokens_per_step < 8 ? 2 : 3;
  }

  // How often candidates of this logit were accepted once their parent was.
  float acceptance(float logit, int depth, int regime) const {
    return look_up(accept[regime][depth_of(depth)], logit);
  }
  void teach_acceptance(float logit, int depth, int regime, bool accepted) {
    update(accept[regime][depth_of(depth)], logit, accepted);
  }

  // How often guesses were accepted to whose paths such a product of chances belonged.
  float reached(float product, int depth, int regime) const {
    return look_up(reach[regime][depth_of(depth)], logit_of(product));
  }
  void teach_reached(float product, int depth, int regime, bool accepted) {
    update(reach[regime][depth_of(depth)], logit_of(product), accepted);
  }

  // How often guesses that were sent were accepted, of those that such a reach was predicted of.
  float accepted_of_sent(float reach) const { return look_up(sent, logit_of(reach)); }
  void teach_sent(float reach, bool accepted) { update(sent, logit_of(reach), accepted, kSentDoubt, kSentMemory); }

  int64_t num_nodes_taught() const { return num_taught; }

  // The tables are this object's first bytes; what was counted is behind them.
  int64_t table_bytes() const { return reinterpret_cast<const char*>(tally) - reinterpret_cast<const char*>(this); }

  // Whether these could be tables that were learnt: what came over a wire may be anything.
  bool is_sane() const {
    const auto all = [](const auto& table, auto&& good) {
      return std::all_of(std::begin(table), std::end(table), good);
    };
    const auto small = [](float x) { return std::fabs(x) < 1e3f; };  // false for what is no number
    const auto rate = [](const Rate& r) { return r.rate > 0 && r.rate < 1 && r.count >= 0 && r.count <= 1e6f; };
    return num_taught >= 0 && all(base, small) && all(logit, [&](auto& row) { return all(row, small); }) &&
           all(weights, [&](auto& row) { return all(row, small); }) &&
           all(cells, [&](auto& row) { return all(row, rate); }) &&
           all(accept, [&](auto& regime) { return all(regime, [&](auto& row) { return all(row, rate); }); }) &&
           all(reach, [&](auto& regime) { return all(regime, [&](auto& row) { return all(row, rate); }); }) &&
           all(sent, rate);
  }

  // What was predicted of guesses that were sent, and what came of them, by tenths of the prediction.
  struct Tally {
    double guesses, predicted, accepted;
  };
  static constexpr int kTenths = 10;

  void count(float predicted, bool accepted) {
    Tally& of = tally[std::clamp(int(predicted * kTenths), 0, kTenths - 1)];
    ++of.guesses;
    of.predicted += predicted;
    of.accepted += accepted;
  }

  static float squash(float x) { return 1 / (1 + std::exp(-x)); }
  static float stretch(float p) { return std::log(p / (1 - p)); }

 private:
  struct Rate {
    float rate, count;
  };
  // What a rate counts for before anything was seen, and how many of the latest it is of.
  static constexpr float kDoubt = 4, kMemory = 100, kSentDoubt = 40, kSentMemory = 300;
  // Bins of half a logit, between whose middles rates are interpolated.
  struct Bin {
    int low;
    float share;
    explicit Bin(float logit) {
      const float at = std::clamp(logit, -7.99f, 7.99f) * 2 + kNumBins / 2;
      low = int(at);
      share = at - low;
    }
  };

  float logit[kNumInputs][kNumCells];
  float base[kNumInputs] = {};
  float weights[kRows[0] + kRows[1] + kRows[2] + kRows[3]][kNumInputs] = {};
  Rate cells[kNumInputs][kNumCells] = {};
  Rate accept[kNumRegimes][kNumDepths][kNumBins];
  Rate reach[kNumRegimes][kNumDepths][kNumBins];
  Rate sent[kNumBins];
  int64_t num_taught = 0;

  void set(int input, int cell, float rate) {
    cells[input][cell].rate = rate;
    logit[input][cell] = stretch(rate);
  }

  static float look_up(const Rate* row, float at) {
    const Bin bin(at);
    return row[bin.low].rate * (1 - bin.share) + row[bin.low + 1].rate * bin.share;
  }

  static void update(Rate* row, float at, bool accepted, float doubt = kDoubt, float memory = kMemory) {
    const Bin bin(at);
    for (int high = 0; high < 2; ++high) {
      const float share = high ? bin.share : 1 - bin.share;
      Rate& seen = row[bin.low + high];
      seen.count = std::min(seen.count + share, memory);
      seen.rate += share * ((accepted ? 1.f : 0.f) - seen.rate) / (seen.count + doubt);
      seen.rate = std::clamp(seen.rate, .0005f, .9995f);
    }
  }

  static float logit_of(float p) { return stretch(std::clamp(p, .0005f, .9995f)); }

  void choose(const Evidence& e, const float** rows) const {
    for (int k = 0, first = 0; k < 4; first += kRows[k++]) rows[k] = weights[first + e.row[k]];
  }

  static int depth_of(int depth) { return depth <= 4 ? std::max(depth, 1) - 1 : depth <= 6 ? 4 : depth <= 9 ? 5 : 6; }

 public:
  Tally tally[kTenths] = {};
  // Tokens per step of late, over all sequences: what one begins with.
  float tokens_per_step = 1;
};
