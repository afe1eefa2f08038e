// Counts of what followed short n-grams: a hash table.
//
//   keys      of the n-grams, contiguous: a lookup reads one or two cache lines of them
//   entries   the followers of each
//
// N-grams of a few tokens may occur thousands of times, and only the counts matter. An entry keeps the most frequent
// followers; a new one replaces the rarest and inherits half of its count, so that a follower that becomes frequent enters
// (after Metwally et al.'s space saving).
//
// One thread adds while others read, as long as the table does not grow: the key of an entry is written last, and a count
// that is read between two writes is off by one.
#pragma once

#include <cstdint>
#include <vector>

template <int Kept>
class NgramCounts {
 public:
  struct Entry {
    uint32_t total;
    int32_t tokens[Kept];
    uint16_t counts[Kept];  // 0: no token
  };

  // Makes room for so many n-grams.
  void reserve(int64_t contexts) {
    const std::vector<uint32_t> old_keys(std::move(keys));
    const std::vector<Entry> old_entries(std::move(entries));
    const size_t size = contexts * 5 / 4 + 8;
    keys.assign(size, 0);
    entries.assign(size, Entry{});
    for (size_t at = 0; at < old_keys.size(); ++at)
      if (old_keys[at]) {
        const size_t now = place(old_keys[at]);
        keys[now] = old_keys[at];
        entries[now] = old_entries[at];
      }
  }

  int64_t room() const { return int64_t(keys.size()) * 4 / 5; }
  bool is_full() const { return used >= room(); }
  int64_t bytes() const { return int64_t(keys.size() * (sizeof(uint32_t) + sizeof(Entry))); }

  // Prefetches the first read of `find`.
  void prefetch(uint64_t hash) const {
    if (!keys.empty()) __builtin_prefetch(&keys[first_place(key_of(hash))]);
  }

  // The entry of an n-gram, prefetched, or null.
  const Entry* find(uint64_t hash) const {
    if (keys.empty()) return nullptr;
    const size_t at = place(key_of(hash));
    if (!keys[at]) return nullptr;
    __builtin_prefetch(&entries[at]);
    return &entries[at];
  }

  // Counts a follower; a new n-gram needs room.
  void add(uint64_t hash, int32_t token) {
    const uint32_t key = key_of(hash);
    const size_t at = place(key);
    Entry& entry = entries[at];
    if (!keys[at]) {
      if (is_full()) return;
      ++used;
      entry.total = 1;
      entry.tokens[0] = token;
      entry.counts[0] = 1;
      __atomic_store_n(&keys[at], key, __ATOMIC_RELEASE);
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
  std::vector<uint32_t> keys;  // 0: empty
  std::vector<Entry> entries;
  int64_t used = 0;

  static uint32_t key_of(uint64_t hash) { return uint32_t(hash >> 32) | 1; }

  size_t first_place(uint32_t key) const { return uint64_t(key) * keys.size() >> 32; }

  // Where a key is, or would be.
  size_t place(uint32_t key) const {
    size_t at = first_place(key);
    while (keys[at] && keys[at] != key) at = at + 1 == keys.size() ? 0 : at + 1;
    return at;
  }

  static void halve(Entry& entry) {
    entry.total /= 2;
    for (uint16_t& count : entry.counts) count /= 2;
  }
};
