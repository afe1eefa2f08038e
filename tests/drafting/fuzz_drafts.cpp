// Random batches, texts and corpora, some too small, some replaced between two steps; built with sanitizers by
// test_fuzz.py. Prints how many guesses were made.

#include "c_api.cpp"
#include "drafter.cpp"

#include <cstdio>
#include <memory>
#include <random>

namespace {

constexpr int kSequences = 4, kLogits = 77;

class Fuzz {
 public:
  explicit Fuzz(uint32_t seed) : random(seed) {}

  // One set of sequences, many steps.
  int64_t round() {
    const int vocab = 2 + below(30);
    auto corpus = std::make_unique<CorpusIndex>(50 + below(3000), vocab);
    std::vector<std::unique_ptr<SequenceIndex>> sequences;
    for (int i = 0; i < kSequences; ++i) {
      sequences.emplace_back(tandem_draft_sequence_new(below(5)));
      extend(*sequences.back(), {below(vocab)});
    }
    int64_t guesses = 0;
    for (int step = 0; step < 150; ++step) {
      if (below(40) == 0) corpus = std::make_unique<CorpusIndex>(50 + below(3000), vocab);
      TandemInput drafts[kSequences] = {};
      TandemStep steps[kSequences] = {};
      TandemInput* pointers[kSequences];
      for (int i = 0; i < kSequences; ++i) {
        TandemInput& draft = *(pointers[i] = &drafts[i]);
        draft.sequence = below(20) ? sequences[i].get() : nullptr;
        draft.corpus = below(8) ? corpus.get() : nullptr;
        draft.recycler = below(2) ? &recycler : nullptr;
        draft.model = &model;
        draft.max_chain = below(3) ? 0 : below(9);
        steps[i].room = below(70);
        steps[i].own_run = i;
      }
      const int most = below(64), num_seconds = 1 + below(int(costs.size()));
      // Exactly large enough, so that the sanitizer sees one guess too many.
      std::vector<TandemGuess> made(std::min(most * kSequences, num_seconds - 1));
      tandem_draft(pointers, steps, kSequences, most, kSequences, costs.data(), num_seconds, made.data());
      for (int i = 0, begin = 0; i < kSequences; begin += steps[i++].num_guesses) {
        guesses += steps[i].num_guesses;
        drafts[i].sequence = sequences[i].get();
        emit(drafts[i], made.data() + begin, steps[i].num_guesses, *corpus, i, vocab);
      }
    }
    return guesses;
  }

 private:
  std::mt19937 random;
  AcceptanceModel model;
  Recycler recycler;
  // Constant, with a step now and then.
  const std::vector<double> costs = [] {
    std::vector<double> costs;
    for (int q = 0; q < 300; ++q) costs.push_back(1.0 + q / 7 * 0.05);
    return costs;
  }();

  int below(int end) { return int(random() % end); }

  static void extend(SequenceIndex& sequence, const std::vector<int32_t>& tokens) {
    tandem_draft_sequence_extend(&sequence, tokens.data(), int64_t(tokens.size()));
  }

  // Some tokens, guessed or not, become the sequence's, the corpus' and the recycler's.
  void emit(TandemInput& draft, const TandemGuess* guesses, int num_guesses, CorpusIndex& corpus, int run, int vocab) {
    std::vector<int32_t> tokens(1 + below(4));
    for (int32_t& token : tokens) {
      token = num_guesses && below(2) ? guesses[below(num_guesses)].token : below(vocab);
      if (token >= vocab) token = 0;
    }
    std::vector<float> logits(tokens.size() * kLogits);
    for (float& logit : logits) logit = float(below(1000)) / 100;
    std::vector<int32_t> rows(tokens.size());
    for (int32_t& row : rows) row = below(int(tokens.size()));
    std::vector<TopTokens> top(tokens.size());
    tandem_draft_top_tokens(logits.data(), kLogits, rows.data(), int32_t(rows.size()), top.data());
    TandemInput* const one[] = {&draft};
    draft.recycler = below(3) ? &recycler : nullptr;
    const int32_t end = int32_t(tokens.size());
    tandem_draft_learn(one, 1, tokens.data(), &end, below(3) ? top.data() : nullptr);
    const int context = below(3);
    tokens.insert(tokens.begin(), context, 0);
    corpus.add(run, tokens.data(), int64_t(tokens.size()), context);
  }
};

}  // namespace

int main() {
  int64_t guesses = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) guesses += Fuzz(seed).round();
  std::printf("%lld\n", static_cast<long long>(guesses));
}
