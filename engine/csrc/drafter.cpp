// Drafts a batch: grows one tree per sequence, best guess first over all of them, while the price is right.
//
//   find    where the ending of a node's text occurred before: in the sequence, and in the corpus
//   vote    what followed there, and what the model itself found likely before, are candidates; the learner says how
//           likely each is to be accepted
//   grow    the likeliest candidate of the whole batch enters its tree, and its own children are considered
//   teach   once verified, the candidates of the root and of every accepted node are compared with what came
//
// Called without Python's lock; see tandem_engine.drafts.native for the calls.

#include <algorithm>
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

constexpr uint8_t kLevelOf[TextIndex::kMaxLength + 1] = {0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8,
                                                         8, 8, 8, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 9, 9};

// Followers of a node's matches, with counts by place and level.
class Followers {
 public:
  static constexpr int kMost = 16;

  int count = 0;
  int32_t tokens[kMost] = {};
  uint16_t counts[kNumExact][kMost] = {};
  uint32_t totals[kNumExact] = {};
  // Levels at which a follower, or anything, occurs, as bits.
  uint16_t levels[kNumPlaces][kMost] = {};
  uint16_t all_levels[kNumPlaces] = {};

  // Slot of a token, or -1 when there are too many.
  int slot(int32_t token) {
    // All at once: which one it is cannot be predicted.
    uint32_t same = 0;
    for (int i = 0; i < kMost; ++i) same |= uint32_t(tokens[i] == token) << i;
    same &= (1u << count) - 1;
    if (same) return __builtin_ctz(same);
    if (count == kMost) return -1;
    tokens[count] = token;
    return count++;
  }

  // Matches of some length, which are matches of all shorter lengths too, down to level `last`.
  void add(Place place, int last, const TextIndex& index, const Occurrence* found, int number) {
    for (int i = 0; i < number; ++i) add(place, kLevelOf[found[i].length], slot(index.token(found[i].position + 1)), 1);
    for (int at = (place + 1) * kNumLevels - 2; at >= place * kNumLevels + last; --at) {
      totals[at] += totals[at + 1];
      for (int i = 0; i < kMost; ++i) counts[at][i] += counts[at + 1][i];
    }
  }

  // Matches of exactly so many tokens or more, counted before.
  template <int Kept>
  void add(Place place, int length, const Successors<Kept>& successors, const Node& node) {
    if (node.num_context < length) return;
    const auto* entry = successors.find(hash_of(node.context + node.num_context - length, length));
    if (!entry) return;
    const int level = kLevelOf[length];
    for (int k = 0; k < Kept; ++k)
      if (entry->counts[k]) add(place, level, slot(entry->tokens[k]), entry->counts[k]);
    // Followers that were not kept count too.
    uint32_t& total = totals[place * kNumLevels + level];
    total = std::max(total, entry->total);
  }

  void add(Place place, const History& text, const Node& node, const Occurrence* found, int number) {
    add(place, kLevelOf[TextIndex::kOrder], text.index, found, number);
    add(place, 3, text.after_three, node);
    add(place, 2, text.after_two, node);
    add(place, 1, text.after_one, node);
  }

  // One more than the longest level at which anything, or a slot's token, occurs; 0: none.
  int top(Place place) const { return 32 - __builtin_clz(all_levels[place] << 1 | 1) - 1; }
  int top(Place place, int slot) const { return 32 - __builtin_clz(levels[place][slot] << 1 | 1) - 1; }

