// What a step with so many guesses takes, learnt from the steps themselves.
//
//   model    time = a + b rows + c context + d rows * context per sequence, for every batch: fitted by least squares
//            with forgetting, no coefficient negative. Rows are the tokens a step computes, context the cached tokens
//            it reads.
//   region   batch size and context, each to a power of two: what was seen there relative to the model, by number of
//            guesses, for what is not linear (tiles of rows, a GPU's idle units); where little was seen, drawn to what
//            was seen with that batch size in any context
//
// Only how times compare is learnt, within a few steps at a time, since a machine's speed changes with what else runs
// on it. The unit is that of the prior: about a step of one row without context.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <map>
#include <utility>
#include <vector>

class StepCost {
 public:
  // row_cost: time of one more row relative to a step without guesses, before anything was measured.
  explicit StepCost(double row_cost) : prior{1, row_cost, 0, 0}, coefficients(prior) {
    // The prior says nothing of context.
    constexpr int kRows = 16;
    for (int i = 0; i < kNumFeatures; ++i) prior_products[i][i] = 1e-9;
    for (int guesses = 0; guesses < kRows; ++guesses) {
      const Features x = features(1, 1000, guesses);
      add_products(prior_products, x, kPriorSteps / kRows / squared(dot(x, prior)));
    }
  }

  // A step that only decoded.
  struct Step {
    double num_sequences, context, num_guesses, seconds;  // context: cached tokens of all its sequences
  };

  // Steps in a row, of which only how they compare is learnt, first of all into the regions, by the model as it was.
  void observe(const Step* steps, int count) {
    if (count == 0) return;
    forget(count);
    const auto fewer = [](const Step& a, const Step& b) { return a.num_guesses < b.num_guesses; };
    const auto [least, most] = std::minmax_element(steps, steps + count, fewer);
    // Otherwise there is nothing to compare.
    if (least->num_guesses < most->num_guesses) compare(steps, count);
    fit();
  }

  // Times of a step with 0 .. count - 1 guesses, never less for more; their ratios count.
  void curve(int num_sequences, int64_t context, int count, double* seconds) const {
    const Correction correction = correction_of(num_sequences, context);
    int high = 1;
    double most = 0;
    for (int guesses = 0; guesses < count; ++guesses) {
      while (high < kNumKnots - 1 && guesses > kKnots[high]) ++high;
      const double by = between(correction, high, guesses);
      most = std::max(most, dot(features(num_sequences, context, guesses), coefficients) * by);
      seconds[guesses] = most;
    }
  }

 private:
  static constexpr int kNumFeatures = 4;
  // Weight of the past after one step; .998 remembers about five hundred steps.
  static constexpr double kForgetting = .998;
  // How far the prior counts: as a share of what was observed, and as steps of its own. The latter win when nothing is
  // learnt for long, so that a price that was thought too high is asked for again.
  static constexpr double kRidge = .005, kPriorSteps = .1;
  // What a region is drawn to weighs as much as so many steps, and in a large batch, where a few guesses change less
  // than steps differ by chance, as one for every eight sequences. Were it less, numbers of guesses whose few steps
  // happened to be short would look cheap, and be chosen for that.
  static constexpr double kLeastPrior = 3, kSequencesPerPrior = 8;
  // A step counts at most for so much more or less than was expected: what holds steps up has nothing to do with them.
  static constexpr double kMaxSurprise = 1.25;
  static constexpr int kAnyContext = -1;
  // Numbers of guesses between which a region's ratios are interpolated.
  static constexpr std::array<double, 20> kKnots = {0,  1,  2,  3,  4,  6,   8,   12,  16,  24,
                                                    32, 48, 64, 96, 128, 192, 256, 512, 1024, 8192};
  static constexpr int kNumKnots = int(kKnots.size());

  using Features = std::array<double, kNumFeatures>;
  using Products = std::array<Features, kNumFeatures>;
  using Correction = std::array<double, kNumKnots>;
  using RegionKey = std::pair<int, int>;

