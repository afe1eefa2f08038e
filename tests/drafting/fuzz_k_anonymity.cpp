// Random requests, pieces and drops; test_fuzz.py builds it with sanitizers. Checks that k requests hold every span,
// and prints the number of spans.

#include "k_anonymity.cpp"

#include <cstdio>
#include <map>
#include <random>
#include <set>

namespace {

using Text = std::vector<int32_t>;

bool holds(const Text& text, const int32_t* begin, const int32_t* end) {
  return std::search(text.begin(), text.end(), begin, end) != text.end();
}

int64_t round(uint32_t seed) {
  std::mt19937 random(seed);
  auto below = [&](int n) { return int(random() % uint32_t(n)); };
  const int k = 1 + below(4), vocab = 2 + below(6);
  void* filter = tandem_k_anonymity_new(k);
  std::map<int32_t, Text> texts;
  std::set<int32_t> dropped;
  int64_t num_spans = 0;
  for (int step = 0; step < 200; ++step) {
    const int32_t run = below(40);
    if (dropped.count(run)) continue;
    if (below(15) == 0) {
      tandem_k_anonymity_drop(filter, run);
      dropped.insert(run);
      continue;
    }
    Text& text = texts[run];
    Text piece(1 + below(40));
    for (int32_t& token : piece) token = below(vocab);
    // Often a part of another request's text.
    if (below(3) && !texts.empty()) {
      const Text& other = std::next(texts.begin(), below(int(texts.size())))->second;
      const int from = other.empty() ? 0 : below(int(other.size()));
      piece.insert(piece.end(), other.begin() + from, other.begin() + std::min<int>(int(other.size()), from + 60));
    }
    text.insert(text.end(), piece.begin(), piece.end());
    std::vector<int32_t> found(3 * piece.size() + 3);
    const int32_t count =
        tandem_k_anonymity_append(filter, run, run / 2, piece.data(), int64_t(piece.size()), found.data());
    num_spans += count;
    for (int i = 0; i < count; ++i) {
      const int32_t *begin = text.data() + found[3 * i], *end = text.data() + found[3 * i + 1];
      std::set<int32_t> requests;
      for (const auto& [number, held] : texts)
        if (holds(held, begin, end)) requests.insert(number / 2);
      if (int(requests.size()) < k) std::abort();
    }
    Text read(text.size());
    tandem_k_anonymity_read(filter, run, 0, int64_t(read.size()), read.data());
    if (read != text) std::abort();
  }
  tandem_k_anonymity_free(filter);
  return num_spans;
}

}  // namespace

int main() {
  int64_t num_spans = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) num_spans += round(seed);
  std::printf("%lld\n", static_cast<long long>(num_spans));
}
