// What followed each n-gram of a token stream: counts after 1 to 3 tokens, positions of longer matches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "match_index.h"
#include "ngram_counts.h"

class NgramIndex {
 public:
  // Short n-grams have more followers than longer ones.
  NgramCounts<6> after_one;
  NgramCounts<4> after_two;
  NgramCounts<3> after_three;
  MatchIndex matches;

  // Makes room for so many tokens. Distinct contexts per token were measured on customer-service dialogues.
  void reserve(int64_t capacity) {
    matches.reserve(capacity);
    after_one.reserve(capacity / 16);
    after_two.reserve(capacity / 4);
    after_three.reserve(capacity * 2 / 5);
  }

  // Counts after the last 1, 2 and 3 tokens of a context; null: none.
  struct Counts {
    const NgramCounts<6>::Entry* after_one;
    const NgramCounts<4>::Entry* after_two;
    const NgramCounts<3>::Entry* after_three;
  };
  Counts find(const Hashes& hashes) const {
    return {hashes.count >= 1 ? after_one.find(hashes.of[1]) : nullptr,
            hashes.count >= 2 ? after_two.find(hashes.of[2]) : nullptr,
            hashes.count >= 3 ? after_three.find(hashes.of[3]) : nullptr};
  }

  // Prefetches the first reads of a lookup.
  void prefetch(const Hashes& hashes) const {
    matches.prefetch(hashes);
    if (hashes.count >= 1) after_one.prefetch(hashes.of[1]);
    if (hashes.count >= 2) after_two.prefetch(hashes.of[2]);
    if (hashes.count >= 3) after_three.prefetch(hashes.of[3]);
  }

  int64_t bytes() const { return matches.bytes() + after_one.bytes() + after_two.bytes() + after_three.bytes(); }

  // Appends where there is room.
  void append(int32_t token) {
    if (token >= 0) {
      const int64_t size = matches.size();
      const Hashes hashes(matches.data() + size, size);
      if (hashes.count >= 1) after_one.add(hashes.of[1], token);
      if (hashes.count >= 2) after_two.add(hashes.of[2], token);
      if (hashes.count >= 3) after_three.add(hashes.of[3], token);
    }
    matches.append(token);
  }

  // Appends a token that was counted before, as the context of the next ones.
  void append_context(int32_t token, bool is_linked) { matches.append(token, is_linked); }

  // Makes room for so many more tokens and, at first, for the n-grams of a typical prompt of that length.
  void make_room(int64_t count) {
    const int64_t wanted = matches.size() + count;
    if (wanted > matches.capacity()) matches.reserve(wanted + std::max<int64_t>(192, wanted / 4));
    if (after_one.room() == 0) {
      after_one.reserve(count / 7 + 64);
      after_two.reserve(count * 2 / 5 + 64);
      after_three.reserve(count * 3 / 5 + 64);
    }
  }

  // Appends a token for which `make_room` was called.
  void grow(int32_t token) {
    if (after_one.is_full()) after_one.reserve(after_one.room() * 5 / 4);
    if (after_two.is_full()) after_two.reserve(after_two.room() * 5 / 4);
    if (after_three.is_full()) after_three.reserve(after_three.room() * 5 / 4);
    append(token);
  }
};
