// Scores the candidates for the children of a node.
#pragma once

#include <algorithm>
#include <cstdint>

#include "candidate_counts.h"
#include "recycler.h"
#include "sequence_index.h"

// What one sequence copies from.
struct Sources {
  const CorpusIndex* corpus;  // or null
  const Recycler* recycler;   // or null
  int64_t limit;              // size of the corpus at the beginning of the step
  int32_t own_run;            // the corpus run of the sequence's own output, or -1
};

// How rare a token is in the sequence and in the corpus.
inline int rarity_cell(const TokenUses::Use& use, int64_t size, const CorpusIndex* corpus, int32_t token) {
  const int64_t distance = size - use.last;
  const int runs = corpus ? corpus->num_runs_with(token) : 0;
  const int uses = use.count == 0 ? 0 : use.count == 1 ? 1 : use.count < 4 ? 2 : 3;
  const int far = distance <= 24 ? 0 : distance <= 96 ? 1 : distance <= 320 ? 2 : distance <= 1000 ? 3 : 4;
  const int known = runs == 0 ? 0 : runs <= 2 ? 1 : runs <= 9 ? 2 : runs <= 30 ? 3 : 4;
  return uses * 25 + far * 5 + known;
}

// Likely next tokens of earlier logits.
struct Recycled {
  const Recycler::Entry* entries[kRecycledOrders] = {};
  // Rank of each candidate among them, from 1.
  uint8_t rank[kRecycledOrders][CandidateCounts::kMost] = {};

  Recycled(const Recycler* recycler, const Hashes& hashes, uint32_t request, CandidateCounts& counts) {
    if (!recycler) return;
    for (int o = 0; o < kRecycledOrders; ++o) {
      entries[o] = recycler->find(hashes, o + 1);
      for (int k = 0; entries[o] && k < Recycler::kTokens; ++k) {
        if (!entries[o]->is_visible_to(request, k)) continue;
        const uint8_t at = counts.follower(entries[o]->tokens[k]);
        if (at != CandidateCounts::kNone && !rank[o][at]) rank[o][at] = uint8_t(k + 1);
      }
    }
  }
};

// Selects at most kMaxCandidates followers by a cheap score. Returns how many.
inline int select_candidates(const CandidateCounts& counts, const Recycled& recycled, uint8_t* chosen) {
  float score[CandidateCounts::kMost] = {};
  float weight = 0;
  for (int c = 0; c < counts.num_contexts; ++c) {
    const CandidateCounts::Context& context = counts.contexts[c];
    const bool longest = c == 0 || context.input / kNumLevels != counts.contexts[c - 1].input / kNumLevels;
    weight = longest ? 1 : weight * .5f;
    const float share = weight / context.total;
    for (int i = 0; i < CandidateCounts::kMost; ++i) score[i] += share * context.counts[i];
  }
  for (int o = 0; o < kRecycledOrders; ++o)
    for (int i = 0; recycled.entries[o] && i < counts.num_followers; ++i)
      if (recycled.rank[o][i]) score[i] += .3f / recycled.rank[o][i];
  // The rank of each by comparing all pairs, which vectorizes and beats sorting.
  const int count = counts.num_followers;
  int32_t keys[CandidateCounts::kMost], better[CandidateCounts::kMost] = {};
  for (int i = 0; i < CandidateCounts::kMost; ++i)
    keys[i] = i < count ? int32_t(score[i] * (1 << 24)) << 4 | (15 - i) : -1;
  for (int j = 0; j < count; ++j)
    for (int i = 0; i < CandidateCounts::kMost; ++i) better[i] += keys[j] > keys[i];
  for (int i = 0; i < count; ++i)
    if (better[i] < kMaxCandidates) chosen[better[i]] = uint8_t(i);
  return std::min(count, kMaxCandidates);
}