  // The steps that were seen there, by the knots beside them.
  struct Region {
    Correction weights{}, seconds{};
    std::array<Features, kNumKnots> features{};

    void add(const Features& x, double num_guesses, double took) {
      const int high = knot_above(num_guesses);
      const double share = share_of(high, num_guesses);
      for (const auto& [knot, part] : {std::pair(high - 1, 1 - share), std::pair(high, share)}) {
        weights[knot] += part;
        seconds[knot] += part * took;
        for (int i = 0; i < kNumFeatures; ++i) features[knot][i] += part * x[i];
      }
    }

    void forget(double past) {
      for (int k = 0; k < kNumKnots; ++k) {
        weights[k] *= past;
        seconds[k] *= past;
        for (double& x : features[k]) x *= past;
      }
    }

    // What they took over what the model says of them, drawn to `prior` as if that were so many steps.
    Correction correction(const Features& coefficients, const Correction& prior, double prior_weight) const {
      Correction known;  // beside the prior
      int num_known = 0, at[kNumKnots];
      for (int k = 0; k < kNumKnots; ++k) {
        if (weights[k] <= .5) continue;
        const double ratio = seconds[k] / dot(features[k], coefficients) / prior[k];
        known[k] = 1 + (ratio - 1) * weights[k] / (weights[k] + prior_weight);
        at[num_known++] = k;
      }
      // Where nothing was seen, as where something was: what makes a region slow does so for all its steps.
      Correction all = prior;
      for (int k = 0, next = 0; num_known && k < kNumKnots; ++k) {
        while (next < num_known && at[next] < k) ++next;
        if (next == 0) all[k] *= known[at[0]];
        else if (next == num_known) all[k] *= known[at[num_known - 1]];
        else {
          const int low = at[next - 1], high = at[next];
          const double share = (kKnots[k] - kKnots[low]) / (kKnots[high] - kKnots[low]);
          all[k] *= known[low] * (1 - share) + known[high] * share;
        }
      }
      return all;
    }
  };

  const Features prior;
  Features coefficients;
  Products prior_products{}, products{};
  Features targets{};
  std::map<RegionKey, Region> regions;

  // One, rows, context, rows * context per sequence; context in thousands.
  static Features features(double num_sequences, double context, double num_guesses) {
    const double rows = num_sequences + num_guesses, thousands = context / 1000;
    return {1, rows, thousands, rows * thousands / num_sequences};
  }

  // Of the batch size in any context, and in such a one.
  static std::array<RegionKey, 2> regions_of(int num_sequences, int64_t context) {
    const auto bits = [](int64_t x) { return x ? 64 - __builtin_clzll(x) : 0; };
    return {RegionKey(bits(num_sequences), kAnyContext), RegionKey(bits(num_sequences), bits(context))};
  }

  static double squared(double x) { return x * x; }

  static double dot(const Features& a, const Features& b) {
    double sum = 0;
    for (int i = 0; i < kNumFeatures; ++i) sum += a[i] * b[i];
    return sum;
  }

  static void add_products(Products& to, const Features& x, double weight) {
    for (int i = 0; i < kNumFeatures; ++i)
      for (int j = 0; j < kNumFeatures; ++j) to[i][j] += weight * x[i] * x[j];
  }

  // How far a number of guesses lies between the knots high - 1 and high.
  static double share_of(int high, double guesses) {
    return std::min(1., (guesses - kKnots[high - 1]) / (kKnots[high] - kKnots[high - 1]));
  }

  static int knot_above(double guesses) {
    const auto found = std::lower_bound(kKnots.begin(), kKnots.end(), guesses);
    return std::clamp<int>(int(found - kKnots.begin()), 1, kNumKnots - 1);
  }

  static double between(const Correction& correction, int high, double guesses) {
    const double share = share_of(high, guesses);
    return correction[high - 1] * (1 - share) + correction[high] * share;
  }

