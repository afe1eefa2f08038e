"""Log probabilities of a prompt's tokens from the logits before each of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from tandem_core.errors import LogitsError
from tandem_core.sampling import PromptLogprobs
from torch import Tensor

from tandem_engine.beam_search import largest

#: Rows whose log probabilities exist at once. For tensors above 32 MiB libc maps new memory, whose page
#: faults take longer than the arithmetic.
_ROWS_AT_ONCE = 16


def prompt_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: int) -> PromptLogprobs:
    """Under raw logits [n, V] float32: row i is at the position before token_ids[i].

    The same arithmetic as for tokens of an answer (`verify.token_logprobs`), so that a text has the same
    values as a prompt and as an answer. Raises LogitsError when the logits hold NaN.
    """
    chosen: list[float] = []
    ranks: list[int] = []
    top_ids: list[int] = []
    top_values: list[float] = []
    for part in torch.split(logits, _ROWS_AT_ONCE):
        # numpy counts 50 times as fast as torch here.
        for row in torch.log_softmax(part, dim=-1).cpu().numpy():
            token_id = token_ids[len(ranks)]
            value = row[token_id]
            if np.isnan(value):
                raise LogitsError
            chosen.append(float(value))
            ranks.append(
                1 + int(np.count_nonzero(row > value)) + int(np.count_nonzero(row[:token_id] == value))
            )
            if num_top:
                top = largest(row, num_top)
                top_ids += top.tolist()
                top_values += row[top].tolist()
    return PromptLogprobs(tuple(chosen), tuple(ranks), tuple(top_ids), tuple(top_values))
