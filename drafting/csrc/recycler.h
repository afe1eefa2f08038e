// Token recycling: likely next tokens from the logits of earlier steps, by the last 1 to 3 tokens.
//
// After Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling"
// (2024). An entry serves the request that wrote it; other requests only see tokens that two requests in a row had there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "match_index.h"

// The tokens of a row with the largest logits, in descending order; ties go to the lower token.
struct TopTokens {
  static constexpr int kTokens = 4;
  int32_t tokens[kTokens];
  float logits[kTokens];

  // Of `count` logits, at least kTokens.
  static TopTokens of(const float* row, int64_t count) {
    TopTokens best;
    std::fill(best.logits, best.logits + kTokens, -1e38f);
    std::fill(best.tokens, best.tokens + kTokens, 0);
    const int64_t whole = count / kBlock * kBlock;
    // Most blocks hold none.
    for (int64_t at = 0; at < whole; at += kBlock)
      if (has_more_than(row + at, best.logits[kTokens - 1]))
        for (int i = 0; i < kBlock; ++i) best.consider(int32_t(at + i), row[at + i]);
    for (int64_t at = whole; at < count; ++at) best.consider(int32_t(at), row[at]);
    return best;
  }

 private:
  static constexpr int kBlock = 64;

  // Whether any of kBlock logits exceeds a value; written for the vectorizer.
  static bool has_more_than(const float* logits, float than) {
    int32_t any = 0;
    for (int i = 0; i < kBlock; ++i) any |= -(logits[i] > than);
    return any;
  }

  void consider(int32_t token, float logit) {
    if (!(logit > logits[kTokens - 1])) return;
    int at = kTokens - 1;
    for (; at > 0 && logit > logits[at - 1]; --at) {
      logits[at] = logits[at - 1];
      tokens[at] = tokens[at - 1];
    }
    logits[at] = logit;
    tokens[at] = token;
  }
};

class Recycler {
 public:
  static constexpr int kTokens = TopTokens::kTokens, kOrders = 3;

  struct Entry {
    uint32_t key;    // 0: empty
    uint32_t owner;  // the request that wrote it
    int32_t tokens[kTokens];
    uint8_t classes[kTokens];  // confidence in each, 0 .. 5
    uint8_t is_shared;         // bits of the tokens that another request wrote here before

    bool is_visible_to(uint32_t request, int token) const { return owner == request || (is_shared >> token & 1); }
  };

  Recycler() : entries(size_t(1) << kBits) {}

  // Prefetches the reads of `find`.
  void prefetch(const Hashes& hashes) const {
    for (int order = 1; order <= kOrders && order <= hashes.count; ++order)
      __builtin_prefetch(&entries[salted(hashes.of[order], order) >> (64 - kBits)]);
  }

  // The entry for the last `order` tokens of a context, or null.
  const Entry* find(const Hashes& hashes, int order) const {
    if (hashes.count < order) return nullptr;
    const uint64_t hash = salted(hashes.of[order], order);
    const Entry& entry = entries[hash >> (64 - kBits)];
    return entry.key == key_of(hash) ? &entry : nullptr;
  }

  // Stores the top tokens after a context, under its last one, two and three tokens.
  void put(const Hashes& hashes, const TopTokens& top, uint32_t request) {
    for (int order = 1; order <= kOrders && order <= hashes.count; ++order) {
      const uint64_t hash = salted(hashes.of[order], order);
      Entry& entry = entries[hash >> (64 - kBits)];
      const Entry before = entry;
      const bool is_same = before.key == key_of(hash);
      entry.key = key_of(hash);
      entry.owner = request;
      entry.is_shared = 0;
      for (int i = 0; i < kTokens; ++i) {
        entry.tokens[i] = top.tokens[i];
        entry.classes[i] = class_of(top, i);
        for (int k = 0; is_same && k < kTokens; ++k)
          if (before.tokens[k] == entry.tokens[i] && (before.owner != request || (before.is_shared >> k & 1)))
            entry.is_shared |= uint8_t(1 << i);
      }
    }
  }

  int64_t bytes() const { return int64_t(entries.size() * sizeof(Entry)); }

 private:
  static constexpr int kBits = 15;
  std::vector<Entry> entries;

  // All orders share one table.
  static uint64_t salted(uint64_t hash, int order) { return hash * (2 * order + 1); }
  static uint32_t key_of(uint64_t hash) { return uint32_t(hash) | 1; }

  // Confidence by gaps between logits: the lead of the first token, the lag of the others. Probabilities would need all
  // logits.
  static uint8_t class_of(const TopTokens& top, int rank) {
    const float gap = top.logits[0] - top.logits[std::max(rank, 1)];
    const int wide = (gap > .3f) + (gap > .7f) + (gap > 1.5f) + (gap > 2.5f) + (gap > 4);
    return uint8_t(rank == 0 ? wide : 5 - wide);
  }
};