  Correction correction_of(int num_sequences, int64_t context) const {
    Correction correction;
    correction.fill(1);
    const double prior_weight = std::max(kLeastPrior, num_sequences / kSequencesPerPrior);
    for (const auto& key : regions_of(num_sequences, context)) {
      const auto found = regions.find(key);
      if (found != regions.end()) correction = found->second.correction(coefficients, correction, prior_weight);
    }
    return correction;
  }

  void forget(int num_steps) {
    const double past = std::pow(kForgetting, num_steps);
    for (Features& row : products)
      for (double& x : row) x *= past;
    for (double& x : targets) x *= past;
    for (auto& [key, region] : regions) region.forget(past);
  }

  void compare(const Step* steps, int count) {
    // The machine's speed of the moment is the median of how these steps compare with all that is known. Beside the
    // model alone, steps that all have many guesses would look as if these cost what the model says.
    std::vector<double> corrections(count), surprises(count);
    for (int i = 0; i < count; ++i) {
      const Step& step = steps[i];
      const Correction known = correction_of(int(step.num_sequences), int64_t(step.context));
      corrections[i] = between(known, knot_above(step.num_guesses), step.num_guesses);
      surprises[i] = step.seconds / (modelled(step) * corrections[i]);
    }
    std::vector<double> sorted = surprises;
    std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.end());
    const double speed = sorted[count / 2];
    for (int i = 0; i < count; ++i) {
      const Step& step = steps[i];
      const double surprise = std::clamp(surprises[i] / speed, 1 / kMaxSurprise, kMaxSurprise);
      const Features x = features(step.num_sequences, step.context, step.num_guesses);
      const double expected = dot(x, coefficients), took = surprise * corrections[i] * expected;
      for (const auto& key : regions_of(step.num_sequences, step.context)) regions[key].add(x, step.num_guesses, took);
      // Errors count relative to the step: short ones are as dear as long ones.
      add_products(products, x, 1 / squared(expected));
      for (int k = 0; k < kNumFeatures; ++k) targets[k] += x[k] * took / squared(expected);
    }
  }

  double modelled(const Step& step) const {
    return dot(features(step.num_sequences, step.context, step.num_guesses), coefficients);
  }

  // Least squares, drawn to the prior where nothing was seen; what comes out negative is left out.
  void fit() {
    Products wanted = products;
    Features sums = targets;
    for (int i = 0; i < kNumFeatures; ++i) {
      for (int j = 0; j < kNumFeatures; ++j) {
        const double drawn = prior_products[i][j] + (i == j ? kRidge * products[i][i] : 0);
        wanted[i][j] += drawn;
        sums[i] += drawn * prior[j];
      }
    }
    std::array<bool, kNumFeatures> used;
    used.fill(true);
    for (;;) {
      const Features found = solve(wanted, sums, used);
      bool is_good = true;
      for (int i = 0; i < kNumFeatures; ++i)
        if (found[i] < 0) used[i] = is_good = false;
      if (!is_good) continue;
      if (found[0] > 0 || found[1] > 0) coefficients = found;
      return;
    }
  }

  // Of the positive definite system of those that are used, by elimination; the others are 0.
  static Features solve(Products a, Features b, const std::array<bool, kNumFeatures>& used) {
    for (int i = 0; i < kNumFeatures; ++i) {
      if (!used[i]) continue;
      for (int k = i + 1; k < kNumFeatures; ++k) {
        if (!used[k]) continue;
        const double by = a[k][i] / a[i][i];
        for (int j = i; j < kNumFeatures; ++j) a[k][j] -= by * a[i][j];
        b[k] -= by * b[i];
      }
    }
    Features found{};
    for (int i = kNumFeatures - 1; i >= 0; --i) {
      if (!used[i]) continue;
      double sum = b[i];
      for (int j = i + 1; j < kNumFeatures; ++j) sum -= a[i][j] * found[j];
      found[i] = sum / a[i][i];
    }
    return found;
  }
};