// Finds the candidates for a node's children and predicts their acceptance.
inline void score_candidates(Node& node, const SequenceIndex& sequence, const Sources& sources,
                             const AcceptanceModel& model) {
  node.is_scored = true;
  // Lookups that miss the cache start first.
  const NgramIndex* corpus = sources.corpus ? &sources.corpus->index : nullptr;
  const NgramIndex::Counts local_counts = sequence.index.find(node.hashes);
  const NgramIndex::Counts global_counts = corpus ? corpus->find(node.hashes) : NgramIndex::Counts{};
  CandidateCounts counts;
  counts.add(kLocal, sequence.index, local_counts, node.local, node.num_local);
  if (corpus) counts.add(kGlobal, *corpus, global_counts, node.global, node.num_global);
  const Recycled recycled(sources.recycler, node.hashes, sequence.number, counts);
  uint8_t chosen[kMaxCandidates];
  node.num_candidates = select_candidates(counts, recycled, chosen);
  // Prefetches the lookups of the most probable children.
  for (int k = 0; k < std::min(node.num_candidates, 2); ++k) {
    const Hashes hashes = node.hashes_with(counts.followers[chosen[k]]);
    sequence.index.prefetch(hashes);
    if (corpus) corpus->prefetch(hashes);
    if (sources.recycler) sources.recycler->prefetch(hashes);
  }

  const int64_t size = sequence.index.matches.size();
  float sum = 0;
  for (int k = 0; k < node.num_candidates; ++k) {
    const int at = chosen[k];
    Candidate& candidate = node.candidates[k];
    Evidence& evidence = candidate.evidence;
    candidate.token = counts.followers[at];
    candidate.child = -1;
    evidence.count = 0;
    for (int c = 0; c < counts.num_contexts; ++c) {
      const CandidateCounts::Context& context = counts.contexts[c];
      evidence.add(context.input, count_cell(context.total, context.counts[at]));
    }
    for (int o = 0; o < kRecycledOrders; ++o)
      if (recycled.entries[o]) {
        const int rank = recycled.rank[o][at];
        evidence.add(kRecycled + o, rank ? 1 + (rank - 1) * 8 + recycled.entries[o]->classes[rank - 1] : 0);
      }
    const TokenUses::Use use = sequence.uses.of(candidate.token);
    const int rarity = rarity_cell(use, size, sources.corpus, candidate.token);
    evidence.add(kRarity, rarity);
    const int local = counts.top_of[kLocal][at], global = counts.top_of[kGlobal][at];
    evidence.row[0] = uint8_t(global * 11 + counts.top[kGlobal]);
    evidence.row[1] = uint8_t(local * 11 + counts.top[kLocal]);
    evidence.row[2] = uint8_t(global > local ? 0 : global == local ? 1 : 2);
    evidence.row[3] = uint8_t(rarity);
    candidate.source = global > local                    ? kFromGlobal
                       : local == 0                      ? kFromRecycled
                       : use.last < sequence.num_prompt  ? kFromPrompt
                                                         : kFromOutput;
    candidate.mixed = model.mix(evidence);
    candidate.chance = AcceptanceModel::sigmoid(candidate.mixed);
    sum += candidate.chance;
  }
  // At most one of them is right.
  const float scale = sum > .99f ? .99f / sum : 1;
  for (int k = 0; k < node.num_candidates; ++k) {
    Candidate& candidate = node.candidates[k];
    candidate.logit = scale < 1 ? AcceptanceModel::logit_of(std::clamp(candidate.chance * scale, .0005f, .9995f))
                                : candidate.mixed;
    candidate.chance = model.acceptance(candidate.logit, node.depth + 1);
  }
  // Insertion sort: few candidates, and nearly sorted.
  for (int k = 1; k < node.num_candidates; ++k)
    for (int at = k; at > 0 && node.candidates[at - 1].chance < node.candidates[at].chance; --at)
      std::swap(node.candidates[at - 1], node.candidates[at]);
}
