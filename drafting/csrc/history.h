// A text to copy from: what followed every context that occurred in it, short ones by counts, long ones by position.
#pragma once

#include <algorithm>
#include <cstdint>

#include "successors.h"
#include "text_index.h"

class History {
 public:
  // Short contexts have more followers than longer ones.
  Successors<6> after_one;
  Successors<4> after_two;
  Successors<3> after_three;
  TextIndex index;

  // Makes room for so many tokens. Distinct contexts per token were measured on customer-service dialogues.
  void reserve(int64_t capacity) {
    index.reserve(capacity);
    after_one.reserve(capacity / 16);
    after_two.reserve(capacity / 4);
    after_three.reserve(capacity * 2 / 5);
  }

  // What was counted after a context's last 1, 2 and 3 tokens; null for nothing.
  struct Counted {
    const Successors<6>::Entry* after_one;
    const Successors<4>::Entry* after_two;
    const Successors<3>::Entry* after_three;
  };
  Counted find(const Hashes& hashes) const {
    return {hashes.count >= 1 ? after_one.find(hashes.of[1]) : nullptr,
            hashes.count >= 2 ? after_two.find(hashes.of[2]) : nullptr,
            hashes.count >= 3 ? after_three.find(hashes.of[3]) : nullptr};
  }

  // Fetches what looking a context up will read first.
  void prefetch(const Hashes& hashes) const {
    index.prefetch(hashes);
    if (hashes.count >= 1) after_one.prefetch(hashes.of[1]);
    if (hashes.count >= 2) after_two.prefetch(hashes.of[2]);
    if (hashes.count >= 3) after_three.prefetch(hashes.of[3]);
  }

  int64_t bytes() const { return index.bytes() + after_one.bytes() + after_two.bytes() + after_three.bytes(); }

  // Appends where there is room.
  void append(int32_t token) {
    if (token >= 0) {
      const int64_t size = index.size();
      const Hashes hashes(index.data() + size, size);
      if (hashes.count >= 1) after_one.add(hashes.of[1], token);
      if (hashes.count >= 2) after_two.add(hashes.of[2], token);
      if (hashes.count >= 3) after_three.add(hashes.of[3], token);
    }
    index.append(token);
  }

  // Appends what was counted before, so that what follows has something before it.
  void append_again(int32_t token, bool to_be_found) { index.append(token, to_be_found); }

  // Makes room for so many more tokens, and for as many contexts as a prompt of that length has; for one that has more,
  // `grow` makes room as it goes.
  void make_room(int64_t count) {
    const int64_t wanted = index.size() + count;
    if (wanted > index.capacity()) index.reserve(wanted + std::max<int64_t>(192, wanted / 4));
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
