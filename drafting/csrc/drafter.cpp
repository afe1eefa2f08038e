// Drafts a batch: grows one tree of guesses per sequence, the most probable guess of the whole batch first.
//
//   find     match the end of a node's context in the sequence and in the corpus
//   score    the tokens that followed, and likely tokens of earlier logits, are candidates; the acceptance model predicts
//            their probabilities
//   grow     the most probable candidate of the batch enters its tree, and its own children are scored
//   update   after verification, the candidates of the root and of every accepted node update the model
//
// Runs without the GIL; tandem_drafting.native declares the same calls.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "scoring.h"

namespace {

// Drops matches in the sequence's own output, which the sequence's index covers already.
int without_own(const Sources& sources, Match* found, int count) {
  if (sources.own_run < 0) return count;
  const auto own = [&](const Match& one) { return sources.corpus->run_at(one.position) == sources.own_run; };
  return int(std::remove_if(found, found + count, own) - found);
}

// The root of a sequence's tree. Prefetches its lookups, so that memory latency overlaps with other sequences' roots.
void set_root(SequenceIndex& sequence, const Sources& sources, int max_guesses) {
  if (int(sequence.nodes.size()) <= max_guesses) sequence.nodes.resize(max_guesses + 1);
  sequence.num_nodes = 1;
  Node& root = sequence.nodes[0];
  const MatchIndex& tokens = sequence.index.matches;
  root.num_context = int(std::min<int64_t>(tokens.size(), MatchIndex::kMaxLength));
  std::memcpy(root.context, tokens.data() + tokens.size() - root.num_context, root.num_context * 4);
  root.token = root.context[root.num_context - 1];
  root.hashes = Hashes(root.context + root.num_context, root.num_context);
  root.parent = root.candidate = -1;
  root.depth = 0;
  root.probability = 1;
  sequence.index.prefetch(root.hashes);
  if (sources.corpus) sources.corpus->index.prefetch(root.hashes);
}

void expand_root(SequenceIndex& sequence, const Sources& sources, const AcceptanceModel& model) {
  Node& root = sequence.nodes[0];
  const MatchIndex& tokens = sequence.index.matches;
  root.num_local = tokens.find(root.hashes, root.context, root.num_context, tokens.size(), kMaxFound, root.local);
  root.num_global = 0;
  if (sources.corpus) {
    root.num_global = sources.corpus->index.matches.find(root.hashes, root.context, root.num_context, sources.limit,
                                                         kMaxFound, root.global);
    root.num_global = without_own(sources, root.global, root.num_global);
  }
  score_candidates(root, sequence, sources, model);
}

// Matches that continue with the node's token; where there is none, other matches of its context.
int advance(const MatchIndex& index, const Match* from, int count, const Node& node, int64_t limit, Match* found) {
  const int continued = index.advance(from, count, node.token, limit, found);
  return continued ? continued
                   : index.find(node.hashes, node.context, node.num_context, limit, kMaxFound / 2, found);
}

Node& add_child(SequenceIndex& sequence, int parent_at, int candidate_at, float probability) {
  const int at = sequence.num_nodes++;
  Node& parent = sequence.nodes[parent_at];
  Node& node = sequence.nodes[at];
  Candidate& candidate = parent.candidates[candidate_at];
  candidate.child = int16_t(at);
  node.token = candidate.token;
  node.parent = int16_t(parent_at);
  node.candidate = int16_t(candidate_at);
  node.depth = int16_t(parent.depth + 1);
  node.probability = probability;
  node.is_scored = false;
  node.num_candidates = 0;
  const int kept = std::min(parent.num_context, MatchIndex::kMaxLength - 1);
  std::memcpy(node.context, parent.context + parent.num_context - kept, kept * 4);
  node.context[kept] = node.token;
  node.num_context = kept + 1;
  node.hashes = parent.hashes_with(node.token);
  return node;
}

void expand(SequenceIndex& sequence, int at, const Sources& sources, const AcceptanceModel& model) {
  Node& node = sequence.nodes[at];
  const Node& parent = sequence.nodes[node.parent];
  const MatchIndex& tokens = sequence.index.matches;
  node.num_local = advance(tokens, parent.local, parent.num_local, node, tokens.size(), node.local);
  node.num_global = 0;
  if (sources.corpus) {
    const MatchIndex& corpus = sources.corpus->index.matches;
    const int found = advance(corpus, parent.global, parent.num_global, node, sources.limit, node.global);
    node.num_global = without_own(sources, node.global, found);
  }
  score_candidates(node, sequence, sources, model);
}

// Estimated acceptance of a node's best child before the node is expanded.
float estimated_child(const Candidate& taken) { return .55f + .4f * taken.chance; }

// For each number of guesses the least time per further guess, over all larger numbers (the lower convex hull of the
// times). Where the time has a step, the guesses behind it share its cost.
void marginal_costs(const double* seconds, int count, std::vector<double>& costs) {
  static thread_local std::vector<int> hull;  // from here on, the nearest point last
  hull.clear();
  costs.resize(count);
  for (int at = count - 1; at >= 0; --at) {
    const auto slope = [&](int from, int to) { return (seconds[to] - seconds[from]) / (to - from); };
    while (hull.size() >= 2 && slope(at, hull.back()) >= slope(at, hull[hull.size() - 2])) hull.pop_back();
    costs[at] = hull.empty() ? 0 : slope(at, hull.back());
    hull.push_back(at);
  }
}

struct Entry {
  float probability;
  int32_t sequence;
  int16_t node, candidate;  // candidate -1: the node is to be expanded

