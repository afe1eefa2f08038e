// What followed short contexts, and how often: a hash table of counts.
//
// For matches of a few tokens there may be thousands of occurrences, of which only the counts matter. An entry keeps
// the most frequent followers; a new one takes the place of the rarest, whose count it inherits less one half, so that
// what has come to be frequent gets in (after Metwally et al.'s space saving).
//
// One thread adds and others may read meanwhile, as long as the table need not grow: an entry's key is written last,
// and a count that is read between two writes is off by one.
#pragma once

#include <cstdint>
#include <vector>

template <int Kept>
class Successors {
 public:
  struct Entry {
    uint32_t key;  // 0: empty
    uint32_t total;
    int32_t tokens[Kept];
    uint16_t counts[Kept];  // 0: no token
  };

  // Makes room for so many contexts.
  void reserve(int64_t contexts) {
    std::vector<Entry> old(contexts * 8 / 7 + 8);
    old.swap(entries);
    for (const Entry& entry : old)
      if (entry.key) entries[place(entry.key)] = entry;
  }

  int64_t room() const { return int64_t(entries.size()) * 7 / 8; }
  bool is_full() const { return used >= room(); }
  int64_t bytes() const { return int64_t(entries.size() * sizeof(Entry)); }

  const Entry* find(uint64_t hash) const {
    if (entries.empty()) return nullptr;
    const Entry& entry = entries[place(key_of(hash))];
    return entry.key ? &entry : nullptr;
  }

  // Counts a follower; of a new context only where there is room.
  void add(uint64_t hash, int32_t token) {
    const uint32_t key = key_of(hash);
    Entry& entry = entries[place(key)];
    if (!entry.key) {
      if (is_full()) return;
      ++used;
      entry.total = 1;
      entry.tokens[0] = token;
      entry.counts[0] = 1;
      __atomic_store_n(&entry.key, key, __ATOMIC_RELEASE);
      return;
    }
    ++entry.total;
    int rarest = 0;
    for (int i = 0; i < Kept; ++i) {
      if (entry.counts[i] && entry.tokens[i] == token) {
        if (++entry.counts[i] == UINT16_MAX) halve(entry);
        return;
      }
      if (entry.counts[i] < entry.counts[rarest]) rarest = i;
    }
    entry.tokens[rarest] = token;
    entry.counts[rarest] = uint16_t(entry.counts[rarest] / 2 + 1);
  }

 private:
  std::vector<Entry> entries;
  int64_t used = 0;

  static uint32_t key_of(uint64_t hash) { return uint32_t(hash >> 32) | 1; }

  // Where a key is, or would be.
  size_t place(uint32_t key) const {
    size_t at = uint64_t(key) * entries.size() >> 32;
    while (entries[at].key && entries[at].key != key) at = at + 1 == entries.size() ? 0 : at + 1;
    return at;
  }

  static void halve(Entry& entry) {
    entry.total /= 2;
    for (uint16_t& count : entry.counts) count /= 2;
  }
};
