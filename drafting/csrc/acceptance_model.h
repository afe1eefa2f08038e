// Predicts the probability that a candidate is the next token, from n-gram counts and other evidence.
//
//   cell         per kind of evidence ("followed 2 of the 3 latest matches of 4 tokens in the corpus"): how often such a
//                candidate was right
//   mixing       logistic mixing (after Mahoney's PAQ): the weighted sum of the logits of a candidate's cells. The weights
//                depend on the candidate: a base plus rows chosen by its longest match and by the longest match of any
//                candidate.
//   acceptance   calibration: how often candidates with this mixed logit at this depth were accepted
//
// All candidates at reached nodes update the model, including unsent ones, so that a source whose guesses are no longer
// sent can recover.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>

// Exact matches in the sequence and in the corpus, by length.
enum Place { kLocal, kGlobal, kNumPlaces };
constexpr int kLevelLength[] = {1, 2, 3, 4, 5, 6, 8, 12, 16, 24};
constexpr int kNumLevels = 10;
constexpr int kNumExact = kNumPlaces * kNumLevels;
// Likely next tokens from earlier logits, after the last 1, 2 and 3 tokens.
constexpr int kRecycledOrders = 3;
enum Input { kRecycled = kNumExact, kRarity = kRecycled + kRecycledOrders, kBias, kNumInputs };
constexpr int kNumCells = 128;

// The cell for n matches of which c were followed by the candidate: exact for small n, coarser for large.
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

// The evidence for one candidate.
struct Evidence {
  static constexpr int kMost = kNumPlaces * 2 + kRecycledOrders + 1;
  uint8_t count = 0;
  uint8_t input[kMost], cell[kMost];
  // Rows of the weights: the candidate's longest level, and the longest of any candidate.
  uint8_t row[4];

  void add(int of, int in) {
    input[count] = uint8_t(of);
    cell[count++] = uint8_t(in);
  }
};

class AcceptanceModel {
 public:
  static constexpr int kRows[4] = {11 * 11, 11 * 11, 3, 100};  // by corpus level, sequence level, the longer of both, rarity
  static constexpr int kNumDepths = 7, kNumBins = 33;

  AcceptanceModel() {
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
    for (auto& depth : acceptances)
      for (int b = 0; b < kNumBins; ++b) depth[b] = {sigmoid((b - kNumBins / 2) * .5f), 0};
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

  void update(const Evidence& e, float mixed, bool right, float rate) {
    const float step = rate * ((right ? 1.f : 0.f) - sigmoid(mixed));
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

  // Learning rate for the candidates of the next reached node.
  float next_rate() { return std::max(.001f, .003f / (1 + num_nodes++ / 2000.f)); }

  // Calibrated probability that a candidate of this logit is accepted, given that its parent is.
  float acceptance(float logit, int depth) const {
    const Bin bin(logit);
    const Rate* row = acceptances[depth_of(depth)];
    return row[bin.low].rate * (1 - bin.share) + row[bin.low + 1].rate * bin.share;
  }
  void update_acceptance(float logit, int depth, bool accepted) {
    const Bin bin(logit);
    for (int high = 0; high < 2; ++high) {
      const float share = high ? bin.share : 1 - bin.share;
      Rate& seen = acceptances[depth_of(depth)][bin.low + high];
      seen.count = std::min(seen.count + share, kMemory);
      seen.rate += share * ((accepted ? 1.f : 0.f) - seen.rate) / (seen.count + kPriorCount);
      seen.rate = std::clamp(seen.rate, .0005f, .9995f);
    }
  }

  // Of verified guesses, by tenths of the predicted probability: number, sum of predictions, number accepted.
  struct Tenth {
    double guesses, predicted, accepted;
  };
  static constexpr int kTenths = 10;

  void count(float predicted, bool accepted) {
    Tenth& of = tenths[std::clamp(int(predicted * kTenths), 0, kTenths - 1)];
    ++of.guesses;
    of.predicted += predicted;
    of.accepted += accepted;
  }

  Tenth tenths[kTenths] = {};

  // Back to the initial weights; the counts of guesses stay.
  void reset() {
    AcceptanceModel initial;
    std::copy(tenths, tenths + kTenths, initial.tenths);
    *this = initial;
  }

  static float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
  static float logit_of(float p) { return std::log(p / (1 - p)); }

 private:
  struct Rate {
    float rate, count;
  };
  // Weight of a rate's prior, and of how many of the latest observations it is the mean.
  static constexpr float kPriorCount = 4, kMemory = 100;
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
  Rate acceptances[kNumDepths][kNumBins];
  int64_t num_nodes = 0;

  void set(int input, int cell, float rate) {
    cells[input][cell].rate = rate;
    logit[input][cell] = logit_of(rate);
  }

  void choose(const Evidence& e, const float** rows) const {
    for (int k = 0, first = 0; k < 4; first += kRows[k++]) rows[k] = weights[first + e.row[k]];
  }

  static int depth_of(int depth) { return depth <= 4 ? std::max(depth, 1) - 1 : depth <= 6 ? 4 : depth <= 9 ? 5 : 6; }
};
