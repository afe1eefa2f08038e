// Drafts a batch: grows one tree per sequence, best guess first over all of them, while the price is right.
//
//   find    where the ending of a node's text occurred before: in the sequence, and in the corpus
//   vote    what followed there, and what the model itself found likely before, are candidates; the learner says how
//           likely each is to be accepted
//   grow    the likeliest candidate of the whole batch enters its tree, and its own children are considered
//   teach   once verified, the candidates of the root and of every accepted node are compared with what came
//
// Called without Python's lock; see tandem_drafting.native for the calls.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <vector>

#include "corpus.h"
#include "learner.h"
#include "recycler.h"
#include "sequence.h"

namespace {

// What one sequence draws on.
struct Sources {
  const Corpus* corpus;      // or null
  const Recycler* recycler;  // or null
  int64_t limit;             // of the corpus, taken once a step
  int32_t own_run;           // of the corpus: what this sequence itself has generated, or -1
};

// How rare a token is: in the sequence, and in the corpus.
int rarity_cell(const Uses::Use& use, int64_t size, const Corpus* corpus, int32_t token) {
  const int64_t distance = size - use.last;
  const int runs = corpus ? corpus->num_runs_with(token) : 0;
  const int often = use.count == 0 ? 0 : use.count == 1 ? 1 : use.count < 4 ? 2 : 3;
  const int far = distance <= 24 ? 0 : distance <= 96 ? 1 : distance <= 320 ? 2 : distance <= 1000 ? 3 : 4;
  const int known = runs == 0 ? 0 : runs <= 2 ? 1 : runs <= 9 ? 2 : runs <= 30 ? 3 : 4;
  return often * 25 + far * 5 + known;
}

// What the model itself found likely after a node's text.
struct Recycled {
  const Recycler::Entry* entries[kRecycledOrders] = {};
  // Of a follower among them, from 1.
  uint8_t rank[kRecycledOrders][Ballot::kMost] = {};

