// What is known of one request: its text, where in the corpus it is, and the tree that was drafted last.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "ballot.h"
#include "corpus.h"
#include "learner.h"

constexpr int kMaxNodes = 64;  // the root included
constexpr int kMaxCandidates = 8;

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
  float product;  // of the chances along the path
  float reach;    // probability that verification gets here, learnt from such products
  float worth;    // the same, learnt from guesses that were sent: what a row for it is worth
  int num_local, num_global, num_candidates;
  Occurrence local[kMaxFound], global[kMaxFound];
  Candidate candidates[kMaxCandidates];  // the likeliest first
  // The text's last tokens, this one included.
  int num_context;
  int32_t context[TextIndex::kMaxLength];
  Hashes hashes;

  // Of the text of a child.
  Hashes hashes_with(int32_t next) const {
    int32_t last[Hashes::kOrders];
    const int kept = std::min(num_context, Hashes::kOrders - 1);
    std::memcpy(last, context + num_context - kept, kept * 4);
    last[kept] = next;
    return Hashes(last + kept + 1, kept + 1);
  }
};

// Runs of the corpus that the output follows lately, and where: behind a word that differs, the text goes on there.
class Alignment {
 public:
  // The output, now `now` tokens long, ends like the corpus does at these occurrences.
  void update(const Corpus& corpus, const Occurrence* found, int count, int64_t limit, int32_t own_run, int64_t now) {
    if (&corpus != of) num_places = 0, of = &corpus;
    for (int i = 0; i < num_places;)
      if (now - places[i].when > kMemory || places[i].run == own_run) places[i] = places[--num_places];
      else ++i;
    for (int i = 0; i < std::min(count, kPlaces); ++i) mark(corpus.run_at(found[i].position), found[i].position, now);
    for (int i = 0; i < num_places; ++i) copy(corpus.text.index, limit, places[i]);
  }

  // Occurrences of the end of a context near those places, however short, at most kMaxFound. Returns how many.
  int find(const int32_t* context, int count, Occurrence* found) const {
    int num_found = 0;
    for (int i = 0; i < num_places; ++i) {
      const Place& place = places[i];
      uint32_t hits = matches(place.window, context[count - 1]) & place.followed;
      for (; hits && num_found < kMaxFound; hits &= hits - 1) {
        const int32_t at = place.first + __builtin_ctz(hits);
        found[num_found++] = {at, of->text.index.match(context, count, at)};
      }
    }
    return num_found;
  }

 private:
  static constexpr int kPlaces = 24, kMemory = 32, kBefore = 4, kWindow = 32;
  struct Place {
    int32_t run, position;
    int64_t when;
    // The corpus from `first` on, copied so that all places are searched at once; bits of tokens that have a follower.
    int32_t first;
    uint32_t followed;
    int32_t window[kWindow];
  };
  Place places[kPlaces];
  int num_places = 0;
  const Corpus* of = nullptr;

  // The run's place moves on; a new one takes the place of the oldest.
  void mark(int32_t run, int32_t position, int64_t now) {
    int oldest = 0;
    for (int i = 0; i < num_places; ++i) {
      if (places[i].run == run) {
        if (places[i].when < now) move(places[i], run, position, now);
        return;
      }
      if (places[i].when < places[oldest].when) oldest = i;
    }
    if (num_places < kPlaces) move(places[num_places++], run, position, now);
    else if (places[oldest].when < now) move(places[oldest], run, position, now);
  }

  static void move(Place& place, int32_t run, int32_t position, int64_t now) {
    place.run = run;
    place.position = position;
    place.when = now;
  }

  static void copy(const TextIndex& index, int64_t limit, Place& place) {
    place.first = place.position;
    while (place.first > 0 && place.position - place.first < kBefore && index.token(place.first - 1) >= 0)
      --place.first;
    int count = 0;
    while (count < kWindow && place.first + count < limit && index.token(place.first + count) >= 0) {
      place.window[count] = index.token(place.first + count);
      ++count;
    }
    std::fill(place.window + count, place.window + kWindow, TextIndex::kEndOfRun);
    place.followed = count > 1 ? ~0u >> (33 - count) : 0;
  }

  // A bit for each place of a window where the token is.
  static uint32_t matches(const int32_t* window, int32_t token) {
    uint32_t bits = 0;
#ifdef __SSE2__
    const __m128i wanted = _mm_set1_epi32(token);
    const auto same = [&](int at) {
      return _mm_cmpeq_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(window + at)), wanted);
    };
    for (int i = 0; i < kWindow; i += 16) {
      const __m128i low = _mm_packs_epi32(same(i), same(i + 4)), high = _mm_packs_epi32(same(i + 8), same(i + 12));
      bits |= uint32_t(_mm_movemask_epi8(_mm_packs_epi16(low, high))) << i;
    }
#else
    for (int i = 0; i < kWindow; ++i) bits |= uint32_t(window[i] == token) << i;
#endif
    return bits;
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
  uint32_t number = 0;  // tells requests apart
  Alignment alignment;
  // The tree drafted last; nodes beyond num_nodes are kept for the next one.
  std::vector<Node> nodes;
  int num_nodes = 0;
  // Running mean, 0 before the first draft; and the Learner's regime for the tree drafted last.
  float tokens_per_step = 0;
  int regime = 0;

  void extend(const int32_t* tokens, int64_t count) {
    constexpr int kAhead = 6;
    text.make_room(count);
    for (int64_t i = 0; i < count; ++i) {
      if (i + kAhead < count) text.prefetch(Hashes(tokens + i + kAhead, i + kAhead));
      uses.add(tokens[i], int32_t(text.index.size()));
      text.grow(tokens[i]);
    }
  }
};
