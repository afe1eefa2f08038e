// A text to copy from: what followed every context that occurred in it, short ones by counts, long ones by position.
#pragma once

#include <algorithm>
#include <cstdint>

#include "successors.h"
#include "text_index.h"

class History {
 public:
  // Contexts of one and two tokens have more followers than longer ones.
  Successors<12> after_one;
  Successors<6> after_two;
  Successors<3> after_three;
  TextIndex index;

  // Makes room for so many tokens. Distinct contexts per token were measured on customer-service dialogues.
  void reserve(int64_t capacity) {
    index.reserve(capacity);
    after_one.reserve(capacity / 16);
    after_two.reserve(capacity / 4);
    after_three.reserve(capacity * 2 / 5);
  }

  int64_t bytes() const { return index.bytes() + after_one.bytes() + after_two.bytes() + after_three.bytes(); }

  // Appends where there is room.
  void append(int32_t token) {
    if (token >= 0) {
      const int64_t size = index.size();
      const int32_t* end = index.data() + size;
      // A context lies within one run.
      auto within = [&](int order) {
        return size >= order && std::all_of(end - order, end, [](int32_t before) { return before >= 0; });
      };
      if (within(1)) after_one.add(hash_of(end - 1, 1), token);
      if (within(2)) after_two.add(hash_of(end - 2, 2), token);
      if (within(3)) after_three.add(hash_of(end - 3, 3), token);
    }
    index.append(token);
  }

  // Appends what was counted before, so that what follows has something before it.
  void append_again(int32_t token, bool to_be_found) { index.append(token, to_be_found); }

  // Appends a token, making room as it goes.
  void grow(int32_t token) {
    if (index.size() == index.capacity()) index.reserve(std::max<int64_t>(256, 2 * index.size()));
    if (after_one.is_full()) after_one.reserve(std::max<int64_t>(64, 2 * after_one.room()));
    if (after_two.is_full()) after_two.reserve(std::max<int64_t>(64, 2 * after_two.room()));
    if (after_three.is_full()) after_three.reserve(std::max<int64_t>(64, 2 * after_three.room()));
    append(token);
  }
};
