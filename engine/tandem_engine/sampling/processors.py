"""Processes a row of logits before a token is chosen from it.

    raw row --process--> the target's logits        bias, penalties, bad words, min_tokens: see the text
            --restrict-> what the guide allows      only with one (guided.py)
            --warp-----> the target's distribution  temperature, top-k, top-p, min-p; not for greedy

Order and meaning are those of Hugging Face's generate and, for the presence and frequency penalties, of
vLLM. Every function takes one float32 row [V] and leaves it unchanged (log probabilities are reported from
the raw row). Processing returns a row of the same length, with forbidden tokens at -inf; warping returns what
is left, usually a handful of tokens. Ids outside the vocabulary are ignored: admission refuses them, and no
row can contain them.

Rows are numpy arrays on the host: one row at a time, numpy's partition and sort are several times faster
than torch's. Whole batches on a GPU: device.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt
from tandem_core.errors import InvariantError
from tandem_core.sampling import SamplingParams

from tandem_engine.sampling.custom import NO_PROCESSORS, LogitsProcessors, Row

TokenIds = npt.NDArray[np.int64]

_DROPPED = np.float32(-math.inf)

#: Lower temperatures equal greedy, and dividing by less overflows float32.
MIN_TEMPERATURE = 1e-5

#: Tokens per column in top_k_ids.
_COLUMN = 64


class TokenHistory:
    """The tokens that processing depends on: the prompt, the output, and how often each token is in it."""

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Iterable[int]) -> None:
        # Duplicates stay: writing a value twice costs less than finding them.
        self._prompt = np.array(prompt_token_ids, dtype=np.int64)
        self.prompt = prompt_token_ids
        self.output = list(output_token_ids)
        self.output_counts = Counter(self.output)

    def append(self, token_id: int) -> None:
        self.output.append(token_id)
        self.output_counts[token_id] += 1

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


def keep_only(row: Row, token_ids: Sequence[int]) -> Row:
    """-inf for all tokens but the given ones."""
    kept = np.full_like(row, _DROPPED)
    ids = _within(row, token_ids)
    kept[ids] = row[ids]
    return kept


def bad_word_ends(bad_words: Iterable[Sequence[int]], output: list[int]) -> list[int]:
    """The last token of each sequence whose other tokens end the output; always that of a single token."""
    return [last for *prefix, last in bad_words if not prefix or output[-len(prefix) :] == prefix]


def largest(row: Row) -> np.float32:
    """The largest value. Raises InvariantError when there is no distribution to draw from."""
    top: np.float32 = row.max()
    if not np.isfinite(top):
        raise InvariantError("cannot sample: the logits hold NaN or +inf, or no token is left")
    return top


def apply_temperature(row: Row, temperature: float) -> Row:
    """row / temperature, shifted so that the largest is 0; a shift does not change the distribution."""
    shifted: Row = row - largest(row)
    shifted /= max(temperature, MIN_TEMPERATURE)
    return shifted


def top_k_ids(row: Row, k: int) -> TokenIds:
    """The k most likely tokens and those equal to the k-th, ascending; 0 < k < len(row)."""
    candidates = np.arange(len(row))
    num_columns = len(row) // _COLUMN
    if num_columns > k:
        # The k-th largest of all is at least the k-th largest of the columns' largest, and what reaches
        # that is a hundred tokens, not the vocabulary.
        columns = row[: num_columns * _COLUMN].reshape(_COLUMN, num_columns).max(0)
        candidates = np.flatnonzero(row >= np.partition(columns, -k)[-k])
    values = row[candidates]
    kept: TokenIds = candidates[values >= np.partition(values, -k)[-k]]
    return kept


def top_p_ids(row: Row, p: float) -> TokenIds:
    """The smallest set of most likely tokens whose probability is at least p; of equals, lower ids; p < 1.

    A token stays while the more likely ones sum to less than p.
    """
    weights = np.exp(row - row.max())
    target = p * float(weights.sum(dtype=np.float64))
    # Only the weights around the nucleus's edge are sorted. Mostly a few dozen tokens weigh enough, more than
    # rounding can tell, and the edge is anywhere among them. If not, it is within one step of the weights'
    # leading bits, which are ordered as the weights are.
    ids = np.flatnonzero(weights >= 1e-3)
    edge = weights[ids]
    mass_above = 0.0
    if float(edge.sum(dtype=np.float64)) < target * (1.0 + 1e-9):
        steps = weights.view(np.int32) >> 16
        mass = np.bincount(steps, weights)[::-1].cumsum()
        num_above = min(int(np.searchsorted(mass, target)), len(mass) - 1)
        mass_above = mass[num_above - 1] if num_above else 0.0
        edge_step = len(mass) - 1 - num_above
        edge = weights[steps == edge_step]
        ids = np.flatnonzero(steps >= edge_step)
    edge.sort()
    mass = mass_above + edge[::-1].cumsum(dtype=np.float64)
    num_kept = min(int(np.searchsorted(mass, target)) + 1, len(edge))
    threshold = edge[-num_kept]
    heavy = weights[ids]
    is_kept = heavy > threshold
    ties = np.flatnonzero(heavy == threshold)
    is_kept[ties[: num_kept - np.count_nonzero(edge > threshold)]] = True
    kept: TokenIds = ids[is_kept]
    return kept


def min_p_ids(row: Row, min_p: float) -> TokenIds:
    """Tokens at least min_p times as likely as the most likely one, ascending; min_p > 0."""
    return np.flatnonzero(row >= row.max() + np.float32(math.log(min_p)))


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
        row = keep_only(row, params.allowed_token_ids)
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


def restrict(row: Row, raw: Row, allowed: npt.NDArray[np.bool_]) -> Row:
    """-inf for tokens that a guide does not allow; of the raw row, if the processed one leaves none."""
    restricted = np.where(allowed, row, _DROPPED)
    return restricted if restricted.max() > _DROPPED else np.where(allowed, raw, _DROPPED)


def warp(row: Row, params: SamplingParams) -> tuple[Row, TokenIds | None]:
    """Logits whose softmax is the distribution to draw from, and their tokens, ascending; None: all."""
    row = apply_temperature(row, params.temperature)
    token_ids: TokenIds | None = None
    if 0 < params.top_k < len(row):
        token_ids = top_k_ids(row, params.top_k)
        row = row[token_ids]
    for ids_of, limit, is_on in (
        (top_p_ids, params.top_p, params.top_p < 1.0),
        (min_p_ids, params.min_p, params.min_p > 0.0),
    ):
        if is_on:
            ids = ids_of(row, limit)
            row = row[ids]
            token_ids = ids if token_ids is None else token_ids[ids]
    return row, token_ids
