"""Processes a row of logits before a token is chosen from it.

    raw row --process--> the target's logits        bias, penalties, bad words, min_tokens: see the text
            --restrict-> what the guide allows      only with one (guided.py)

Order and meaning are those of Hugging Face's generate and, for the presence and frequency penalties, of
vLLM. Every function takes one float32 row [V] and leaves it unchanged (log probabilities are reported from
the raw row) and returns a row of the same length, with forbidden tokens at -inf. Ids outside the vocabulary
are ignored: admission refuses them, and no row can contain them. Temperature and filters act in the draw
(tandem_kernels.draw_tokens).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tandem_core.sampling import SamplingParams

from tandem_engine.guided import Mask
from tandem_engine.sampling.custom import NO_PROCESSORS, LogitsProcessors, Row

TokenIds = npt.NDArray[np.int64]

_DROPPED = np.float32(-math.inf)


class TokenHistory:
    """The tokens that processing depends on: prompt, output, the counts of its tokens, and the tokens that
    the request allows."""

    def __init__(
        self,
        prompt_token_ids: Sequence[int],
        output_token_ids: Iterable[int],
        allowed_token_ids: Sequence[int] = (),
    ) -> None:
        # Duplicates stay: writing a value twice costs less than finding them.
        self._prompt = np.array(prompt_token_ids, dtype=np.int64)
        self.prompt = prompt_token_ids
        self.output = list(output_token_ids)
        self.output_counts = Counter(self.output)
        #: An array, because reading 50,000 ids from a tuple takes 3 ms.
        self.allowed: TokenIds = np.fromiter(allowed_token_ids, dtype=np.int64)

    def append(self, token_id: int) -> None:
        self.output.append(token_id)
        self.output_counts[token_id] += 1

    def follow(self, output_token_ids: Sequence[int]) -> None:
        """Continues to the end of an output that begins with this one, or with which this one begins. Takes
        time for the difference only."""
        for token_id in self.output[len(output_token_ids) :]:
            self.output_counts[token_id] -= 1
            if not self.output_counts[token_id]:
                del self.output_counts[token_id]
        del self.output[len(output_token_ids) :]
        for token_id in output_token_ids[len(self.output) :]:
            self.append(token_id)

    def seen(self) -> TokenIds:
        """Ids [n] in prompt or output, possibly repeated."""
        return np.concatenate([self._prompt, np.fromiter(self.output_counts, dtype=np.int64)])


def _within(row: Row, token_ids: Iterable[int]) -> list[int]:
    return [t for t in token_ids if 0 <= t < len(row)]


def add_bias(row: Row, bias: Mapping[int, float]) -> Row:
    """row[t] + bias[t] for each t in bias."""
    row = row.copy()
    ids = _within(row, bias)
    row[ids] += np.array([bias[t] for t in ids], dtype=np.float32)
    return row


def penalise_repetition(row: Row, seen: TokenIds, penalty: float) -> Row:
    """Divide positive and multiply negative logits of the tokens seen, each once however often listed.

    Clipped to float32's range: a logit that overflowed would make every probability NaN.
    """
    seen = seen[seen < len(row)]
    before = row[seen]
    row = row.copy()
    limits = np.finfo(np.float32)
    with np.errstate(over="ignore"):
        scaled = np.where(before < 0, before * penalty, before / penalty)
    # A token that was forbidden before (-inf) stays forbidden.
    row[seen] = np.where(np.isinf(before), before, np.clip(scaled, limits.min, limits.max))
    return row


def penalise_output(row: Row, counts: Mapping[int, int], presence: float, frequency: float) -> Row:
    """Subtract presence + frequency * count from the logit of each token already put out."""
    row = row.copy()
    ids = _within(row, counts)
    row[ids] -= np.array([presence + frequency * counts[t] for t in ids], dtype=np.float32)
    return row


def forbid(row: Row, token_ids: Iterable[int]) -> Row:
    """-inf for the given tokens; the unchanged row if no token would be left."""
    forbidden = row.copy()
    forbidden[_within(row, token_ids)] = _DROPPED
    return forbidden if forbidden.max() > _DROPPED else row


def keep_only(row: Row, token_ids: TokenIds) -> Row:
    """-inf for all tokens but the given ones."""
    kept = np.full_like(row, _DROPPED)
    ids = token_ids[token_ids < len(row)]
    kept[ids] = row[ids]
    return kept


def bad_word_ends(bad_words: Iterable[Sequence[int]], output: list[int]) -> list[int]:
    """The last token of each sequence whose other tokens end the output; always that of a single token."""
    return [last for *prefix, last in bad_words if not prefix or output[-len(prefix) :] == prefix]


def process(
    row: Row,
    params: SamplingParams,
    history: TokenHistory,
    num_output: int,
    end_token_ids: frozenset[int],
    custom: LogitsProcessors = NO_PROCESSORS,
) -> Row:
    """The target's logits after num_output output tokens; what greedy decoding takes the argmax of.

    Raises InvalidRequestError if a custom processor fails.
    """
    if params.allowed_token_ids:
        row = keep_only(row, history.allowed)
    if params.logit_bias:
        row = add_bias(row, params.logit_bias)
    if params.repetition_penalty != 1.0:
        row = penalise_repetition(row, history.seen(), params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = history.output_counts
        row = penalise_output(row, counts, params.presence_penalty, params.frequency_penalty)
    for name in params.logits_processors:
        row = custom.apply(name, history.prompt, history.output, row)
    if params.bad_words:
        row = forbid(row, bad_word_ends(params.bad_words, history.output))
    # Last: it forbids nothing if no token would be left, and bad words must stay forbidden.
    if num_output < params.min_tokens:
        row = forbid(row, end_token_ids)
    return row


def restrict(row: Row, raw: Row, mask: Mask) -> Row:
    """-inf for tokens that a guide does not allow; of the raw row, if the processed one leaves none."""
    allowed = np.unpackbits(mask, count=len(row), bitorder="little").view(np.bool_)
    restricted = np.where(allowed, row, _DROPPED)
    return restricted if restricted.max() > _DROPPED else np.where(allowed, raw, _DROPPED)
