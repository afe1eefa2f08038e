// What followed the matches of a node's text: the candidates for its children, counted.
//
//   followers   distinct tokens that came next anywhere, at most kMost
//   contexts    the longest matches in each place whose followers differ in number, at most kSpeaking of a place:
//               after 12 tokens this came once; after 3 tokens this came 4 times and that twice
//
// All rows are as wide as kMost, so that the compiler works on a row at once.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "history.h"
#include "learner.h"

// Occurrences of a context in one text, at most.
constexpr int kMaxFound = 24;

class Ballot {
 public:
  static constexpr int kMost = 16, kSpeaking = 2;
  static constexpr uint8_t kNone = 255;

  struct Context {
    uint8_t input;  // place and level
    int total;      // matches, those included whose follower is none of `followers`
    uint16_t counts[kMost];
  };

  int num_followers = 0, num_contexts = 0;
  int32_t followers[kMost] = {};
  Context contexts[kNumPlaces * kSpeaking];
  // One more than the longest level at which anything, or a follower, occurs; 0: none.
  uint8_t top[kNumPlaces] = {}, top_of[kNumPlaces][kMost] = {};

  // A token's follower, a new one if need be; kNone when there are too many.
  uint8_t follower(int32_t token) {
    // All at once: which one it is cannot be predicted.
    uint32_t same = 0;
    for (int i = 0; i < kMost; ++i) same |= uint32_t(followers[i] == token) << i;
    same &= (1u << num_followers) - 1;
    if (same) return uint8_t(__builtin_ctz(same));
    if (num_followers == kMost) return kNone;
    followers[num_followers] = token;
    return uint8_t(num_followers++);
  }

  // Occurrences found in a text, each a match of some length and so of all shorter ones. Returns how many contexts
  // they made.
  int add(Place place, const TextIndex& index, const Occurrence* found, int number) {
    uint8_t level[kMaxFound], whose[kMaxFound];
    uint32_t levels = 0;
    for (int i = 0; i < number; ++i) {
      level[i] = level_of(found[i].length);
      whose[i] = follower(index.token(found[i].position + 1));
      levels |= 1u << level[i];
    }
    int made = 0;
    for (; levels && made < kSpeaking; ++made) {
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
          count(context, place, highest, whose[i], 1);
        }
    }
    return made;
  }

  // The same, then what was counted after 3, 2 and 1 tokens, as far as there is no longer match that says as much.
  void add(Place place, const History& text, const History::Counted& counted, const Occurrence* found, int number) {
    int made = add(place, text.index, found, number);
    add(place, 3, counted.after_three, made);
    add(place, 2, counted.after_two, made);
    add(place, 1, counted.after_one, made);
  }

 private:
  template <class Entry>
  void add(Place place, int length, const Entry* entry, int& made) {
    // A context that a full table left out may count less than a longer one.
    if (made == kSpeaking || !entry || (made && int(entry->total) <= contexts[num_contexts - 1].total)) return;
    ++made;
    Context& context = contexts[num_contexts++];
    const int level = level_of(length);
    context = {uint8_t(place * kNumLevels + level), int(entry->total), {}};
    for (size_t k = 0; k < std::size(entry->counts); ++k)
      if (entry->counts[k]) count(context, place, level, follower(entry->tokens[k]), entry->counts[k]);
  }

  void count(Context& context, Place place, int level, uint8_t whose, uint16_t number) {
    top[place] = std::max(top[place], uint8_t(level + 1));
    if (whose == kNone) return;
    context.counts[whose] += number;
    top_of[place][whose] = std::max(top_of[place][whose], uint8_t(level + 1));
  }

  static uint8_t level_of(int length) {
    static constexpr uint8_t kLevelOf[TextIndex::kMaxLength + 1] = {
        0, 0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 8, 8, 8, 8, 8, 8, 8, 8, 9, 9, 9, 9, 9, 9, 9, 9, 9};
    return kLevelOf[length];
  }
};
