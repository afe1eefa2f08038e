// The generated sequences of a namespace, indexed for lookup by the namespace's requests.
//
// Runs of tokens, each from one request, one after the other in an NgramIndex of fixed capacity. One thread adds while
// drafters read. A full corpus takes no more tokens: its owner builds a larger one.
#pragma once

#include <cstdint>
#include <vector>

#include "ngram_index.h"

class CorpusIndex {
 public:
  CorpusIndex(int64_t capacity, int32_t vocab_size) : run_of(capacity), runs_with(vocab_size), last_run(vocab_size, -1) {
    index.reserve(capacity);
  }

  // Adds tokens to a run, of which the first `num_context` are its last ones so far: they are needed where another run
  // was added to meanwhile. Returns whether there was room; if not, or if a token is none of the vocabulary's, nothing
  // was added.
  bool add(int32_t run, const int32_t* added, int64_t count, int64_t num_context) {
    const bool goes_on = run == current;
    if (index.matches.size() + (goes_on ? count - num_context : count + 1) > index.matches.capacity()) return false;
    for (int64_t i = 0; i < count; ++i)
      if (added[i] < 0 || added[i] >= int64_t(last_run.size())) return false;
    if (!goes_on) {
      run_of[index.matches.size()] = run;
      index.append(MatchIndex::kEndOfRun);
      for (int64_t i = 0; i < num_context; ++i) {
        run_of[index.matches.size()] = run;
        // What follows the last of them is new.
        index.append_context(added[i], i == num_context - 1);
      }
    }
    current = run;
    for (int64_t i = num_context; i < count; ++i) {
      if (last_run[added[i]] != run && runs_with[added[i]] < UINT16_MAX) ++runs_with[added[i]];
      last_run[added[i]] = run;
      run_of[index.matches.size()] = run;
      index.append(added[i]);
    }
    return true;
  }

  NgramIndex index;

  int32_t run_at(int64_t position) const { return run_of[position]; }
  // In how many runs a token occurs, up to 65,535.
  int num_runs_with(int32_t token) const { return token < int64_t(runs_with.size()) ? runs_with[token] : 0; }

  int64_t bytes() const {
    return index.bytes() + int64_t(run_of.size()) * 4 + int64_t(runs_with.size()) * 2 + int64_t(last_run.size()) * 4;
  }

 private:
  std::vector<int32_t> run_of;
  std::vector<uint16_t> runs_with;
  std::vector<int32_t> last_run;
  int32_t current = -1;
};
