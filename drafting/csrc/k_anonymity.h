// The k-anonymity filter: finds the parts of requests' text that k requests generated, as they generate it.
//
//   run          tokens of one request, appended piece by piece
//   shared span  [begin, end) of a run that k requests hold, this one included; it can grow at its end
//   anchors      positions in other runs that hold the end of a growing span
//
// For each new token of a run the filter asks whether k - 1 other requests hold the last span with this token appended.
//
//   the anchors continue with the token      yes: the span grows
//   otherwise it searches the longest suffix of the run that k - 1 others hold, in the index of four tokens:
//     the suffix covers the span             yes: the span grows, with new anchors
//     the suffix has four tokens or more     a new span begins with it, and overlaps the last span by at most kOverlap
//     the suffix is shorter                  nothing is shared
//
// So each span, as a whole, is text of k requests. A search looks at a bounded number of positions, the latest first.
// Where a text is frequent, a span may therefore be cut or missed, but a span of fewer than k requests never appears.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <unordered_map>
#include <vector>

#include "match_index.h"

class KAnonymityFilter {
 public:
  // Shorter matches say little about the origin of a text; the drafter's counts cover them.
  static constexpr int kLeast = 4;
  // Tokens of the last span that the next one repeats as context.
  static constexpr int kOverlap = 8;

  struct SharedSpan {
    int32_t begin, end;
    int32_t supporter;  // a run of another request that holds it; -1: no search was made
  };

  // `k` requests, this one included; with 1 each run is one span.
  explicit KAnonymityFilter(int k) : num_others(k - 1), heads(size_t(1) << kLeastBits, -1) {}

  // Appends tokens to a run; the first append creates it. Returns the number of spans that are new or grew, in the
  // order of their beginnings. `spans` needs room for one more than there are tokens.
  int append(int32_t number, uint64_t request, const int32_t* tokens, int64_t count, SharedSpan* spans) {
    const uint32_t slot = slot_of(number, request, count);
    int num_spans = 0;
    for (int64_t i = 0; i < count; ++i) {
      runs[slot].tokens.push_back(tokens[i]);
      int32_t supporter = -1;
      const int32_t begin = share(slot, &supporter);
      if (begin >= 0) {
        const int32_t end = int32_t(runs[slot].tokens.size());
        if (num_spans > 0 && spans[num_spans - 1].begin == begin) spans[num_spans - 1].end = end;
        else spans[num_spans++] = {begin, end, supporter};
      }
      link(slot);
    }
    return num_spans;
  }

  // Appends tokens without a search: their shared spans are known, `last` is the one that ends last.
  void restore(int32_t number, uint64_t request, const int32_t* tokens, int64_t count, SharedSpan last) {
    const uint32_t slot = slot_of(number, request, count);
    for (int64_t i = 0; i < count; ++i) {
      runs[slot].tokens.push_back(tokens[i]);
      link(slot);
    }
    runs[slot].begin = last.begin;
    runs[slot].end = last.end;
  }

  // Forgets a run. Its text no longer supports other runs.
  void drop(int32_t number) {
    const auto at = slots.find(number);
    if (at == slots.end()) return;
    Run& run = runs[at->second];
    num_dead += std::max<int64_t>(0, int64_t(run.tokens.size()) - kLeast + 1);
    run = Run();
    slots.erase(at);
    const bool many_entries = num_dead > 4096 && num_dead * 2 > int64_t(entries.size());
    if (many_entries || runs.size() > 2 * slots.size() + 1024) tidy(0);
  }

  // Copies tokens [begin, end) of a run, as far as there are any.
  void read(int32_t number, int64_t begin, int64_t end, int32_t* tokens) const {
    const auto at = slots.find(number);
    if (at == slots.end()) return;
    const std::vector<int32_t>& from = runs[at->second].tokens;
    end = std::min<int64_t>(end, int64_t(from.size()));
    if (begin < end) std::memcpy(tokens, from.data() + begin, size_t(end - begin) * sizeof(int32_t));
  }