  Recycled(const Recycler* recycler, const Hashes& hashes, uint32_t request, Ballot& ballot) {
    if (!recycler) return;
    for (int o = 0; o < kRecycledOrders; ++o) {
      entries[o] = recycler->find(hashes, o + 1);
      for (int k = 0; entries[o] && k < Recycler::kTokens; ++k) {
        if (!entries[o]->is_visible_to(request, k)) continue;
        const uint8_t whose = ballot.follower(entries[o]->tokens[k]);
        if (whose != Ballot::kNone && !rank[o][whose]) rank[o][whose] = uint8_t(k + 1);
      }
    }
  }
};

// The followers that deserve a closer look, at most kMaxCandidates. Returns how many.
int shortlist(const Ballot& ballot, const Recycled& recycled, uint8_t* chosen) {
  float score[Ballot::kMost] = {};
  float weight = 0;
  for (int c = 0; c < ballot.num_contexts; ++c) {
    const Ballot::Context& context = ballot.contexts[c];
    const bool longest = c == 0 || context.input / kNumLevels != ballot.contexts[c - 1].input / kNumLevels;
    weight = longest ? 1 : weight * .5f;
    const float share = weight / context.total;
    for (int i = 0; i < Ballot::kMost; ++i) score[i] += share * context.counts[i];
  }
  for (int o = 0; o < kRecycledOrders; ++o)
    for (int i = 0; recycled.entries[o] && i < ballot.num_followers; ++i)
      if (recycled.rank[o][i]) score[i] += .3f / recycled.rank[o][i];
  // How many are better: all pairs at once beat sorting.
  const int count = ballot.num_followers;
  int32_t keys[Ballot::kMost], better[Ballot::kMost] = {};
  for (int i = 0; i < Ballot::kMost; ++i) keys[i] = i < count ? int32_t(score[i] * (1 << 24)) << 4 | (15 - i) : -1;
  for (int j = 0; j < count; ++j)
    for (int i = 0; i < Ballot::kMost; ++i) better[i] += keys[j] > keys[i];
  for (int i = 0; i < count; ++i)
    if (better[i] < kMaxCandidates) chosen[better[i]] = uint8_t(i);
  return std::min(count, kMaxCandidates);
}

// Finds the candidates for a node's children and how likely they are.
void vote(Node& node, const Sequence& sequence, const Sources& sources, const Learner& learner) {
  node.voted = true;
  node.num_candidates = 0;
  // What must come from memory is asked for first.
  const History* global = sources.corpus ? &sources.corpus->text : nullptr;
  const History::Counted local_counted = sequence.text.find(node.hashes);
  const History::Counted global_counted = global ? global->find(node.hashes) : History::Counted{};
  Occurrence aligned[kMaxFound];
  const int num_aligned = global ? sequence.alignment.find(node.context, node.num_context, aligned) : 0;
  Ballot ballot;
  ballot.add(kLocal, sequence.text, local_counted, node.local, node.num_local);
  if (global) {
    ballot.add(kGlobal, *global, global_counted, node.global, node.num_global);
    ballot.add(kAligned, global->index, aligned, num_aligned);
  }
  const Recycled recycled(sources.recycler, node.hashes, sequence.number, ballot);
  uint8_t chosen[kMaxCandidates];
  const int kept = shortlist(ballot, recycled, chosen);
  // The likeliest children will be asked about next; memory is slower than what follows here.
  for (int k = 0; k < std::min(kept, 2); ++k) {
    const Hashes hashes = node.hashes_with(ballot.followers[chosen[k]]);
    sequence.text.prefetch(hashes);
    if (global) global->prefetch(hashes);
    if (sources.recycler) sources.recycler->prefetch(hashes);
  }

  const int size = int(sequence.text.index.size());
  float sum = 0;
  for (int k = 0; k < kept; ++k) {
    const int whose = chosen[k];
    Candidate& candidate = node.candidates[k];
    Evidence& evidence = candidate.evidence;
    candidate.token = ballot.followers[whose];
    candidate.child = -1;
    evidence.count = 0;
    for (int c = 0; c < ballot.num_contexts; ++c) {
      const Ballot::Context& context = ballot.contexts[c];
      evidence.add(context.input, count_cell(context.total, context.counts[whose]));
    }
    for (int o = 0; o < kRecycledOrders; ++o)
      if (recycled.entries[o]) {
        const int rank = recycled.rank[o][whose];
        evidence.add(kRecycled + o, rank ? 1 + (rank - 1) * 8 + recycled.entries[o]->classes[rank - 1] : 0);
      }
    const Uses::Use use = sequence.uses.of(candidate.token);
    const int rarity = rarity_cell(use, size, sources.corpus, candidate.token);
    evidence.add(kRarity, rarity);
    const int top_local = ballot.top_of[kLocal][whose], top_global = ballot.top_of[kGlobal][whose],
              top_aligned = ballot.top_of[kAligned][whose];
    evidence.row[0] = uint8_t(top_global * 11 + ballot.top[kGlobal]);
    evidence.row[1] = uint8_t(top_local * 11 + ballot.top[kLocal]);
    evidence.row[2] = uint8_t(std::min(top_aligned, 4) * 5 + std::min<int>(ballot.top[kAligned], 4) +
                              25 * (top_global > top_local ? 0 : top_global == top_local ? 1 : 2));
    evidence.row[3] = uint8_t(rarity);
    candidate.source = top_global > top_local || top_aligned > top_local ? kFromGlobal
                       : top_local == 0                      ? kFromRecycled
                       : use.last < sequence.num_prompt  ? kFromPrompt
                                                         : kFromOutput;
    candidate.mixed = learner.mix(evidence);
    candidate.chance = Learner::squash(candidate.mixed);
    sum += candidate.chance;
  }
  node.num_candidates = kept;
  // At most one of them is right.
  const float scale = sum > .99f ? .99f / sum : 1;
  for (int k = 0; k < kept; ++k) {
    Candidate& candidate = node.candidates[k];
    candidate.logit =
        scale < 1 ? Learner::stretch(std::clamp(candidate.chance * scale, .0005f, .9995f)) : candidate.mixed;
    candidate.chance = learner.acceptance(candidate.logit, node.depth + 1, sequence.regime);
  }
  // The likeliest first; they are few, and nearly so already.
  for (int k = 1; k < kept; ++k)
    for (int at = k; at > 0 && node.candidates[at - 1].chance < node.candidates[at].chance; --at)
      std::swap(node.candidates[at - 1], node.candidates[at]);
}

// Leaves out what the sequence itself has generated: that speaks for itself already.
int without_own(const Sources& sources, Occurrence* found, int count) {
  if (sources.own_run < 0) return count;
  const auto own = [&](const Occurrence& one) { return sources.corpus->run_at(one.position) == sources.own_run; };
  return int(std::remove_if(found, found + count, own) - found);
}

// The root of a sequence's tree. What looking its text up will read is asked for, so that it comes from memory while
// other sequences' roots are set.
void set_root(Sequence& sequence, const Sources& sources, int max_guesses) {
  if (int(sequence.nodes.size()) <= max_guesses) sequence.nodes.resize(max_guesses + 1);
  sequence.num_nodes = 1;
  Node& root = sequence.nodes[0];
  const TextIndex& text = sequence.text.index;
  root.num_context = int(std::min<int64_t>(text.size(), TextIndex::kMaxLength));
  std::memcpy(root.context, text.data() + text.size() - root.num_context, root.num_context * 4);
  root.token = root.context[root.num_context - 1];
  root.hashes = Hashes(root.context + root.num_context, root.num_context);
  root.parent = root.candidate = -1;
  root.depth = 0;
  root.product = root.reach = root.worth = 1;
  sequence.text.prefetch(root.hashes);
  if (sources.corpus) sources.corpus->text.prefetch(root.hashes);
}

void expand_root(Sequence& sequence, const Sources& sources, const Learner& learner) {
  Node& root = sequence.nodes[0];
  const TextIndex& text = sequence.text.index;
  root.num_local = text.find(root.hashes, root.context, root.num_context, text.size(), kMaxFound, root.local);
  root.num_global = 0;
  if (sources.corpus) {
    const TextIndex& index = sources.corpus->text.index;
    root.num_global =
        index.find(root.hashes, root.context, root.num_context, sources.limit, kMaxFound, root.global);
    root.num_global = without_own(sources, root.global, root.num_global);
    sequence.alignment.update(*sources.corpus, root.global, root.num_global, sources.limit, sources.own_run,
                              text.size());
  }
  sequence.regime = Learner::regime_of(sequence.tokens_per_step);
  vote(root, sequence, sources, learner);
}

// Occurrences that go on with the node's token, and where there is none, others that end like it.
int advance(const TextIndex& index, const Occurrence* from, int count, const Node& node, int64_t limit,
            Occurrence* found) {
  const int going_on = index.advance(from, count, node.token, limit, found);
  return going_on ? going_on : index.find(node.hashes, node.context, node.num_context, limit, kMaxFound / 2, found);
}

Node& add_child(Sequence& sequence, int parent_at, int candidate_at, float reach, float worth) {
  const int at = sequence.num_nodes++;
  Node& parent = sequence.nodes[parent_at];
  Node& node = sequence.nodes[at];
  Candidate& candidate = parent.candidates[candidate_at];
  candidate.child = int16_t(at);
  node.token = candidate.token;
  node.parent = int16_t(parent_at);
  node.candidate = int16_t(candidate_at);
  node.depth = int16_t(parent.depth + 1);
  node.product = parent.product * candidate.chance;
  node.reach = reach;
  node.worth = worth;
  node.voted = false;
  node.num_candidates = 0;
  const int kept = std::min(parent.num_context, TextIndex::kMaxLength - 1);
  std::memcpy(node.context, parent.context + parent.num_context - kept, kept * 4);
  node.context[kept] = node.token;
  node.num_context = kept + 1;
  node.hashes = parent.hashes_with(node.token);
  return node;
}

void expand(Sequence& sequence, int at, const Sources& sources, const Learner& learner) {
  Node& node = sequence.nodes[at];
  const Node& parent = sequence.nodes[node.parent];
  node.num_local =
      advance(sequence.text.index, parent.local, parent.num_local, node, sequence.text.index.size(), node.local);
  node.num_global = 0;
  if (sources.corpus) {
    const TextIndex& index = sources.corpus->text.index;
    const int found = advance(index, parent.global, parent.num_global, node, sources.limit, node.global);
    node.num_global = without_own(sources, node.global, found);
  }
  vote(node, sequence, sources, learner);
}

// How likely a node's best child is once the node is, before anything is known of it: what is copied goes on being so.
float onward(const Candidate& taken) { return .55f + .4f * taken.chance; }

// Guesses less likely than this are not worth the drafter's own time, however cheap a row.
constexpr float kLeastWorth = .004f;

// For each number of guesses, the least seconds that one more takes when any number more may be added: where steps take
// longer in leaps, a leap is shared by those who take it together.
void cheapest_onward(const double* seconds, int count, std::vector<double>& prices) {
  static thread_local std::vector<int> hull;  // lower convex hull of the points from here on, the nearest last
  hull.clear();
  prices.resize(count);
  for (int at = count - 1; at >= 0; --at) {
    const auto slope = [&](int from, int to) { return (seconds[to] - seconds[from]) / (to - from); };
    while (hull.size() >= 2 && slope(at, hull.back()) >= slope(at, hull[hull.size() - 2])) hull.pop_back();
    prices[at] = hull.empty() ? 0 : slope(at, hull.back());
    hull.push_back(at);
  }
}

// Less than this, as a multiple of the tokens per second without guesses, is not worth the doubt about the times.
constexpr double kLeastGain = 1.03;

struct Entry {
  // What comes first is chosen by the product of chances along the path, which tells neighbours apart better than the
  // probability that was learnt from such products; `worth` prices it.
  float order, reach, worth;
  int32_t sequence;
  int16_t node, candidate;  // candidate -1: the node is to be expanded