  // Ties go to the earlier sequence, then to the earlier node and candidate.
  bool operator<(const Entry& other) const {
    if (probability != other.probability) return probability < other.probability;
    if (sequence != other.sequence) return sequence > other.sequence;
    if (node != other.node) return node > other.node;
    return candidate > other.candidate;
  }
};

// Stores the top tokens of the logits that each emitted token was chosen from.
void recycle(const SequenceIndex& sequence, Recycler& recycler, const int32_t* emitted, int count,
             const TopTokens* top) {
  const MatchIndex& tokens = sequence.index.matches;
  constexpr int kKept = Hashes::kOrders;
  int32_t last[kKept + kMaxNodes];
  int size = int(std::min<int64_t>(tokens.size(), kKept));
  std::memcpy(last, tokens.data() + tokens.size() - size, size * 4);
  for (int i = 0; i < std::min(count, kMaxNodes); ++i) {
    recycler.put(Hashes(last + size, size), top[i], sequence.number);
    last[size++] = emitted[i];
  }
}

// Updates the model with the outcome of the last draft.
void update(SequenceIndex& sequence, AcceptanceModel& model, const int32_t* emitted, int count) {
  if (sequence.num_nodes == 0) return;
  int at = 0;
  uint64_t accepted = 0;
  for (int i = 0; i < count && at >= 0; ++i) {
    const Node& node = sequence.nodes[at];
    accepted |= uint64_t(1) << at;
    if (!node.is_scored) break;
    at = -1;
    const float rate = model.next_rate();
    for (int k = 0; k < node.num_candidates; ++k) {
      const Candidate& candidate = node.candidates[k];
      const bool right = candidate.token == emitted[i];
      model.update(candidate.evidence, candidate.mixed, right, rate);
      model.update_acceptance(candidate.logit, node.depth + 1, right);
      if (candidate.child >= 0 && right) at = candidate.child;
    }
  }
  if (at >= 0) accepted |= uint64_t(1) << at;
  for (int n = 1; n < sequence.num_nodes; ++n) model.count(sequence.nodes[n].probability, accepted >> n & 1);
  sequence.num_nodes = 0;
}

}  // namespace