  int64_t bytes() const {
    int64_t total = int64_t(entries.capacity() * sizeof(Entry) + heads.capacity() * sizeof(int32_t)) +
                    int64_t(runs.capacity() * sizeof(Run) + slots.size() * 32);
    for (const Run& run : runs) total += int64_t(run.tokens.capacity() * 4 + run.anchors.capacity() * sizeof(Anchor));
    return total;
  }

 private:
  // Positions that one search looks at: with a match, and in total.
  static constexpr int kMostFound = 128, kMostSteps = 1024;
  static constexpr size_t kMostAnchors = 16;
  // Longest comparison of a match.
  static constexpr int32_t kMostCompared = 256;
  static constexpr int kLeastBits = 10;

  struct Anchor {
    uint32_t slot;
    int32_t position;  // of the last token
  };
  struct Run {
    int32_t number = -1;  // -1: dropped
    uint64_t request = 0;
    std::vector<int32_t> tokens;
    int32_t begin = 0, end = 0;  // the span that ends last
    std::vector<Anchor> anchors;
  };
  // A position where four tokens end. Entries with the same hash form a chain, the latest first.
  struct Entry {
    int32_t previous;
    uint32_t slot;
    int32_t position;
  };
  struct Match {
    int32_t length;
    uint64_t request;
    Anchor anchor;
  };

  const int num_others;
  std::vector<Run> runs;
  std::unordered_map<int32_t, uint32_t> slots;  // of a run's number
  std::vector<Entry> entries;
  std::vector<int32_t> heads;  // by hash, the latest entry
  int shift = 64 - kLeastBits;
  int64_t num_dead = 0;  // entries of dropped runs

  // The run's slot, valid until the next call. Makes room for `count` more tokens.
  uint32_t slot_of(int32_t number, uint64_t request, int64_t count) {
    if (int64_t(entries.size()) + count > int64_t(heads.size())) tidy(count);
    const auto [at, is_new] = slots.try_emplace(number, uint32_t(runs.size()));
    if (is_new) {
      runs.emplace_back();
      runs.back().number = number;
      runs.back().request = request;
    }
    return at->second;
  }

  // Begin of the span that ends with the run's last token; -1: there is none.
  int32_t share(uint32_t slot, int32_t* supporter) {
    Run& run = runs[slot];
    const int32_t now = int32_t(run.tokens.size());
    if (num_others == 0) {
      run.end = now;
      return run.begin;
    }
    if (goes_on(run)) {
      run.end = now;
      return run.begin;
    }
    const int32_t length = search(run);
    if (length < kLeast) return -1;
    *supporter = runs[run.anchors.front().slot].number;
    const bool covers = run.end == now - 1 && run.end > run.begin && now - length <= run.begin;
    if (!covers) run.begin = std::max(now - length, run.end - kOverlap);
    run.end = now;
    return run.begin;
  }

  // Advances the anchors to the run's last token. False, and no anchors are left, when too few of them hold it.
  bool goes_on(Run& run) {
    if (run.anchors.empty()) return false;
    const int32_t token = run.tokens.back();
    size_t kept = 0;
    for (Anchor anchor : run.anchors) {
      const Run& other = runs[anchor.slot];
      ++anchor.position;
      if (anchor.position < int32_t(other.tokens.size()) && other.tokens[anchor.position] == token)
        run.anchors[kept++] = anchor;
    }
    run.anchors.resize(kept);
    if (has_enough(run.anchors)) return true;
    run.anchors.clear();
    return false;
  }

  bool has_enough(const std::vector<Anchor>& anchors) const {
    int distinct = 0;
    for (size_t i = 0; i < anchors.size(); ++i) {
      bool is_first = true;
      for (size_t j = 0; j < i; ++j) is_first &= runs[anchors[j].slot].request != runs[anchors[i].slot].request;
      distinct += is_first;
    }
    return distinct >= num_others;
  }

