// Token recycling: the successors that the model thought likely, the last time it read the same last tokens.
//
// After Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
// Recycling" (2024), with contexts of one to three tokens. Every step's logits say more than the token that was drawn.
//
// What the model thought of a request's text serves that request; others only see successors that two requests in a
// row have had there (as only text of several requests is shared, see docs/lookahead.md).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "text_index.h"

// A row's likeliest tokens, the likeliest first, and their logits; the lower token of equals.
struct Likeliest {
  static constexpr int kTokens = 4;
  int32_t tokens[kTokens];
  float logits[kTokens];

  // Of `count` logits, at least kTokens.
  static Likeliest of(const float* row, int64_t count) {
    Likeliest best;
    std::fill(best.logits, best.logits + kTokens, -1e38f);
    std::fill(best.tokens, best.tokens + kTokens, 0);
    const int64_t whole = count / kBlock * kBlock;
    // Few blocks hold anything.
    for (int64_t at = 0; at < whole; at += kBlock)
      if (has_more_than(row + at, best.logits[kTokens - 1]))
        for (int i = 0; i < kBlock; ++i) best.consider(int32_t(at + i), row[at + i]);
    for (int64_t at = whole; at < count; ++at) best.consider(int32_t(at), row[at]);
    return best;
  }

 private:
  static constexpr int kBlock = 64;

  // Whether any of kBlock logits is more than that; as wide as the processor's vectors allow without asking it.
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
  static constexpr int kTokens = Likeliest::kTokens, kOrders = 3;

  struct Entry {
    uint32_t key;    // 0: empty
    uint32_t owner;  // the request that put it
    int32_t tokens[kTokens];
    uint8_t classes[kTokens];  // how sure the model was of each, 0 .. 5
    uint8_t is_shared;         // bits of the tokens that another request has put here as well

    bool is_visible_to(uint32_t request, int token) const { return owner == request || (is_shared >> token & 1); }
  };

  Recycler() : entries(size_t(1) << kBits) {}

  // Fetches what `find` will read.
  void prefetch(const Hashes& hashes) const {
    for (int order = 1; order <= kOrders && order <= hashes.count; ++order)
      __builtin_prefetch(&entries[salted(hashes.of[order], order) >> (64 - kBits)]);
  }

  // The entry for the last `order` of a context's tokens, or null.
  const Entry* find(const Hashes& hashes, int order) const {
    if (hashes.count < order) return nullptr;
    const uint64_t hash = salted(hashes.of[order], order);
    const Entry& entry = entries[hash >> (64 - kBits)];
    return entry.key == key_of(hash) ? &entry : nullptr;
  }

  // Takes the model's likeliest successors of a context in a request's text, for its last one, two and three tokens.
  void put(const Hashes& hashes, const Likeliest& likeliest, uint32_t request) {
    for (int order = 1; order <= kOrders && order <= hashes.count; ++order) {
      const uint64_t hash = salted(hashes.of[order], order);
      Entry& entry = entries[hash >> (64 - kBits)];
      const Entry before = entry;
      const bool is_same = before.key == key_of(hash);
      entry.key = key_of(hash);
      entry.owner = request;
      entry.is_shared = 0;
      for (int i = 0; i < kTokens; ++i) {
        entry.tokens[i] = likeliest.tokens[i];
        entry.classes[i] = class_of(likeliest, i);
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

  // Contexts of all lengths share the entries.
  static uint64_t salted(uint64_t hash, int order) { return hash * (2 * order + 1); }
  static uint32_t key_of(uint64_t hash) { return uint32_t(hash) | 1; }

  // The first by how far ahead it is, the others by how far behind: no probabilities, which would take all logits.
  static uint8_t class_of(const Likeliest& likeliest, int rank) {
    const float gap = likeliest.logits[0] - likeliest.logits[std::max(rank, 1)];
    const int wide = (gap > .3f) + (gap > .7f) + (gap > 1.5f) + (gap > 2.5f) + (gap > 4);
    return uint8_t(rank == 0 ? wide : 5 - wide);
  }
};
