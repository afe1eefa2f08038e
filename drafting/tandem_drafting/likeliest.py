"""The likeliest tokens of some rows of logits: what the drafter may guess when it reads the same again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem_drafting.native import NUM_RECYCLED, TopTokens


def likeliest_of(logits: Tensor, rows: Sequence[int]) -> TopTokens:
    """logits [R, V] float32; one entry per row that is named."""
    if logits.device.type == "cpu":
        rows_of_logits = logits.contiguous()
        return TopTokens.of_logits(rows_of_logits.data_ptr(), logits.shape[1], rows)
    found = torch.topk(logits[torch.tensor(rows, device=logits.device)], NUM_RECYCLED)
    return TopTokens.of_tokens(found.indices.cpu().numpy(), found.values.cpu().numpy())