  // Ties fall to the earlier sequence, then to the earlier node and candidate.
  bool operator<(const Entry& other) const {
    if (order != other.order) return order < other.order;
    if (sequence != other.sequence) return sequence > other.sequence;
    if (node != other.node) return node > other.node;
    return candidate > other.candidate;
  }
};

// Keeps what the model found likely at the places of the emitted tokens, which follow the text.
void recycle(const Sequence& sequence, Recycler& recycler, const int32_t* emitted, int count,
             const Likeliest* likeliest) {
  const TextIndex& text = sequence.text.index;
  constexpr int kKept = Hashes::kOrders;
  int32_t last[kKept + kMaxNodes];
  int size = int(std::min<int64_t>(text.size(), kKept));
  std::memcpy(last, text.data() + text.size() - size, size * 4);
  for (int i = 0; i < std::min(count, kMaxNodes); ++i) {
    recycler.put(Hashes(last + size, size), likeliest[i], sequence.number);
    last[size++] = emitted[i];
  }
}

// Compares what was considered with what the step emitted.
void teach(Sequence& sequence, Learner& learner, const int32_t* emitted, int count) {
  if (sequence.num_nodes == 0) return;
  int at = 0;
  uint64_t accepted = 0;
  for (int i = 0; i < count && at >= 0; ++i) {
    const Node& node = sequence.nodes[at];
    accepted |= uint64_t(1) << at;
    if (!node.voted) break;
    at = -1;
    const float rate = learner.next_rate();
    for (int k = 0; k < node.num_candidates; ++k) {
      const Candidate& candidate = node.candidates[k];
      const bool right = candidate.token == emitted[i];
      learner.teach(candidate.evidence, candidate.mixed, right, rate);
      learner.teach_acceptance(candidate.logit, node.depth + 1, sequence.regime, right);
      // Deeper ones count only where their parent was accepted, which would make them look likelier than they were.
      if (candidate.child < 0 && node.depth == 0)
        learner.teach_reached(candidate.chance, 1, sequence.regime, right);
      if (candidate.child >= 0 && right) at = candidate.child;
    }
  }
  if (at >= 0) accepted |= uint64_t(1) << at;
  for (int n = 1; n < sequence.num_nodes; ++n) {
    const Node& node = sequence.nodes[n];
    learner.teach_reached(node.product, node.depth, sequence.regime, accepted >> n & 1);
    learner.teach_sent(node.reach, accepted >> n & 1);
    learner.count(node.worth, accepted >> n & 1);
  }
  sequence.num_nodes = 0;
  sequence.tokens_per_step += .3f * (count - sequence.tokens_per_step);
  learner.tokens_per_step += .1f * (count - learner.tokens_per_step);
}

}  // namespace

