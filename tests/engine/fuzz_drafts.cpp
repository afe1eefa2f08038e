// Random batches, texts and corpora, some too small, some replaced between two steps; built with sanitizers by
// test_drafts_fuzz.py. Prints how many guesses were made.

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
    auto corpus = std::make_unique<Corpus>(50 + below(3000), vocab);
    std::vector<std::unique_ptr<Sequence>> sequences;
    for (int i = 0; i < kSequences; ++i) {
      sequences.emplace_back(tandem_draft_sequence_new(below(5)));
      extend(*sequences.back(), {below(vocab)});
    }
    int64_t guesses = 0;
    for (int step = 0; step < 150; ++step) {
      if (below(40) == 0) corpus = std::make_unique<Corpus>(50 + below(3000), vocab);
      TandemDraft drafts[kSequences] = {};
      TandemDraft* pointers[kSequences];
      for (int i = 0; i < kSequences; ++i) {
        TandemDraft& draft = *(pointers[i] = &drafts[i]);
        draft.sequence = below(20) ? sequences[i].get() : nullptr;
        draft.corpus = below(8) ? corpus.get() : nullptr;
        draft.recycler = below(2) ? &recycler : nullptr;
        draft.learner = &learner;
        draft.room = below(70);
        draft.max_chain = below(3) ? 0 : below(9);
        draft.own_run = i;
      }
      tandem_draft(pointers, kSequences, below(64), kSequences, costs.data(), 1 + below(int(costs.size())),
                   below(2) * .01);
      for (int i = 0; i < kSequences; ++i) {
        guesses += drafts[i].num_guesses;
        emit(*sequences[i], drafts[i], *corpus, i, vocab);
      }
    }
    return guesses;
  }

 private:
  std::mt19937 random;
  Learner learner;
  Recycler recycler;
  // Flat, with a leap now and then.
  const std::vector<double> costs = [] {
    std::vector<double> costs;
    for (int q = 0; q < 300; ++q) costs.push_back(1.0 + q / 7 * 0.05);
    return costs;
  }();

  int below(int end) { return int(random() % end); }

  static void extend(Sequence& sequence, const std::vector<int32_t>& tokens) {
    tandem_draft_sequence_extend(&sequence, tokens.data(), int64_t(tokens.size()));
  }

  // Some tokens, guessed or not, become the sequence's, the corpus' and the recycler's.
  void emit(Sequence& sequence, const TandemDraft& draft, Corpus& corpus, int run, int vocab) {
    std::vector<int32_t> tokens(1 + below(4));
    for (int32_t& token : tokens) {
      token = draft.num_guesses && below(2) ? draft.tokens[below(draft.num_guesses)] : below(vocab);
      if (token >= vocab) token = 0;
    }
    std::vector<float> logits(tokens.size() * kLogits);
    for (float& logit : logits) logit = float(below(1000)) / 100;
    std::vector<int32_t> rows(tokens.size());
    for (int32_t& row : rows) row = below(int(tokens.size()));
    std::vector<Likeliest> likeliest(tokens.size());
    tandem_draft_likeliest(logits.data(), kLogits, rows.data(), int32_t(rows.size()), likeliest.data());
    tandem_draft_teach(&sequence, &learner, tokens.data(), int32_t(tokens.size()), below(3) ? &recycler : nullptr,
                       likeliest.data());
    extend(sequence, tokens);
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
