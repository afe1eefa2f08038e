// A token drawn from a row of logits, in three passes over it: the largest logit, the weights, the race. A nucleus
// (top-p) takes two more, and one for each halving of the range of its lightest weight if that range holds many tokens.
//
// A token's time in the race is at least u / weight, so nearly all tokens lose without a logarithm. exp is computed as
// numpy does for float32, so that draws are those of numpy. Sums in float64 may be added in another order.

#include "sample.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "simd.h"
#include "team.h"

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Tokens are tested in blocks; mostly none of a block can win.
constexpr int64_t kBlock = 64;
constexpr int kWide = kLanes / 2;
typedef uint64_t Bits __attribute__((vector_size(kWide * 8)));
typedef int64_t Mask __attribute__((vector_size(kWide * 8)));
typedef double Double __attribute__((vector_size(kWide * 8)));
typedef float Narrow __attribute__((vector_size(kWide * 4)));
typedef int32_t NarrowInt __attribute__((vector_size(kWide * 4)));

template <class To, class From>
inline To load_as(const From* p) {
  To v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// e^x for x <= 0, the bits of numpy's float32 exp: a quotient of polynomials after reduction by ln 2 in two parts.
inline Vec exp_of(Vec x) {
  const auto is_zero = x <= splat(-103.97208404541015625f);
  x = is_zero ? Vec{} : x;
  const VecInt power = round(x * splat(kLog2E));
  const Vec k = __builtin_convertvector(power, Vec);
  x = fma(k, splat(-6.93145752e-1f), x);
  x = fma(k, splat(-1.42860677e-6f), x);
  Vec p = splat(5.082762527590693718096e-04f);
  p = fma(p, x, splat(6.757896990527504603057e-03f));
  p = fma(p, x, splat(5.114512081637298353406e-02f));
  p = fma(p, x, splat(2.473615434895520810817e-01f));
  p = fma(p, x, splat(7.257664613233124478488e-01f));
  p = fma(p, x, splat(9.999999999980870924916e-01f));
  Vec q = splat(2.159509375685829852307e-02f);
  q = fma(q, x, splat(-2.742335390411667452936e-01f));
  q = fma(q, x, splat(1.0f));
  // In two steps, of which only the second rounds: 2^-150 is no float.
  const VecInt lowest = VecInt{} - 125, normal = power < lowest ? lowest : power;
  p = p / q * (Vec)((normal + 127) << 23) * (Vec)((power - normal + 127) << 23);
  return is_zero ? Vec{} : p;
}

// What to draw with; see tandem_kernels.draw_tokens.
struct Draw {
  uint64_t key;
  float temperature;
  int64_t top_k;
  double top_p;
  float log_min_p;
};

// SplitMix64's output for a state, or for a vector of them.
template <class State>
inline State mixed(State z) {
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
  z = (z ^ z >> 27) * 0x94D049BB133111EBu;
  return z ^ z >> 31;
}
constexpr uint64_t kGamma = 0x9E3779B97F4A7C15u;

// 52 bits as a number in (0, 1): behind the exponent of 1 they are one in [1, 2).
inline double uniform(uint64_t key, int64_t token) {
  const uint64_t bits = mixed(key + uint64_t(token + 1) * kGamma) >> 12 | 0x3ff0000000000000u;
  double u;
  std::memcpy(&u, &bits, 8);
  return u - 1.0 + 0x1p-53;
}

// Tokens of a row that may be drawn: all, or after a filter those in `ids`.
class Candidates {
 public:
  // All of a row's tokens, followed by padding that is never drawn.
  void begin(const float* logits, int64_t size, float largest, float temperature) {
    num = (size + kPadding - 1) / kPadding * kPadding;
    if (int64_t(x.size()) < num) x.resize(num), weights.resize(num);
    for (int64_t i = 0; i < size; ++i) x[i] = (logits[i] - largest) / temperature;
    std::fill(x.begin() + size, x.begin() + num, -kInfinity);
    is_filtered = false;
  }

  // The k largest, and those equal to the last of them; 0 < k < size, before other filters.
  void keep_top_k(int64_t k) {
    // The k-th largest of all is at least the k-th largest of the columns' largest, and few tokens reach that.
    const int64_t columns = num / kBlock;
    float bound = -kInfinity;
    if (columns > k) {
      some.assign(x.begin(), x.begin() + columns);
      for (int64_t from = columns; from < num; from += columns)
        for (int64_t i = 0; i < columns; i += kLanes)
          store(&some[i], maximum(load(&some[i]), load(&x[from + i])));
      bound = kth_of_some(k);
    }
    keep_from(x, bound);
    some.assign(x.begin(), x.begin() + ids.size());
    keep_from(x, kth_of_some(k));
  }

  // The fewest most likely tokens with p < 1 of the weight: bisects for the lightest of their weights.
  void keep_top_p(double p) {
    weigh();
    // It is in [low, high), in bits, which are ordered as positive floats are: the tokens from `high` weigh less than
    // the target, those from `low` enough. Mostly a few dozen tokens from kHeavy are enough.
    uint32_t low = bits_of(kHeavy), high = bits_of(1.0f) + 1;
    const Share all = from(0);
    const double target = p * all.weight;
    Share upper{}, lower = from(low);
    if (lower.weight < target) high = low, upper = lower, low = 0, lower = all;
    while (lower.count - upper.count > kFew && high - low > 1) {
      const uint32_t middle = low + (high - low) / 2;
      const Share share = from(middle);
      if (share.weight < target)
        high = middle, upper = share;
      else
        low = middle, lower = share;
    }
    some.clear();
    each_between(weights, float_of(low), float_of(high), [&](int64_t i) { some.push_back(weights[i]); });
    if (high - low > 1) std::sort(some.begin(), some.end(), std::greater<float>());
    size_t kept = 0;
    for (double mass = 0.0; kept < some.size() && upper.weight + mass < target;) mass += some[kept++];
    const float lightest = kept ? some[kept - 1] : float_of(low);
    // Among equal weights the lower ids stay.
    int64_t equals = some.begin() + kept - std::find(some.begin(), some.begin() + kept, lightest);
    if (is_filtered || upper.count + int64_t(kept) <= kFew) {
      keep_from(weights, lightest);
      int64_t left = 0;
      for (int64_t i = 0; i < int64_t(ids.size()); ++i)
        if (weights[i] > lightest || equals-- > 0) move(i, left++);
      end_at(left);
      return;
    }
    // Many tokens stay where they are.
    for (int64_t i = 0; i < num; i += kLanes) {
      const Vec w = load(&weights[i]);
      const VecInt is_equal = w == splat(lightest);
      const int32_t num_equal = -sum(is_equal);
      VecInt stays = w >= splat(lightest);
      if (num_equal <= equals) {
        equals -= num_equal;
      } else {
        for (int lane = 0; lane < kLanes; ++lane) {
          if (!is_equal[lane]) continue;
          stays[lane] = equals > 0 ? -1 : 0;
          equals -= equals > 0;
        }
      }
      store(&x[i], stays ? load(&x[i]) : splat(-kInfinity));
    }
  }

  // Those with at least this logit.
  void keep_from(float limit) { keep_from(x, limit); }

  // The token whose exponential time over its weight is the first, the lowest of equals.
  int64_t race(uint64_t key) {
    weigh();
    double first = std::numeric_limits<double>::infinity();
    int64_t winner = -1;
    auto enter = [&](int64_t token, double weight) {
      const double u = uniform(key, token);
      if (weight == 0.0 || u > first * weight) return;
      const double time = -std::log1p(-u) / weight;
      if (time < first) first = time, winner = token;
    };
    if (is_filtered) {
      for (size_t i = 0; i < ids.size(); ++i) enter(ids[i], weights[i]);
      return winner;
    }
    Bits state;
    for (int i = 0; i < kWide; ++i) state[i] = key + uint64_t(i + 1) * kGamma;
    for (int64_t from = 0; from < num; from += kBlock) {
      Mask may_win{};
      for (int64_t i = from; i < from + kBlock; i += kWide, state += kWide * kGamma) {
        const Double u = (Double)(mixed(state) >> 12 | 0x3ff0000000000000u) - 1.0 + 0x1p-53;
        may_win |= u <= first * __builtin_convertvector(load_as<Narrow>(&weights[i]), Double);
      }
      int64_t any = 0;
      for (int i = 0; i < kWide; ++i) any |= may_win[i];
      for (int64_t i = from; any && i < from + kBlock; ++i) enter(i, weights[i]);
    }
    return winner;
  }

 private:
  static constexpr int64_t kPadding = kBlock * kLanes;
  static constexpr float kHeavy = 1e-3f;

  // This number of tokens is sorted or moved in the time of a pass over a row.
  static constexpr int64_t kFew = 512;

  static uint32_t bits_of(float weight) {
    uint32_t bits;
    std::memcpy(&bits, &weight, 4);
    return bits;
  }
  static float float_of(uint32_t bits) {
    float weight;
    std::memcpy(&weight, &bits, 4);
    return weight;
  }

  struct Share {
    double weight;
    int64_t count;
  };

  // The weights whose bits are at least `bits`.
  Share from(uint32_t bits) const {
    const Narrow limit = Narrow{} + float_of(bits);
    Double sums{};
    NarrowInt counts{};
    for (int64_t i = 0; i < num; i += kWide) {
      const Narrow w = load_as<Narrow>(&weights[i]);
      const NarrowInt is_in = w >= limit;
      counts -= is_in;
      sums += __builtin_convertvector(is_in ? w : Narrow{}, Double);
    }
    Share share{};
    for (int i = 0; i < kWide; ++i) share.weight += sums[i], share.count += counts[i];
    return share;
  }

  void weigh() {
    for (int64_t i = 0; i < num; i += kLanes) store(&weights[i], exp_of(load(&x[i])));
  }

  // Calls found(i), in order, where low <= values[i] < high.
  template <class Found>
  void each_between(const std::vector<float>& values, float low, float high, Found found) const {
    for (int64_t from = 0; from < num; from += kLanes) {
      const Vec v = load(&values[from]);
      const VecInt is_between = v >= splat(low) & v < splat(high);
      if (!sum(is_between)) continue;
      for (int lane = 0; lane < kLanes; ++lane)
        if (is_between[lane]) found(from + lane);
    }
  }

  void keep_from(const std::vector<float>& values, float limit) {
    int64_t left = 0;
    if (!is_filtered) ids.resize(num);
    each_between(values, limit, kInfinity, [&](int64_t i) {
      ids[left] = is_filtered ? ids[i] : i;
      const float logit = x[i], weight = weights[i];
      x[left] = logit, weights[left++] = weight;
    });
    is_filtered = true;
    end_at(left);
  }

  void move(int64_t from, int64_t to) { ids[to] = ids[from], x[to] = x[from], weights[to] = weights[from]; }

  void end_at(int64_t left) {
    ids.resize(left);
    num = (left + kLanes - 1) / kLanes * kLanes;
    std::fill(x.begin() + left, x.begin() + num, -kInfinity);
    std::fill(weights.begin() + left, weights.begin() + num, 0.0f);
  }

  float kth_of_some(int64_t k) {
    std::nth_element(some.begin(), some.begin() + (k - 1), some.end(), std::greater<float>());
    return some[k - 1];
  }

  bool is_filtered = false;
  int64_t num = 0;  // with padding
  std::vector<int64_t> ids;
  std::vector<float> x, weights, some;
};

int64_t draw(const float* logits, int64_t size, const Draw& by) {
  const int64_t likeliest = argmax(logits, size);
  const float largest = logits[likeliest];
  if (!std::isfinite(largest)) return -1;
  if (by.temperature == 0.0f) return likeliest;
  static thread_local Candidates candidates;
  candidates.begin(logits, size, largest, by.temperature);
  if (0 < by.top_k && by.top_k < size) candidates.keep_top_k(by.top_k);
  if (by.top_p < 1.0) candidates.keep_top_p(by.top_p);
  if (by.log_min_p > -kInfinity) candidates.keep_from(by.log_min_p);
  return candidates.race(by.key);
}

}  // namespace

