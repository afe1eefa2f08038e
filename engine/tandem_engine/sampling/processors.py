"""What happens to a row of logits before a token is chosen from it.

    raw row --process--> the target's logits        bias, penalties, min_tokens: they know the text so far
            --warp-----> the target's distribution  temperature, top-k, top-p, min-p; not for greedy

Order and meaning are those of Hugging Face's generate and, for the presence and frequency penalties, of
vLLM. Every function takes and returns one float32 row [V], leaves its input unchanged (log probabilities
are reported from the raw row), and drops a token by setting it to -inf. Ids outside the vocabulary are
ignored: admission refuses them, and no row can contain them.

Rows are numpy arrays on the host: one row at a time, numpy's partition and sort are several times faster
than torch's. Not covered: constrained decoding, bad words, whole batches on a GPU.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from tandem_engine.request import SamplingParams

Row = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]

_DROPPED = np.float32(-math.inf)

#: Colder than this is as good as greedy, and dividing by less overflows float32.
MIN_TEMPERATURE = 1e-5


class TokenHistory:
    """The tokens that penalties look at: all of the prompt, and how often each token was put out."""

    def __init__(self, prompt_token_ids: Sequence[int], output_token_ids: Iterable[int]) -> None:
        # Duplicates stay: writing one value twice costs less than finding out.
        self._prompt = np.array(prompt_token_ids, dtype=np.int64)
        self.output_counts = Counter(output_token_ids)

    def append(self, token_id: int) -> None:
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
    # What was forbidden before (-inf) stays so.
    row[seen] = np.where(np.isinf(before), before, np.clip(scaled, limits.min, limits.max))
    return row


def penalise_output(row: Row, counts: Mapping[int, int], presence: float, frequency: float) -> Row:
    """Subtract presence + frequency * count from the logit of each token already put out."""
    row = row.copy()
    ids = _within(row, counts)
    row[ids] -= np.array([presence + frequency * counts[t] for t in ids], dtype=np.float32)
    return row


def forbid(row: Row, token_ids: Iterable[int]) -> Row:
    """-inf for the given tokens; the row as it is when nothing would be left to choose."""
    forbidden = row.copy()
    forbidden[_within(row, token_ids)] = _DROPPED
    return forbidden if forbidden.max() > _DROPPED else row


def apply_temperature(row: Row, temperature: float) -> Row:
    """row / temperature, shifted so that the largest is 0; a shift does not change the distribution."""
    shifted: Row = row - row.max()
    shifted /= max(temperature, MIN_TEMPERATURE)
    return shifted


def keep_top_k(row: Row, k: int) -> Row:
    """Keep the k most likely tokens and those equal to the k-th; 0: all."""
    if not 0 < k < len(row):
        return row
    return np.where(row < np.partition(row, -k)[-k], _DROPPED, row)


def keep_top_p(row: Row, p: float) -> Row:
    """Keep the smallest set of most likely tokens whose probability is at least p; of equals, lower ids.

    A token stays while the more likely ones sum to less than p.
    """
    if p >= 1.0:
        return row
    weights = np.exp(row - row.max())
    total = float(weights.sum(dtype=np.float64))
    # All tokens lighter than this weigh less than 1 - p together: the nucleus needs none of them, and
    # what is left to sort is a few hundred tokens, not the vocabulary.
    top = weights[weights >= (1.0 - p) * total / len(row)]
    top.sort()
    mass = top[::-1].cumsum(dtype=np.float64)
    num_kept = min(int(np.searchsorted(mass, p * total)) + 1, len(top))
    threshold = top[-num_kept]
    kept = weights > threshold
    ties = np.flatnonzero(weights == threshold)
    kept[ties[: num_kept - np.count_nonzero(kept)]] = True
    return np.where(kept, row, _DROPPED)


def keep_min_p(row: Row, min_p: float) -> Row:
    """Keep tokens at least min_p times as likely as the most likely one."""
    if min_p <= 0.0:
        return row
    return np.where(row < row.max() + np.float32(math.log(min_p)), _DROPPED, row)


def process(
    row: Row, params: SamplingParams, history: TokenHistory, num_output: int, end_token_ids: frozenset[int]
) -> Row:
    """The target's logits after num_output output tokens; what greedy decoding takes the argmax of."""
    if params.logit_bias:
        row = add_bias(row, params.logit_bias)
    if params.repetition_penalty != 1.0:
        row = penalise_repetition(row, history.seen(), params.repetition_penalty)
    if params.presence_penalty or params.frequency_penalty:
        counts = history.output_counts
        row = penalise_output(row, counts, params.presence_penalty, params.frequency_penalty)
    if num_output < params.min_tokens:
        row = forbid(row, end_token_ids)
    return row


def warp(row: Row, params: SamplingParams) -> Row:
    """The row whose softmax is the distribution that a sampling request draws from."""
    row = apply_temperature(row, params.temperature)
    row = keep_top_k(row, params.top_k)
    row = keep_top_p(row, params.top_p)
    return keep_min_p(row, params.min_p)