extern "C" {

// What one sequence draws on; tandem_drafting.native declares the same fields in the same order.
struct TandemDraft {
  Sequence* sequence;  // "text" there; null: draft nothing
  const Corpus* corpus;
  Recycler* recycler;
  Learner* learner;
  int32_t max_chain;  // guesses of a draft in one line; 0: a tree
};

// What is wanted of a sequence in this step, and what came of it.
struct TandemDraftStep {
  int32_t room;     // deepest guess that could still be emitted; 0: draft nothing
  int32_t own_run;  // of the corpus: what this sequence itself has generated, or -1
  // Out: guesses, and whether nothing came near to being worth it.
  int32_t num_guesses, is_vain;
};

// Parents go before children; a parent is a node's number, the root's is 0, the first guess' 1.
struct TandemGuess {
  int32_t token, parent, source;
  float reach;  // probability that verification gets here
};

// Adds guesses, the likeliest first, as long as some number of them may still raise the tokens per second, and keeps as
// many as raise them most.
//
// At most max_guesses per sequence. `expected` is how many tokens the step yields without any; seconds[q] is what it
// takes with q guesses, for q = 0 .. num_seconds - 1, never less for more; there are no more guesses in all than that.
// own_seconds is what drafting for one sequence takes, in the same unit. The guesses are written one sequence's after
// the other's. Returns how many times as many tokens per second the step is to give as without guesses.
double tandem_draft(TandemDraft* const* drafts, TandemDraftStep* steps, int32_t count, int32_t max_guesses,
                    double expected, const double* seconds, int32_t num_seconds, double own_seconds,
                    TandemGuess* guesses) {
  static thread_local std::vector<Sources> sources;
  static thread_local std::vector<Entry> heap;
  static thread_local std::vector<double> prices;
  static thread_local std::vector<int32_t> added;  // whose guess, in order
  const int limit = std::min(max_guesses, kMaxNodes - 1);
  sources.resize(count);
  heap.clear();
  added.clear();
  auto push = [&](const Entry& entry) {
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end());
  };
  // The candidate of a node that is next in turn.
  auto offer = [&](int n, int at, int k) {
    const Node& node = drafts[n]->sequence->nodes[at];
    if (k == node.num_candidates) return;
    const Sequence& sequence = *drafts[n]->sequence;
    const Learner& learner = *drafts[n]->learner;
    const float product = node.product * node.candidates[k].chance;
    const float reach = std::min(node.reach, learner.reached(product, node.depth + 1, sequence.regime));
    const float worth = std::min(node.worth, learner.accepted_of_sent(reach));
    if (worth >= kLeastWorth) push({product, reach, worth, n, int16_t(at), int16_t(k)});
  };
  for (int n = 0; n < count; ++n) {
    const TandemDraft& draft = *drafts[n];
    TandemDraftStep& step = steps[n];
    step.num_guesses = step.is_vain = 0;
    sources[n] = {draft.corpus, draft.recycler, draft.corpus ? draft.corpus->text.index.size() : 0, step.own_run};
    if (!draft.sequence) continue;
    draft.sequence->num_nodes = 0;
    if (step.room < 1 || draft.sequence->text.index.size() == 0) continue;
    // A sequence does as the others do until it has shown how it does.
    if (draft.sequence->tokens_per_step == 0) draft.sequence->tokens_per_step = draft.learner->tokens_per_step;
    set_root(*draft.sequence, sources[n], limit);
  }
  for (int n = 0; n < count; ++n) {
    Sequence* sequence = drafts[n]->sequence;
    if (!sequence || sequence->num_nodes == 0) continue;
    expand_root(*sequence, sources[n], *drafts[n]->learner);
    offer(n, 0, 0);
  }
  cheapest_onward(seconds, num_seconds, prices);
  const double before = expected / seconds[0];  // tokens per second
  double best = before;
  int rows = 0, best_rows = 0;
  while (!heap.empty() && rows + 1 < num_seconds) {
    const Entry entry = heap.front();
    // Those that come are hardly likelier.
    if (entry.worth <= best * prices[rows]) break;
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    const TandemDraft& draft = *drafts[entry.sequence];
    Sequence& sequence = *draft.sequence;
    const int num_guesses = sequence.num_nodes - 1;
    if (num_guesses == limit) continue;
    // In one line: not deeper than allowed, and only the last node has a child.
    if (draft.max_chain && (num_guesses == draft.max_chain || entry.node != num_guesses)) continue;
    if (entry.candidate < 0) {
      expand(sequence, entry.node, sources[entry.sequence], *draft.learner);
      offer(entry.sequence, entry.node, 0);
      continue;
    }
    offer(entry.sequence, entry.node, entry.candidate + 1);
    const int at = sequence.num_nodes;
    const Node& node = add_child(sequence, entry.node, entry.candidate, entry.reach, entry.worth);
    const Candidate& taken = sequence.nodes[node.parent].candidates[node.candidate];
    added.push_back(entry.sequence);
    expected += entry.worth;
    ++rows;
    if (expected > best * seconds[rows]) best = expected / seconds[rows], best_rows = rows;
    const float worth = node.worth * onward(taken);
    if (node.depth < steps[entry.sequence].room && num_guesses + 1 < limit && worth >= kLeastWorth)
      push({node.product * onward(taken), node.reach, worth, entry.sequence, int16_t(at), -1});
  }
  if (best < kLeastGain * before) best = before, best_rows = 0;
  for (; rows > best_rows; --rows) {
    Sequence& sequence = *drafts[added[rows - 1]]->sequence;
    const Node& node = sequence.nodes[--sequence.num_nodes];
    sequence.nodes[node.parent].candidates[node.candidate].child = -1;
  }
  // A guess a fifth as likely as would pay for itself and for looking is near.
  const double near = .2 * best * (num_seconds > 1 ? prices[0] + own_seconds : 0);
  for (int n = 0; n < count; ++n) {
    const Sequence* sequence = drafts[n]->sequence;
    if (!sequence || sequence->num_nodes == 0) continue;
    const Node& root = sequence->nodes[0];
    steps[n].is_vain = root.num_candidates == 0 || root.candidates[0].chance < near;
    steps[n].num_guesses = sequence->num_nodes - 1;
    for (int at = 1; at < sequence->num_nodes; ++at) {
      const Node& node = sequence->nodes[at];
      const Candidate& taken = sequence->nodes[node.parent].candidates[node.candidate];
      *guesses++ = {node.token, node.parent, taken.source, node.worth};
    }
  }
  return best / before;
}

