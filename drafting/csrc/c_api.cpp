// Constructors, accessors and step costs for tandem_drafting.native; drafter.cpp has the calls of each step.

#include <algorithm>
#include <atomic>
#include <iterator>

#include "recycler.h"
#include "sequence_index.h"
#include "step_cost.h"

extern "C" {

SequenceIndex* tandem_draft_sequence_new(int64_t num_prompt) {
  static std::atomic<uint32_t> count{0};
  SequenceIndex* sequence = new SequenceIndex;
  sequence->number = ++count;
  sequence->num_prompt = num_prompt;
  return sequence;
}
void tandem_draft_sequence_free(SequenceIndex* sequence) { delete sequence; }
void tandem_draft_sequence_extend(SequenceIndex* sequence, const int32_t* tokens, int64_t count) {
  sequence->extend(tokens, count);
}
int64_t tandem_draft_sequence_bytes(const SequenceIndex* sequence) {
  return sequence->index.bytes() + sequence->uses.bytes() + int64_t(sequence->nodes.capacity() * sizeof(Node));
}

CorpusIndex* tandem_draft_corpus_new(int64_t capacity, int32_t vocab_size) { return new CorpusIndex(capacity, vocab_size); }
void tandem_draft_corpus_free(CorpusIndex* corpus) { delete corpus; }
int32_t tandem_draft_corpus_add(CorpusIndex* corpus, int32_t run, const int32_t* tokens, int64_t count,
                                int64_t num_context) {
  return corpus->add(run, tokens, count, num_context);
}
int64_t tandem_draft_corpus_size(const CorpusIndex* corpus) { return corpus->index.matches.size(); }
int64_t tandem_draft_corpus_bytes(const CorpusIndex* corpus) { return corpus->bytes(); }

AcceptanceModel* tandem_draft_model_new() { return new AcceptanceModel; }
void tandem_draft_model_free(AcceptanceModel* model) { delete model; }
void tandem_draft_model_reset(AcceptanceModel* model) { model->reset(); }
void tandem_draft_model_tenths(const AcceptanceModel* model, AcceptanceModel::Tenth* out) {
  std::copy(std::begin(model->tenths), std::end(model->tenths), out);
}

// The top tokens of some rows of logits [.., vocab_size].
void tandem_draft_top_tokens(const float* logits, int64_t vocab_size, const int32_t* rows, int32_t count,
                            TopTokens* top) {
  for (int i = 0; i < count; ++i) top[i] = TopTokens::of(logits + rows[i] * vocab_size, vocab_size);
}

Recycler* tandem_draft_recycler_new() { return new Recycler; }
void tandem_draft_recycler_free(Recycler* recycler) { delete recycler; }
int64_t tandem_draft_recycler_bytes(const Recycler* recycler) { return recycler->bytes(); }

StepCost* tandem_step_cost_new(double row_cost) { return new StepCost(row_cost); }
void tandem_step_cost_free(StepCost* cost) { delete cost; }
void tandem_step_cost_observe(StepCost* cost, const StepCost::Step* steps, int32_t count) {
  cost->observe(steps, count);
}
void tandem_step_cost_curve(const StepCost* cost, int32_t num_sequences, int64_t context, int32_t count,
                            double* seconds) {
  cost->curve(num_sequences, context, count, seconds);
}
}
