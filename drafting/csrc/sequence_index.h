// One request: the index of its tokens, and its last draft.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "acceptance_model.h"
#include "candidate_counts.h"
#include "corpus_index.h"

constexpr int kMaxNodes = 64;  // the root included
constexpr int kMaxCandidates = 8;

// Where a guess comes from.
enum Source { kFromPrompt, kFromOutput, kFromGlobal, kFromRecycled };

// A possible child of a node.
struct Candidate {
  int32_t token;
  float mixed;    // logit of the mixed evidence
  float logit;    // the same, reduced where the candidates of a node sum to more than 1
  float chance;   // of acceptance, given that its parent is accepted
  int16_t child;  // its node once it was sent, or -1
  uint8_t source;
  Evidence evidence;
};

struct Node {
  int32_t token;
  int16_t parent, candidate;  // the candidate of the parent that it was; of the root -1
  int16_t depth;
  bool is_scored;
  float probability;  // of acceptance: the product of the chances along its path
  int num_local, num_global, num_candidates;
  Match local[kMaxFound], global[kMaxFound];
  Candidate candidates[kMaxCandidates];  // in descending order of chance
  // The last tokens up to and including this one.
  int num_context;
  int32_t context[MatchIndex::kMaxLength];
  Hashes hashes;

  // Of the context of a child.
  Hashes hashes_with(int32_t next) const {
    int32_t last[Hashes::kOrders];
    const int kept = std::min(num_context, Hashes::kOrders - 1);
    std::memcpy(last, context + num_context - kept, kept * 4);
    last[kept] = next;
    return Hashes(last + kept + 1, kept + 1);
  }
};

// How often each token of a sequence occurs, and its last position.
class TokenUses {
 public:
  struct Use {
    int32_t count, last;
  };

  Use of(int32_t token) const {
    if (slots.empty()) return {0, -1};
    const Slot& slot = slots[place(token)];
    return slot.use.count ? slot.use : Use{0, -1};
  }

  void add(int32_t token, int32_t position) {
    if (used * 2 >= slots.size()) grow();
    Slot& slot = slots[place(token)];
    used += slot.use.count == 0;
    slot = {token, {slot.use.count + 1, position}};
  }

  int64_t bytes() const { return int64_t(slots.size() * sizeof(Slot)); }

 private:
  struct Slot {
    int32_t token;
    Use use;
  };
  std::vector<Slot> slots;
  size_t used = 0;

  size_t place(int32_t token) const {
    size_t at = uint32_t(token) * 0x9e3779b1u >> 7 & (slots.size() - 1);
    while (slots[at].use.count && slots[at].token != token) at = (at + 1) & (slots.size() - 1);
    return at;
  }

  void grow() {
    std::vector<Slot> old(std::max<size_t>(64, 2 * slots.size()));
    old.swap(slots);
    for (const Slot& slot : old)
      if (slot.use.count) slots[place(slot.token)] = slot;
  }
};

struct SequenceIndex {
  NgramIndex index;
  TokenUses uses;
  int64_t num_prompt = 0;
  uint32_t number = 0;  // identifies the request
  // The last draft; nodes beyond num_nodes are reused by the next one.
  std::vector<Node> nodes;
  int num_nodes = 0;

  void extend(const int32_t* tokens, int64_t count) {
    constexpr int kAhead = 6;
    index.make_room(count);
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) index.prefetch(Hashes(tokens + i + kAhead, i + kAhead));
      uses.add(tokens[i], int32_t(index.matches.size()));
      index.grow(tokens[i]);
    }
  }
};