// What a step emitted for each sequence, the token after the accepted guesses included: compared with its draft, and
// appended to its text. Sequence n's tokens end at ends[n]. `likeliest`, or null: at the place of each of the tokens.
void tandem_draft_learn(TandemDraft* const* drafts, int32_t count, const int32_t* tokens, const int32_t* ends,
                        const Likeliest* likeliest) {
  for (int n = 0, begin = 0; n < count; begin = ends[n++]) {
    Sequence& sequence = *drafts[n]->sequence;
    const int32_t* emitted = tokens + begin;
    const int num_emitted = ends[n] - begin;
    if (likeliest && drafts[n]->recycler)
      recycle(sequence, *drafts[n]->recycler, emitted, num_emitted, likeliest + begin);
    teach(sequence, *drafts[n]->learner, emitted, num_emitted);
    sequence.extend(emitted, num_emitted);
  }
}

Sequence* tandem_draft_sequence_new(int64_t num_prompt) {
  static std::atomic<uint32_t> count{0};
  Sequence* sequence = new Sequence;
  sequence->number = ++count;
  sequence->num_prompt = num_prompt;
  return sequence;
}
void tandem_draft_sequence_free(Sequence* sequence) { delete sequence; }
void tandem_draft_sequence_extend(Sequence* sequence, const int32_t* tokens, int64_t count) {
  sequence->extend(tokens, count);
}
int64_t tandem_draft_sequence_bytes(const Sequence* sequence) {
  return sequence->text.bytes() + sequence->uses.bytes() + int64_t(sequence->nodes.capacity() * sizeof(Node));
}