int64_t argmax(const float* row, int64_t size) {
  float largest = -kInfinity;
  int64_t from = 0;
  const int64_t whole = size / kBlock * kBlock;
  for (int64_t i = 0; i < whole; i += kBlock) {
    Vec most = splat(-kInfinity);
    VecInt is_nan{};
    for (int64_t j = i; j < i + kBlock; j += kLanes) {
      const Vec v = load(row + j);
      most = maximum(v, most);
      is_nan |= v != v;
    }
    if (sum(is_nan)) {
      from = i;
      while (row[from] == row[from]) ++from;
      return from;
    }
    if (const float found = ::largest(most); found > largest) largest = found, from = i;
  }
  for (int64_t i = whole; i < size; ++i) {
    if (row[i] != row[i]) return i;
    if (row[i] > largest) largest = row[i], from = i;
  }
  // If all are -inf, this is the first.
  while (row[from] < largest) ++from;
  return from;
}

// One token per row of logits [rows, size]; out[r] is -1 where nothing can be drawn.
extern "C" void tandem_draw_tokens(const float* logits, const int64_t* keys, const float* temperature,
                                   const int64_t* top_k, const double* top_p, const float* log_min_p, int64_t* out,
                                   int64_t rows, int64_t size, int32_t num_threads) {
  with_team(num_threads, [&](Team& team) {
    team.share(rows, [&](int64_t r) {
      out[r] = draw(logits + r * size, size, {uint64_t(keys[r]), temperature[r], top_k[r], top_p[r], log_min_p[r]});
    });
    team.wait();
  });
}