 private:
  void add(Place place, int level, int slot, uint16_t number) {
    const int at = place * kNumLevels + level;
    totals[at] += number;
    all_levels[place] |= uint16_t(1 << level);
    if (slot < 0) return;
    counts[at][slot] += number;
    levels[place][slot] |= uint16_t(1 << level);
  }
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

void vote(Node& node, const Sequence& sequence, const Sources& sources, const Learner& learner) {
  node.voted = true;
  node.num_candidates = 0;
  Followers followers;
  followers.add(kLocal, sequence.text, node, node.local, node.num_local);
  if (sources.corpus) {
    const History& text = sources.corpus->text;
    followers.add(kGlobal, text, node, node.global, node.num_global);
    Occurrence aligned[kMaxFound];
    const int found = sequence.alignment.find(node.context, node.num_context, sources.limit, sources.own_run,
                                              kMaxFound, aligned);
    followers.add(kAligned, 0, text.index, aligned, found);
  }
  const Recycler::Entry* recycled[kRecycledOrders] = {};
  // Of a recycled token, from 1.
  uint8_t rank[kRecycledOrders][Followers::kMost] = {};
  if (sources.recycler)
    for (int o = 0; o < kRecycledOrders; ++o) {
      recycled[o] = sources.recycler->find(node.context, node.num_context, o + 1);
      if (!recycled[o]) continue;
      for (int k = 0; k < Recycler::kTokens; ++k) {
        const int slot = followers.slot(recycled[o]->tokens[k]);
        if (slot >= 0 && !rank[o][slot]) rank[o][slot] = uint8_t(k + 1);
      }
    }
  if (followers.count == 0) return;

  // The longest levels that differ, three of each place, speak.
  uint8_t speaking[kNumPlaces * 3];
  int num_speaking = 0;
  float score[Followers::kMost] = {};
  for (int place = 0; place < kNumPlaces; ++place) {
    uint32_t before = 0;
    float weight = 1;
    for (int level = kNumLevels - 1, chosen = 0; level >= 0 && chosen < 3; --level) {
      const int at = place * kNumLevels + level;
      const uint32_t total = followers.totals[at];
      // A context that a full table left out may count less than a longer one.
      if (total <= before) continue;
      before = total;
      speaking[num_speaking++] = uint8_t(at);
      const float share = weight / total;
      for (int i = 0; i < Followers::kMost; ++i) score[i] += share * followers.counts[at][i];
      weight *= .5f;
      ++chosen;
    }
  }
  for (int o = 0; o < kRecycledOrders; ++o)
    for (int i = 0; i < followers.count; ++i)
      if (rank[o][i]) score[i] += .3f / rank[o][i];
  int order[Followers::kMost];
  for (int i = 0; i < followers.count; ++i) order[i] = i;
  const int kept = std::min(kMaxCandidates, followers.count);
  std::partial_sort(order, order + kept, order + followers.count,
                    [&](int a, int b) { return score[a] != score[b] ? score[a] > score[b] : a < b; });

  const int size = int(sequence.text.index.size());
  const int top_local = followers.top(kLocal), top_global = followers.top(kGlobal),
            top_aligned = followers.top(kAligned);
  float sum = 0;
  for (int k = 0; k < kept; ++k) {
    const int slot = order[k];
    Candidate& candidate = node.candidates[k];
    Evidence& evidence = candidate.evidence;
    candidate.token = followers.tokens[slot];
    candidate.child = -1;
    evidence.count = 0;
    for (int i = 0; i < num_speaking; ++i) {
      const int at = speaking[i];
      evidence.add(at, count_cell(int(followers.totals[at]), followers.counts[at][slot]));
    }
    for (int o = 0; o < kRecycledOrders; ++o)
      if (recycled[o]) {
        const int r = rank[o][slot];
        evidence.add(kRecycled + o, r ? 1 + (r - 1) * 8 + recycled[o]->classes[r - 1] : 0);
      }
    const Uses::Use use = sequence.uses.of(candidate.token);
    const int rarity = rarity_cell(use, size, sources.corpus, candidate.token);
    evidence.add(kRarity, rarity);
    const int local = followers.top(kLocal, slot), global = followers.top(kGlobal, slot),
              aligned = followers.top(kAligned, slot);
    evidence.row[0] = uint8_t(global * 11 + top_global);
    evidence.row[1] = uint8_t(local * 11 + top_local);
    evidence.row[2] = uint8_t(std::min(aligned, 4) * 5 + std::min(top_aligned, 4) +
                              25 * (global > local ? 0 : global == local ? 1 : 2));
    evidence.row[3] = uint8_t(rarity);
    candidate.source = global > local || aligned > local ? kFromGlobal
                       : local == 0                      ? kFromRecycled
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
    candidate.chance = learner.acceptance(candidate.logit, node.depth + 1, sequence.tokens_per_step);
  }
}

// Leaves out what the sequence itself has generated: that speaks for itself already.
int without_own(const Sources& sources, Occurrence* found, int count) {
  const auto own = [&](const Occurrence& one) { return sources.corpus->run_at(one.position) == sources.own_run; };
  return int(std::remove_if(found, found + count, own) - found);
}

void plant(Sequence& sequence, const Sources& sources) {
  if (sequence.nodes.empty()) sequence.nodes.resize(kMaxNodes);
  sequence.num_nodes = 1;
  Node& root = sequence.nodes[0];
  const TextIndex& text = sequence.text.index;
  const int64_t size = text.size();
  root.num_context = int(std::min<int64_t>(size, TextIndex::kMaxLength));
  std::memcpy(root.context, text.data() + size - root.num_context, root.num_context * 4);
  root.token = root.context[root.num_context - 1];
  root.parent = root.candidate = -1;
  root.depth = 0;
  root.reach = 1;
  root.num_local = text.find(root.context, root.num_context, size, kMaxFound, root.local);
  root.num_global = 0;
  if (sources.corpus) {
    const TextIndex& index = sources.corpus->text.index;
    root.num_global = index.find(root.context, root.num_context, sources.limit, kMaxFound, root.global);
    root.num_global = without_own(sources, root.global, root.num_global);
    sequence.alignment.update(*sources.corpus, root.global, root.num_global, size);
  }
}

// Occurrences that go on with the node's token, and where there is none, others that end like it.
int advance(const TextIndex& index, const Occurrence* from, int count, const Node& node, int64_t limit,
            Occurrence* found) {
  const int going_on = index.advance(from, count, node.token, limit, found);
  return going_on ? going_on : index.find(node.context, node.num_context, limit, kMaxFound / 2, found);
}

Node& add_child(Sequence& sequence, int parent_at, int candidate_at, float reach) {
  const int at = sequence.num_nodes++;
  Node& parent = sequence.nodes[parent_at];
  Node& node = sequence.nodes[at];
  Candidate& candidate = parent.candidates[candidate_at];
  candidate.child = int16_t(at);
  node.token = candidate.token;
  node.parent = int16_t(parent_at);
  node.candidate = int16_t(candidate_at);
  node.depth = int16_t(parent.depth + 1);
  node.reach = reach;
  node.voted = false;
  node.num_candidates = 0;
  const int kept = std::min(parent.num_context, TextIndex::kMaxLength - 1);
  std::memcpy(node.context, parent.context + parent.num_context - kept, kept * 4);
  node.context[kept] = node.token;
  node.num_context = kept + 1;
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

// A node to be expanded counts as likely as its best child is, on average.
constexpr float kOnward = .6f;
// Guesses less likely than this are not worth the drafter's own time, however cheap a row.
constexpr float kLeastReach = .004f;

struct Entry {
  float reach;
  int32_t sequence;
  int16_t node, candidate;  // candidate -1: the node is to be expanded

  // Ties fall to the earlier sequence, then to the earlier node and candidate.
  bool operator<(const Entry& other) const {
    if (reach != other.reach) return reach < other.reach;
    if (sequence != other.sequence) return sequence > other.sequence;
    if (node != other.node) return node > other.node;
    return candidate > other.candidate;
  }
};

}  // namespace

extern "C" {

// One sequence of a batch; tandem_engine.drafts.native declares the same fields in the same order.
struct TandemDraft {
  Sequence* sequence;  // "text" there; null: draft nothing
  const Corpus* corpus;
  const Recycler* recycler;
  Learner* learner;
  int32_t room;     // deepest guess that could still be emitted; 0: draft nothing
  int32_t own_run;  // of the corpus, or -1
  int32_t max_chain;  // guesses of a draft in one line; 0: a tree
  // Out: the guesses, parents before children; a parent is a node's number, the root's is 0, the first guess' 1.
  int32_t num_guesses;
  int32_t tokens[kMaxNodes - 1], parents[kMaxNodes - 1], sources[kMaxNodes - 1];
  float reach[kMaxNodes - 1];
};

// At most max_guesses per sequence. seconds[q] is what a step takes with q guesses, for q = 0 .. num_seconds - 1; there
// are no more guesses in all than that.
void tandem_draft(TandemDraft* const* drafts, int32_t count, int32_t max_guesses, const double* seconds,
                  int32_t num_seconds) {
  static thread_local std::vector<Sources> sources;
  static thread_local std::vector<Entry> heap;
  sources.resize(count);
  heap.clear();
  auto push = [&](const Entry& entry) {
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end());
  };
  auto offer = [&](int n, int at) {
    const Node& node = drafts[n]->sequence->nodes[at];
    for (int k = 0; k < node.num_candidates; ++k) {
      const float reach = node.reach * node.candidates[k].chance;
      if (reach >= kLeastReach) push({reach, n, int16_t(at), int16_t(k)});
    }
  };
  for (int n = 0; n < count; ++n) {
    TandemDraft& draft = *drafts[n];
    draft.num_guesses = 0;
    sources[n] = {draft.corpus, draft.recycler, draft.corpus ? draft.corpus->text.index.size() : 0, draft.own_run};
    if (!draft.sequence) continue;
    draft.sequence->num_nodes = 0;
    if (draft.room < 1 || draft.sequence->text.index.size() == 0) continue;
    plant(*draft.sequence, sources[n]);
    vote(draft.sequence->nodes[0], *draft.sequence, sources[n], *draft.learner);
    offer(n, 0);
  }
  const int limit = std::min(max_guesses, kMaxNodes - 1);
  double expected = count;  // tokens of the step
  int rows = 0;
  while (!heap.empty() && rows + 1 < num_seconds) {
    const Entry entry = heap.front();
    // (expected + reach) / seconds[rows + 1] must exceed expected / seconds[rows].
    if (entry.reach * seconds[rows] < expected * (seconds[rows + 1] - seconds[rows])) break;
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    TandemDraft& draft = *drafts[entry.sequence];
    Sequence& sequence = *draft.sequence;
    if (draft.num_guesses == limit) continue;
    // In one line: not deeper than allowed, and only the last node has a child.
    if (draft.max_chain && (draft.num_guesses == draft.max_chain || entry.node != draft.num_guesses)) continue;
    if (entry.candidate < 0) {
      expand(sequence, entry.node, sources[entry.sequence], *draft.learner);
      offer(entry.sequence, entry.node);
      continue;
    }
    const int at = sequence.num_nodes;
    const Node& node = add_child(sequence, entry.node, entry.candidate, entry.reach);
    const int guess = draft.num_guesses++;
    draft.tokens[guess] = node.token;
    draft.parents[guess] = node.parent;
    draft.sources[guess] = sequence.nodes[node.parent].candidates[node.candidate].source;
    draft.reach[guess] = node.reach;
    expected += entry.reach;
    ++rows;
    if (node.depth < draft.room && draft.num_guesses < limit && kOnward * entry.reach >= kLeastReach)
      push({kOnward * entry.reach, entry.sequence, int16_t(at), -1});
  }
}

// What a sequence's step emitted, the token after the accepted guesses included.
void tandem_draft_teach(Sequence* sequence, Learner* learner, const int32_t* emitted, int32_t count) {
  if (sequence->num_nodes == 0) return;
  int at = 0;
  for (int i = 0; i < count && at >= 0; ++i) {
    const Node& node = sequence->nodes[at];
    if (!node.voted) break;
    at = -1;
    const float rate = learner->next_rate();
    for (int k = 0; k < node.num_candidates; ++k) {
      const Candidate& candidate = node.candidates[k];
      const bool right = candidate.token == emitted[i];
      learner->teach(candidate.evidence, candidate.mixed, right, rate);
      if (candidate.child < 0) continue;
      learner->teach_acceptance(candidate.logit, node.depth + 1, sequence->tokens_per_step, right);
      if (right) at = candidate.child;
    }
  }
  sequence->num_nodes = 0;
  sequence->tokens_per_step += .15f * (count - sequence->tokens_per_step);
}

Sequence* tandem_draft_sequence_new(int64_t num_prompt) {
  Sequence* sequence = new Sequence;
  sequence->num_prompt = num_prompt;
  return sequence;
}
void tandem_draft_sequence_free(Sequence* sequence) { delete sequence; }
void tandem_draft_sequence_extend(Sequence* sequence, const int32_t* tokens, int64_t count) {
  for (int64_t i = 0; i < count; ++i) sequence->append(tokens[i]);
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
int64_t tandem_draft_learner_bytes() { return sizeof(Learner); }
void tandem_draft_learner_read(const Learner* learner, void* out) { std::memcpy(out, learner, sizeof(Learner)); }
void tandem_draft_learner_write(Learner* learner, const void* from) { std::memcpy((void*)learner, from, sizeof(Learner)); }

Recycler* tandem_draft_recycler_new() { return new Recycler; }
void tandem_draft_recycler_free(Recycler* recycler) { delete recycler; }
void tandem_draft_recycler_put(Recycler* recycler, const int32_t* context, int64_t count, const int32_t* tokens,
                               const float* probabilities) {
  recycler->put(context, count, tokens, probabilities);
}
int64_t tandem_draft_recycler_bytes(const Recycler* recycler) { return recycler->bytes(); }
}