  // Length of the longest suffix of the run that enough others hold, and its anchors; 0: shorter than kLeast.
  int32_t search(Run& run) {
    run.anchors.clear();
    const int32_t now = int32_t(run.tokens.size());
    if (now < kLeast) return 0;
    // No match can be longer.
    const int32_t enough = std::min(now, kMostCompared);
    Match found[kMostFound];
    int num_found = 0, num_long = 0;
    int32_t at = heads[bucket(run.tokens.data() + now - kLeast)];
    for (int steps = kMostSteps; at >= 0 && steps > 0 && num_found < kMostFound; --steps, at = entries[at].previous) {
      const Entry& entry = entries[at];
      const Run& other = runs[entry.slot];
      if (other.number < 0 || other.request == run.request) continue;
      const int32_t length = common(run.tokens, now - 1, other.tokens, entry.position);
      if (length < kLeast) continue;
      found[num_found++] = {length, other.request, {entry.slot, entry.position}};
      if (length >= enough && ++num_long >= int(kMostAnchors) + num_others) break;
    }
    // Longest first; among equals the latest.
    std::stable_sort(found, found + num_found, [](const Match& a, const Match& b) { return a.length > b.length; });
    int distinct = 0, length = 0;
    for (int i = 0; i < num_found && distinct < num_others; ++i) {
      if (!is_first_of_request(found, i)) continue;
      ++distinct;
      length = found[i].length;
      run.anchors.push_back(found[i].anchor);
    }
    if (distinct < num_others) {
      run.anchors.clear();
      return 0;
    }
    // More matches of this length: some may continue where the first ones do not.
    for (int i = 0; i < num_found && found[i].length >= length && run.anchors.size() < kMostAnchors; ++i)
      if (!is_anchor(run, found[i].anchor)) run.anchors.push_back(found[i].anchor);
    return length;
  }

  static bool is_first_of_request(const Match* found, int i) {
    for (int j = 0; j < i; ++j)
      if (found[j].request == found[i].request) return false;
    return true;
  }

  static bool is_anchor(const Run& run, Anchor anchor) {
    for (const Anchor& known : run.anchors)
      if (known.slot == anchor.slot && known.position == anchor.position) return true;
    return false;
  }

  // Number of equal tokens up to these positions.
  static int32_t common(const std::vector<int32_t>& a, int32_t i, const std::vector<int32_t>& b, int32_t j) {
    const int32_t most = std::min({i + 1, j + 1, kMostCompared});
    int32_t length = 0;
    while (length < most && a[i - length] == b[j - length]) ++length;
    return length;
  }

  size_t bucket(const int32_t* tokens) const { return Hashes(tokens + kLeast, kLeast).of[kLeast] >> shift; }

  // Indexes the run's last token.
  void link(uint32_t slot) {
    const std::vector<int32_t>& tokens = runs[slot].tokens;
    if (tokens.size() < kLeast) return;
    enter({-1, slot, int32_t(tokens.size()) - 1});
  }

  void enter(Entry entry) {
    int32_t& head = heads[bucket(runs[entry.slot].tokens.data() + entry.position - (kLeast - 1))];
    entry.previous = head;
    head = int32_t(entries.size());
    entries.push_back(entry);
  }

  // Removes entries of dropped runs, keeps the order, and makes room for as many again and `count` tokens.
  void tidy(int64_t count) {
    std::vector<uint32_t> moved(runs.size());
    std::vector<Run> kept;
    for (size_t slot = 0; slot < runs.size(); ++slot) {
      const bool is_held = runs[slot].number >= 0;
      moved[slot] = is_held ? uint32_t(kept.size()) : UINT32_MAX;
      if (is_held) kept.push_back(std::move(runs[slot]));
    }
    runs.swap(kept);
    for (auto& [number, slot] : slots) slot = moved[slot];
    for (Run& run : runs) {
      std::erase_if(run.anchors, [&](const Anchor& anchor) { return moved[anchor.slot] == UINT32_MAX; });
      for (Anchor& anchor : run.anchors) anchor.slot = moved[anchor.slot];
    }
    std::vector<Entry> old;
    old.swap(entries);
    const int64_t num_held = int64_t(old.size()) - num_dead + count;
    int bits = kLeastBits;
    while ((int64_t(1) << bits) < 2 * num_held) ++bits;
    shift = 64 - bits;
    heads.assign(size_t(1) << bits, -1);
    entries.reserve(num_held + num_held / 2);
    for (Entry entry : old) {
      if (moved[entry.slot] == UINT32_MAX) continue;
      entry.slot = moved[entry.slot];
      enter(entry);
    }
    num_dead = 0;
  }
};
