// Duration of a decode step as a function of its number of guesses, estimated online from measured steps.
//
//   model    time = a + b rows + c context + d rows * context per sequence, for every batch: least squares with
//            exponential forgetting and non-negative coefficients. Rows are the tokens that a step computes, context the
//            cached tokens that it reads.
//   region   batch sizes up to a power of two: measured time over the model's time, by number of guesses. It covers what
//            is not linear (tiles of rows, idle units of a GPU).
//
// Steps are compared only with their neighbours in time, because the speed of a shared machine drifts. Times are in units
// of the prior: about one step of one row without context.
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
  // row_cost: time of one more row relative to a step without guesses, before any measurement.
  explicit StepCost(double row_cost) : prior{1, row_cost, 0, 0}, coefficients(prior) {
    // The prior has no information about context.
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

  // Consecutive steps; only their ratios are used.
  void observe(const Step* steps, int count) {
    if (count == 0) return;
    forget(count);
    const auto fewer = [](const Step& a, const Step& b) { return a.num_guesses < b.num_guesses; };
    const auto [least, most] = std::minmax_element(steps, steps + count, fewer);
    // Steps of one size contain no information about the cost of guesses.
    if (least->num_guesses < most->num_guesses) compare(steps, count);
    fit();
  }

  // Times of a step with 0 .. count - 1 guesses, non-decreasing; only their ratios have a meaning.
  void curve(int num_sequences, int64_t context, int count, double* seconds) const {
    const Correction correction = correction_of(num_sequences);
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
  // Weight of the prior: as a share of the observations, and in steps. The latter dominates when nothing is measured for
  // long, so that a cost that was measured too high is tried again.
  static constexpr double kRidge = .005, kPriorSteps = .1;
  // Weight of a region's prior, in steps; in large batches, where a few guesses change less than the noise, one step for
  // every eight sequences. With less weight, sizes with a few lucky steps look cheap.
  static constexpr double kMinPriorSteps = 3, kSequencesPerPrior = 8;
  // A step's time is clipped to this factor around the expected time: outliers come from other processes.
  static constexpr double kMaxDeviation = 1.25;
  // Numbers of guesses between which the ratios of a region are interpolated.
  static constexpr std::array<double, 20> kKnots = {0,  1,  2,  3,  4,  6,   8,   12,  16,  24,
                                                    32, 48, 64, 96, 128, 192, 256, 512, 1024, 8192};
  static constexpr int kNumKnots = int(kKnots.size());

  using Features = std::array<double, kNumFeatures>;
  using Products = std::array<Features, kNumFeatures>;
  using Correction = std::array<double, kNumKnots>;

  // Measured steps, split between the two nearest knots.
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

    // Measured time over modelled time, with a prior of 1 that weighs `prior_weight` steps.
    Correction correction(const Features& coefficients, double prior_weight) const {
      Correction known;
      int num_known = 0, at[kNumKnots];
      for (int k = 0; k < kNumKnots; ++k) {
        if (weights[k] <= .5) continue;
        const double ratio = seconds[k] / dot(features[k], coefficients);
        known[k] = 1 + (ratio - 1) * weights[k] / (weights[k] + prior_weight);
        at[num_known++] = k;
      }
      // Between measured knots: interpolated. Beyond them: as the nearest one.
      Correction all;
      all.fill(1);
      for (int k = 0, next = 0; num_known && k < kNumKnots; ++k) {
        while (next < num_known && at[next] < k) ++next;
        if (next == 0) all[k] = known[at[0]];
        else if (next == num_known) all[k] = known[at[num_known - 1]];
        else {
          const int low = at[next - 1], high = at[next];
          const double share = (kKnots[k] - kKnots[low]) / (kKnots[high] - kKnots[low]);
          all[k] = known[low] * (1 - share) + known[high] * share;
        }
      }
      return all;
    }
  };

  const Features prior;
  Features coefficients;
  Products prior_products{}, products{};
  Features targets{};
  std::map<int, Region> regions;  // by the bits of the batch size

  // One, rows, context, rows * context per sequence; context in thousands.
  static Features features(double num_sequences, double context, double num_guesses) {
    const double rows = num_sequences + num_guesses, thousands = context / 1000;
    return {1, rows, thousands, rows * thousands / num_sequences};
  }

  static int region_of(int num_sequences) { return 32 - __builtin_clz(std::max(num_sequences, 1)); }

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

  Correction correction_of(int num_sequences) const {
    const auto found = regions.find(region_of(num_sequences));
    if (found != regions.end())
      return found->second.correction(coefficients, std::max(kMinPriorSteps, num_sequences / kSequencesPerPrior));
    Correction none;
    none.fill(1);
    return none;
  }

  void forget(int num_steps) {
    const double past = std::pow(kForgetting, num_steps);
    for (Features& row : products)
      for (double& x : row) x *= past;
    for (double& x : targets) x *= past;
    for (auto& [key, region] : regions) region.forget(past);
  }

  void compare(const Step* steps, int count) {
    // The current speed of the machine is the median of measured over expected times. The expectation includes the
    // corrections: with the model alone, a burst of large steps would look like a slow machine.
    std::vector<double> corrections(count), deviations(count);
    for (int i = 0; i < count; ++i) {
      const Step& step = steps[i];
      const Correction known = correction_of(int(step.num_sequences));
      corrections[i] = between(known, knot_above(step.num_guesses), step.num_guesses);
      deviations[i] = step.seconds / (modelled(step) * corrections[i]);
    }
    std::vector<double> sorted = deviations;
    std::nth_element(sorted.begin(), sorted.begin() + count / 2, sorted.end());
    const double speed = sorted[count / 2];
    for (int i = 0; i < count; ++i) {
      const Step& step = steps[i];
      const double deviation = std::clamp(deviations[i] / speed, 1 / kMaxDeviation, kMaxDeviation);
      const Features x = features(step.num_sequences, step.context, step.num_guesses);
      const double expected = dot(x, coefficients), took = deviation * corrections[i] * expected;
      regions[region_of(int(step.num_sequences))].add(x, step.num_guesses, took);
      // Relative errors: short steps count as much as long ones.
      add_products(products, x, 1 / squared(expected));
      for (int k = 0; k < kNumFeatures; ++k) targets[k] += x[k] * took / squared(expected);
    }
  }

  double modelled(const Step& step) const {
    return dot(features(step.num_sequences, step.context, step.num_guesses), coefficients);
  }

  // Least squares with the prior as regulariser; features with a negative coefficient are dropped.
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

  // Gaussian elimination on the positive definite system of the used features; the others are 0.
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
