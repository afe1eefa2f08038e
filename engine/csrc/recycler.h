// Token recycling: the successors that the model thought likely, the last time it read the same last tokens.
//
// After Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token
// Recycling" (2024), with contexts of one to three tokens. Every step's logits say more than the token that was drawn.
#pragma once

#include <cstdint>
#include <vector>

#include "text_index.h"

class Recycler {
 public:
  static constexpr int kTokens = 4;
  struct Entry {
    uint32_t key;  // 0: empty
    int32_t tokens[kTokens];
    uint8_t classes[kTokens];  // of their probabilities, see class_of
  };

  Recycler() : entries(size_t(1) << kBits) {}

  // The entry for the last `order` of a context's tokens, or null.
  const Entry* find(const Hashes& hashes, int order) const {
    if (hashes.count < order) return nullptr;
    const uint64_t hash = salted(hashes.of[order], order);
    const Entry& entry = entries[hash >> (64 - kBits)];
    return entry.key == key_of(hash) ? &entry : nullptr;
  }

  // Takes the model's likeliest successors of a context, for its last one, two and three tokens.
  void put(const int32_t* context, int64_t count, const int32_t* tokens, const float* probabilities) {
    const Hashes hashes(context + count, count);
    for (int order = 1; order <= 3 && order <= hashes.count; ++order) {
      const uint64_t hash = salted(hashes.of[order], order);
      Entry& entry = entries[hash >> (64 - kBits)];
      entry.key = key_of(hash);
      for (int i = 0; i < kTokens; ++i) {
        entry.tokens[i] = tokens[i];
        entry.classes[i] = class_of(probabilities[i]);
      }
    }
  }

  int64_t bytes() const { return int64_t(entries.size() * sizeof(Entry)); }

 private:
  static constexpr int kBits = 16;
  std::vector<Entry> entries;

  // Contexts of all lengths share the entries.
  static uint64_t salted(uint64_t hash, int order) { return hash * (2 * order + 1); }
  static uint32_t key_of(uint64_t hash) { return uint32_t(hash) | 1; }
  static uint8_t class_of(float p) { return p > .95f ? 5 : p > .8f ? 4 : p > .5f ? 3 : p > .2f ? 2 : p > .05f ? 1 : 0; }
};
