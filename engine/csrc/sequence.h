// What is known of one request: its text, where in the corpus it is, and the tree that was drafted last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "corpus.h"
#include "learner.h"

constexpr int kMaxNodes = 64;  // the root included
constexpr int kMaxCandidates = 8;
// Occurrences of a context in one text.
constexpr int kMaxFound = 24;

// Where guesses come from, for the statistics.
enum Source { kFromPrompt, kFromOutput, kFromGlobal, kFromRecycled };

// A possible child of a node.
struct Candidate {
  int32_t token;
  float mixed;   // its logit
  float logit;   // the same, less where all candidates together were too likely
  float chance;  // to be accepted once its parent is
  int16_t child;  // its node once it was sent, or -1
  uint8_t source;
  Evidence evidence;
};

struct Node {
  int32_t token;
  int16_t parent, candidate;  // whose child it is, and which; of the root -1
  int16_t depth;
  bool voted;
  float reach;  // probability that verification gets here
  int num_local, num_global, num_candidates;
  Occurrence local[kMaxFound], global[kMaxFound];
  Candidate candidates[kMaxCandidates];
  // The text's last tokens, this one included.
  int num_context;
  int32_t context[TextIndex::kMaxLength];
};

// Runs of the corpus that the output follows lately, and where: behind a word that differs, the text goes on there.
class Alignment {
 public:
  // The output, now `now` tokens long, ends like the corpus does at these occurrences.
  void update(const Corpus& corpus, const Occurrence* found, int count, int64_t now) {
    if (&corpus != of) num_places = 0, of = &corpus;
    for (int i = 0; i < num_places;)
      if (now - places[i].when > kMemory) places[i] = places[--num_places];
      else ++i;
    for (int i = 0; i < std::min(count, kMarked); ++i) mark(corpus.run_at(found[i].position), found[i].position, now);
  }

  // Occurrences of the end of a context near those places, however short. Returns how many were written.
  int find(const int32_t* context, int count, int64_t limit, int32_t own_run, int most, Occurrence* found) const {
    int num_found = 0;
    for (int i = 0; i < num_places; ++i) {
      if (places[i].run == own_run) continue;
      const TextIndex& index = of->text.index;
      const int64_t end = std::min<int64_t>(limit - 1, places[i].position + kBeyond + 1);
      for (int64_t at = std::max(0, places[i].position - kBefore);; ++at) {
        at = next_of(index.data(), context[count - 1], at, end);
        if (at >= end) break;
        if (index.token(at + 1) < 0 || of->run_at(at) != places[i].run) continue;
        found[num_found++] = {int32_t(at), index.match(context, count, int32_t(at))};
        if (num_found == most) return num_found;
      }
    }
    return num_found;
  }

 private:
  static constexpr int kPlaces = 24, kMarked = 16, kMemory = 32, kBefore = 4, kBeyond = 40;
  struct Place {
    int32_t run, position;
    int64_t when;
  };
  Place places[kPlaces];
  int num_places = 0;
  const Corpus* of = nullptr;

  // The run's place moves on; a new one takes the place of the oldest.
  void mark(int32_t run, int32_t position, int64_t now) {
    int oldest = 0;
    for (int i = 0; i < num_places; ++i) {
      if (places[i].run == run) {
        if (places[i].when < now) places[i] = {run, position, now};
        return;
      }
      if (places[i].when < places[oldest].when) oldest = i;
    }
    if (num_places < kPlaces) places[num_places++] = {run, position, now};
    else if (places[oldest].when < now) places[oldest] = {run, position, now};
  }

  // Where a token comes next in [at, end), or end.
  static int64_t next_of(const int32_t* tokens, int32_t token, int64_t at, int64_t end) {
    typedef int32_t Four __attribute__((vector_size(16)));
    typedef int64_t Two __attribute__((vector_size(16)));
    for (; at + 8 <= end; at += 8) {
      Four low, high;
      std::memcpy(&low, tokens + at, 16);
      std::memcpy(&high, tokens + at + 4, 16);
      const Two any = (Two)((low == token) | (high == token));
      if (any[0] | any[1]) break;
    }
    while (at < end && tokens[at] != token) ++at;
    return at;
  }
};

// How often each token of a text occurs, and where last.
class Uses {
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

struct Sequence {
  History text;
  Uses uses;
  int64_t num_prompt = 0;
  Alignment alignment;
  // The tree drafted last; nodes beyond num_nodes are kept for the next one.
  std::vector<Node> nodes;
  int num_nodes = 0;
  // Running mean.
  float tokens_per_step = 1;

  void append(int32_t token) {
    uses.add(token, int32_t(text.index.size()));
    text.grow(token);
  }
};
