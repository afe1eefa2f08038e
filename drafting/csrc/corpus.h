// The text that a namespace's requests have generated: what its sequences copy from.
//
// Runs of tokens, each of one request, one after the other in a History of fixed capacity. One thread adds; drafters
// read at any time. A full corpus takes nothing more: its owner builds another from the part worth keeping.
#pragma once

#include <cstdint>
#include <vector>

#include "history.h"

class Corpus {
 public:
  Corpus(int64_t capacity, int32_t vocab_size) : run_of(capacity), runs_with(vocab_size), last_run(vocab_size, -1) {
    text.reserve(capacity);
  }

  // Adds tokens to a run, of which the first `num_context` are its last ones so far: they are needed where another run
  // was added to meanwhile. Returns whether there was room; if not, or if a token is none of the vocabulary's, nothing
  // was added.
  bool add(int32_t run, const int32_t* added, int64_t count, int64_t num_context) {
    const bool goes_on = run == current;
    if (text.index.size() + (goes_on ? count - num_context : count + 1) > text.index.capacity()) return false;
    for (int64_t i = 0; i < count; ++i)
      if (added[i] < 0 || added[i] >= int64_t(last_run.size())) return false;
    if (!goes_on) {
      run_of[text.index.size()] = run;
      text.append(TextIndex::kEndOfRun);
      for (int64_t i = 0; i < num_context; ++i) {
        run_of[text.index.size()] = run;
        // What follows the last of them is new.
        text.append_again(added[i], i == num_context - 1);
      }
    }
    current = run;
    for (int64_t i = num_context; i < count; ++i) {
      if (last_run[added[i]] != run && runs_with[added[i]] < UINT16_MAX) ++runs_with[added[i]];
      last_run[added[i]] = run;
      run_of[text.index.size()] = run;
      text.append(added[i]);
    }
    return true;
  }

  History text;

  int32_t run_at(int64_t position) const { return run_of[position]; }
  // In how many runs a token occurs, up to 65,535.
  int num_runs_with(int32_t token) const { return token < int64_t(runs_with.size()) ? runs_with[token] : 0; }

  int64_t bytes() const {
    return text.bytes() + int64_t(run_of.size()) * 4 + int64_t(runs_with.size()) * 2 + int64_t(last_run.size()) * 4;
  }

 private:
  std::vector<int32_t> run_of;
  std::vector<uint16_t> runs_with;
  std::vector<int32_t> last_run;
  int32_t current = -1;
};
