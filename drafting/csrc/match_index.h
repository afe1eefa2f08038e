// Finds the earlier positions in a token stream at which the last tokens of a context occurred.
//
//   tokens   0  1  2  3  4  ...    the stream; -1 ends a run, and nothing matches across it
//   chain    for each position the previous one with the same hash of its last kOrder tokens
//   heads    by hash, the latest position
//
// `find` walks a chain from its latest position and compares tokens, so that hashes need no keys. Appending is O(1).
//
// One thread appends while others read without locks, as long as nothing grows (`reserve`): a token is written before the
// size that covers it, and a reader ignores positions beyond the size that it took.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

inline int32_t load_relaxed(const int32_t& x) { return __atomic_load_n(&x, __ATOMIC_RELAXED); }
inline void store_relaxed(int32_t& x, int32_t value) { __atomic_store_n(&x, value, __ATOMIC_RELAXED); }

// Hashes of the last 1 .. kOrders tokens.
struct Hashes {
  static constexpr int kOrders = 4;
  uint64_t of[kOrders + 1];  // by order; of[0] is unused
  int count = 0;             // the highest order there is

  Hashes() = default;
  // Of the tokens before `end`, at most `available`; a context does not cross the end of a run.
  Hashes(const int32_t* end, int64_t available) {
    uint64_t h = 0;
    while (count < kOrders && count < available && end[-1 - count] >= 0) {
      h = (h ^ uint32_t(end[-1 - count])) * 0x9e3779b97f4a7c15u;
      of[++count] = (h ^ h >> 29) * 0xbf58476d1ce4e5b9u;
    }
  }
};

// The `length` tokens up to `position` equal the last ones of the context.
struct Match {
  int32_t position, length;
};

class MatchIndex {
 public:
  static constexpr int32_t kEndOfRun = -1;
  // Shortest match found here, and the length at which longer ones are cut.
  static constexpr int kOrder = Hashes::kOrders, kMaxLength = 32;

  // Makes room for so many tokens.
  void reserve(int64_t capacity) {
    tokens.resize(capacity);
    chain.resize(capacity);
    int bits = 6;
    while ((int64_t(1) << bits) < capacity) ++bits;
    shift = 64 - bits;
    heads.assign(size_t(1) << bits, -1);
    // Only sequences grow; all of their positions are linked.
    for (int64_t at = 0; at < size(); ++at) link(at, Hashes(&tokens[at] + 1, at + 1));
  }

  int64_t capacity() const { return int64_t(tokens.size()); }
  int64_t size() const { return end.load(std::memory_order_acquire); }
  int64_t bytes() const { return int64_t(tokens.size() + chain.size() + heads.size()) * 4; }
  int32_t token(int64_t position) const { return tokens[position]; }
  const int32_t* data() const { return tokens.data(); }

  // Needs room. An unlinked token is never found; it only extends the matches behind it.
  void append(int32_t token, bool is_linked = true) {
    const int64_t at = size();
    tokens[at] = token;
    if (is_linked) link(at, Hashes(&tokens[at] + 1, at + 1));
    else store_relaxed(chain[at], -1);
    end.store(at + 1, std::memory_order_release);
  }

  // Prefetches the first read of `find`.
  void prefetch(const Hashes& hashes) const {
    if (hashes.count == kOrder && !heads.empty()) __builtin_prefetch(&heads[hashes.of[kOrder] >> shift]);
  }

  // At most `most` matches of context[0 .. count - 1] that have a follower before `limit`, the latest first. Returns how
  // many it wrote.
  int find(const Hashes& hashes, const int32_t* context, int64_t count, int64_t limit, int most,
           Match* found) const {
    if (hashes.count < kOrder || heads.empty()) return 0;
    int num_found = 0;
    int32_t at = load_relaxed(heads[hashes.of[kOrder] >> shift]);
    // Bounded, because a chain also holds positions of other contexts with the same hash.
    for (int steps = 2 * most; at >= 0 && steps > 0 && num_found < most; --steps, at = load_relaxed(chain[at])) {
      if (at + 1 >= limit || tokens[at + 1] < 0) continue;
      const int length = match_length(context, count, at);
      if (length >= kOrder) found[num_found++] = {at, length};
    }
    return num_found;
  }

  // Matches of a context one token longer, from those of the context.
  int advance(const Match* from, int count, int32_t next, int64_t limit, Match* found) const {
    int num_found = 0;
    for (int i = 0; i < count; ++i) {
      const int32_t at = from[i].position + 1;
      if (tokens[at] == next && at + 1 < limit && tokens[at + 1] >= 0)
        found[num_found++] = {at, std::min(from[i].length + 1, kMaxLength)};
    }
    return num_found;
  }

  // How many tokens up to `at` are the context's last.
  int match_length(const int32_t* context, int64_t count, int32_t at) const {
    const int64_t most = std::min<int64_t>({kMaxLength, count, int64_t(at) + 1});
    int length = 0;
    while (length < most && tokens[at - length] == context[count - 1 - length]) ++length;
    return length;
  }

 private:
  std::vector<int32_t> tokens, chain, heads;
  std::atomic<int64_t> end{0};
  int shift = 58;

  void link(int64_t at, const Hashes& hashes) {
    store_relaxed(chain[at], -1);
    if (hashes.count < kOrder) return;
    int32_t& head = heads[hashes.of[kOrder] >> shift];
    store_relaxed(chain[at], head);
    store_relaxed(head, int32_t(at));
  }
};
