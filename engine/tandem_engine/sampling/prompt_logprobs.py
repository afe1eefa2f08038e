"""Log probabilities of a prompt's tokens from the logits before each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tandem_core.sampling import PromptLogprobs
from torch import Tensor

from tandem_engine.sampling.verify import most_likely


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """Under raw logits [n, V] float32: row i is at the position before token_ids[i].

    The same arithmetic as for tokens of an answer (`verify.token_logprobs`), so that a text has the same
    values as a prompt and as an answer.
    """
    logprobs = torch.log_softmax(logits, dim=-1)
    top_ids, top_values = _top(logprobs, min(num_top, logits.shape[1]))
    # numpy counts 50 times as fast as torch here.
    rows = logprobs.cpu().numpy()
    chosen = rows[np.arange(len(token_ids)), token_ids]
    ranks = [
        1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))
        for row, value, token_id in zip(rows, chosen, token_ids, strict=True)
    ]
    return PromptLogprobs(
        logprobs=tuple(chosen.tolist()),
        ranks=tuple(ranks),
        top_token_ids=tuple(top_ids.flatten().tolist()),
        top_logprobs=tuple(top_values.flatten().tolist()),
    )


def _top(logprobs: Tensor, num_top: int) -> tuple[Tensor, Tensor]:
    """Ids and values [n, num_top] of each row's largest, descending, equals by ascending id."""
    values, ids = torch.topk(logprobs, num_top)
    if num_top == 0:
        return ids, values
    ids, order = ids.sort(dim=1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    # Of values that equal the last one, topk takes which it likes.
    num_candidates = (logprobs >= values[:, -1:]).sum(dim=1, dtype=torch.int32)
    for n in (num_candidates > num_top).nonzero()[:, 0].tolist():
        ids[n] = torch.tensor(
            [token_id for token_id, _ in most_likely(logprobs[n], num_top)], device=ids.device
        )
    return ids, values