extern "C" {

// The inputs of one sequence's draft; tandem_drafting.native declares the same fields in the same order.
struct TandemInput {
  SequenceIndex* sequence;  // null: no draft
  const CorpusIndex* corpus;
  Recycler* recycler;
  AcceptanceModel* model;
  int32_t max_chain;  // most guesses of a draft without branches; 0: a tree
};

// One sequence's step.
struct TandemStep {
  int32_t room;     // depth of the deepest guess that could still be emitted; 0: no draft
  int32_t own_run;  // the corpus run of the sequence's own output, or -1
  // Out: guesses, and whether even the best candidate is far below its cost.
  int32_t num_guesses, is_hopeless;
};

// Parents precede children. The root is node 0, the first guess node 1.
struct TandemGuess {
  int32_t token, parent, source;
  float probability;  // that verification accepts it
};

// Adds guesses, the most probable first, while more of them may raise the tokens per second, and keeps the number that
// yields most.
//
// At most max_guesses per sequence. `expected`: tokens of the step without guesses. seconds[q]: its time with q guesses in
// the batch, q = 0 .. num_seconds - 1, non-decreasing; the batch gets at most num_seconds - 1 guesses. `guesses` receives
// one sequence's after the other's.
void tandem_draft(TandemInput* const* inputs, TandemStep* steps, int32_t count, int32_t max_guesses, double expected,
                  const double* seconds, int32_t num_seconds, TandemGuess* guesses) {
  static thread_local std::vector<Sources> sources;
  static thread_local std::vector<Entry> heap;
  static thread_local std::vector<double> costs;
  static thread_local std::vector<int32_t> added;  // the sequence of each guess, in order
  const int limit = std::min(max_guesses, kMaxNodes - 1);
  sources.resize(count);
  heap.clear();
  added.clear();
  auto push = [&](const Entry& entry) {
    heap.push_back(entry);
    std::push_heap(heap.begin(), heap.end());
  };
  auto push_candidate = [&](int n, int at, int k) {
    const Node& node = inputs[n]->sequence->nodes[at];
    if (k < node.num_candidates) push({node.probability * node.candidates[k].chance, n, int16_t(at), int16_t(k)});
  };
  for (int n = 0; n < count; ++n) {
    const TandemInput& input = *inputs[n];
    TandemStep& step = steps[n];
    step.num_guesses = step.is_hopeless = 0;
    sources[n] = {input.corpus, input.recycler, input.corpus ? input.corpus->index.matches.size() : 0, step.own_run};
    if (!input.sequence) continue;
    input.sequence->num_nodes = 0;
    if (step.room >= 1 && input.sequence->index.matches.size() > 0) set_root(*input.sequence, sources[n], limit);
  }
  for (int n = 0; n < count; ++n) {
    SequenceIndex* sequence = inputs[n]->sequence;
    if (!sequence || sequence->num_nodes == 0) continue;
    expand_root(*sequence, sources[n], *inputs[n]->model);
    push_candidate(n, 0, 0);
  }
  marginal_costs(seconds, num_seconds, costs);
  double best = expected / seconds[0];  // tokens per second
  int rows = 0, best_rows = 0;
  while (!heap.empty() && rows + 1 < num_seconds) {
    const Entry entry = heap.front();
    // The remaining ones are no more probable.
    if (entry.probability <= best * costs[rows]) break;
    std::pop_heap(heap.begin(), heap.end());
    heap.pop_back();
    const TandemInput& input = *inputs[entry.sequence];
    SequenceIndex& sequence = *input.sequence;
    const int num_guesses = sequence.num_nodes - 1;
    if (num_guesses == limit) continue;
    // A chain: at most max_chain guesses, and only the last node gets a child.
    if (input.max_chain && (num_guesses == input.max_chain || entry.node != num_guesses)) continue;
    if (entry.candidate < 0) {
      expand(sequence, entry.node, sources[entry.sequence], *input.model);
      push_candidate(entry.sequence, entry.node, 0);
      continue;
    }
    push_candidate(entry.sequence, entry.node, entry.candidate + 1);
    const int at = sequence.num_nodes;
    const Node& node = add_child(sequence, entry.node, entry.candidate, entry.probability);
    added.push_back(entry.sequence);
    expected += entry.probability;
    ++rows;
    if (expected > best * seconds[rows]) best = expected / seconds[rows], best_rows = rows;
    if (node.depth < steps[entry.sequence].room && num_guesses + 1 < limit) {
      const Candidate& taken = sequence.nodes[node.parent].candidates[node.candidate];
      push({node.probability * estimated_child(taken), entry.sequence, int16_t(at), -1});
    }
  }
  for (; rows > best_rows; --rows) {
    SequenceIndex& sequence = *inputs[added[rows - 1]]->sequence;
    const Node& node = sequence.nodes[--sequence.num_nodes];
    sequence.nodes[node.parent].candidates[node.candidate].child = -1;
  }
  const double hopeless = .2 * best * costs[0];
  for (int n = 0; n < count; ++n) {
    const SequenceIndex* sequence = inputs[n]->sequence;
    if (!sequence || sequence->num_nodes == 0) continue;
    const Node& root = sequence->nodes[0];
    steps[n].is_hopeless = root.num_candidates == 0 || root.candidates[0].chance < hopeless;
    steps[n].num_guesses = sequence->num_nodes - 1;
    for (int at = 1; at < sequence->num_nodes; ++at) {
      const Node& node = sequence->nodes[at];
      const Candidate& taken = sequence->nodes[node.parent].candidates[node.candidate];
      *guesses++ = {node.token, node.parent, taken.source, node.probability};
    }
  }
}

// The tokens that a step emitted for each sequence, including the one after the accepted guesses: updates the model and
// appends them. Sequence n's tokens end at ends[n]. `top`, or null: for each token the top tokens of its logits.
void tandem_draft_learn(TandemInput* const* inputs, int32_t count, const int32_t* tokens, const int32_t* ends,
                        const TopTokens* top) {
  for (int n = 0, begin = 0; n < count; begin = ends[n++]) {
    SequenceIndex& sequence = *inputs[n]->sequence;
    const int32_t* emitted = tokens + begin;
    const int num_emitted = ends[n] - begin;
    if (top && inputs[n]->recycler) recycle(sequence, *inputs[n]->recycler, emitted, num_emitted, top + begin);
    update(sequence, *inputs[n]->model, emitted, num_emitted);
    sequence.extend(emitted, num_emitted);
  }
}
}