Corpus* tandem_draft_corpus_new(int64_t capacity, int32_t vocab_size) { return new Corpus(capacity, vocab_size); }
void tandem_draft_corpus_free(Corpus* corpus) { delete corpus; }
int32_t tandem_draft_corpus_add(Corpus* corpus, int32_t run, const int32_t* tokens, int64_t count,
                                int64_t num_context) {
  return corpus->add(run, tokens, count, num_context);
}
int64_t tandem_draft_corpus_size(const Corpus* corpus) { return corpus->text.index.size(); }
int64_t tandem_draft_corpus_bytes(const Corpus* corpus) { return corpus->bytes(); }

Learner* tandem_draft_learner_new() { return new Learner; }
void tandem_draft_learner_free(Learner* learner) { delete learner; }
int64_t tandem_draft_learner_bytes(const Learner* learner) { return learner->table_bytes(); }
void tandem_draft_learner_read(const Learner* learner, void* out) { std::memcpy(out, learner, learner->table_bytes()); }
// Whether the bytes hold tables; if not, nothing has changed. What was counted here goes on being counted.
int32_t tandem_draft_learner_write(Learner* learner, const void* from) {
  Learner read = *learner;
  std::memcpy(static_cast<void*>(&read), from, read.table_bytes());
  if (!read.is_sane()) return false;
  *learner = read;
  return true;
}
void tandem_draft_learner_tally(const Learner* learner, Learner::Tally* out) {
  std::memcpy(out, learner->tally, sizeof(learner->tally));
}
int64_t tandem_draft_learner_num_taught(const Learner* learner) { return learner->num_nodes_taught(); }

// The likeliest tokens of some rows of logits [.., vocab_size].
void tandem_draft_likeliest(const float* logits, int64_t vocab_size, const int32_t* rows, int32_t count,
                            Likeliest* likeliest) {
  for (int i = 0; i < count; ++i) likeliest[i] = Likeliest::of(logits + rows[i] * vocab_size, vocab_size);
}

Recycler* tandem_draft_recycler_new() { return new Recycler; }
void tandem_draft_recycler_free(Recycler* recycler) { delete recycler; }
int64_t tandem_draft_recycler_bytes(const Recycler* recycler) { return recycler->bytes(); }
}
