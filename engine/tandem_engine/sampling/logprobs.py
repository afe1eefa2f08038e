"""Log probabilities for the caller: of the model's own logits, before any processing (as in vLLM)."""

from __future__ import annotations

import torch
from tandem_core.sampling import TokenLogprobs
from torch import Tensor


def token_logprobs(rows: Tensor, token_ids: tuple[int, ...], num_top: int) -> tuple[TokenLogprobs, ...]:
    """For each row of raw logits [n, V]: the chosen token's, and those of the num_top most likely.

    The list runs from most to least likely, equals by ascending id, so that a greedy choice heads it.
    """
    logprobs = torch.log_softmax(rows.float(), dim=-1)
    num_top = min(num_top, rows.shape[1])
    return tuple(
        TokenLogprobs(token_id, float(row[token_id]), _most_likely(row, num_top))
        for row, token_id in zip(logprobs, token_ids, strict=True)
    )


def _most_likely(row: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    if num_top == 0:
        return ()
    # topk breaks ties as it likes: take all that equal the last one, then sort them stably.
    candidates = (row >= torch.topk(row, num_top).values[-1]).nonzero()[:, 0]
    values, order = torch.sort(row[candidates], descending=True, stable=True)
    ids = candidates[order[:num_top]].tolist()
    return tuple(zip(ids, values[:num_top].tolist(), strict=True))
