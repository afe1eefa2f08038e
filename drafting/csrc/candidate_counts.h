// Candidates for the children of a node: the tokens that followed matches of its context, with their counts.
//
//   followers   distinct tokens that came next anywhere, at most kMost
//   contexts    per place the two longest matches whose counts differ, for example: after 12 tokens this token followed
//               once; after 3 tokens this one 4 times and that one twice
//
// All rows are kMost wide, so that the compiler vectorizes over a row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "acceptance_model.h"
#include "ngram_index.h"

// Matches of a context in one index, at most.
constexpr int kMaxFound = 24;

class CandidateCounts {
 public:
  static constexpr int kMost = 16, kContextsPerPlace = 2;
  static constexpr uint8_t kNone = 255;

  struct Context {
    uint8_t input;  // place and level
    int total;      // matches, including those whose follower was dropped
    uint16_t counts[kMost];
  };

  int num_followers = 0, num_contexts = 0;
  int32_t followers[kMost] = {};
  Context contexts[kNumPlaces * kContextsPerPlace];
  // One more than the longest level of any follower, and of each; 0: none.
  uint8_t top[kNumPlaces] = {}, top_of[kNumPlaces][kMost] = {};

  // The number of a token, added if it is new; kNone when there are too many.
  uint8_t follower(int32_t token) {
    // Branch-free: the branch predictor cannot guess which one it is.
    uint32_t same = 0;
    for (int i = 0; i < kMost; ++i) same |= uint32_t(followers[i] == token) << i;
    same &= (1u << num_followers) - 1;
    if (same) return uint8_t(__builtin_ctz(same));
    if (num_followers == kMost) return kNone;
    followers[num_followers] = token;
    return uint8_t(num_followers++);
  }

  // Adds matches; one of some length is also one of all shorter lengths. Returns the number of contexts added.
  int add(Place place, const MatchIndex& index, const Match* found, int number) {
    uint8_t level[kMaxFound], follower_at[kMaxFound];
    uint32_t levels = 0;
    for (int i = 0; i < number; ++i) {
      level[i] = level_of(found[i].length);
      follower_at[i] = follower(index.token(found[i].position + 1));
      levels |= 1u << level[i];
    }
    int made = 0;
    for (; levels && made < kContextsPerPlace; ++made) {
      const int highest = 31 - __builtin_clz(levels);
      levels ^= 1u << highest;
      Context& context = contexts[num_contexts];
      if (made) context = contexts[num_contexts - 1];
      else context = {};
      ++num_contexts;
      context.input = uint8_t(place * kNumLevels + highest);
      for (int i = 0; i < number; ++i)
        if (level[i] == highest) {
          ++context.total;
          count(context, place, highest, follower_at[i], 1);
        }
    }
    return made;
  }

  // The same, then the n-gram counts after 3, 2 and 1 tokens where they cover more matches than the longer context.
  void add(Place place, const NgramIndex& text, const NgramIndex::Counts& counted, const Match* found, int number) {
    int made = add(place, text.matches, found, number);
    add(place, 3, counted.after_three, made);
    add(place, 2, counted.after_two, made);
    add(place, 1, counted.after_one, made);
  }

 private:
  template <class Entry>
  void add(Place place, int length, const Entry* entry, int& made) {
    // A context that entered a full table late may count less than a longer one.
    if (made == kContextsPerPlace || !entry || (made && int(entry->total) <= contexts[num_contexts - 1].total)) return;
    ++made;
    Context& context = contexts[num_contexts++];
    const int level = level_of(length);
    context = {uint8_t(place * kNumLevels + level), int(entry->total), {}};
    for (size_t k = 0; k < std::size(entry->counts); ++k)
      if (entry->counts[k]) count(context, place, level, follower(entry->tokens[k]), entry->counts[k]);
  }

  void count(Context& context, Place place, int level, uint8_t follower_at, uint16_t number) {
    top[place] = std::max(top[place], uint8_t(level + 1));
    if (follower_at == kNone) return;
    context.counts[follower_at] += number;
    top_of[place][follower_at] = std::max(top_of[place][follower_at], uint8_t(level + 1));
  }

  static uint8_t level_of(int length) {
    static constexpr uint8_t kLevelOf[MatchIndex::kMaxLength + 1] = {
        0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 9, 9};
    return kLevelOf[length];
  }
};
