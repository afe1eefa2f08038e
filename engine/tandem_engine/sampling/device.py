"""Chooses all tokens of a step on the device of its logits: one call, and one transfer of token ids.

Covers requests whose choice depends only on a row of logits and its position. All nodes of their drafts are
then decided at once. Requests with penalties, biases or a minimum length depend on the tokens so far and are
sampled on the host (sampler.py).

The filters and the random numbers are those of the host; only exp is rounded differently. A token differs
where two race times agree within a relative 1e-6, or a nucleus ends that close to p. The logits of two
devices differ by more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import cast

import torch
from tandem_core.errors import InvariantError
from tandem_kernels import draw_tokens
from torch import Tensor

from tandem_engine.batch import ScheduledSequence
from tandem_engine.sampling.processors import MIN_TEMPERATURE
from tandem_engine.sampling.rng import position_key


def choose_tokens(sequences: Sequence[ScheduledSequence], logits: Tensor) -> list[int]:
    """One token per row of logits [R, V] float32; the rows are the sequences', in order.

    Rows of requests that this does not cover get their most likely token.

    Raises InvariantError when the logits of a sampled row hold NaN or +inf.
    """
    keys: list[int] = []
    parameters: list[tuple[float, float, float, float]] = []
    for sequence in sequences:
        sampling = sequence.request.sampling
        num_rows = sequence.num_logits_rows
        if sampling.is_greedy or sampling.needs_processing:
            keys += [0] * num_rows
            parameters += [(0.0, 0.0, 1.0, -math.inf)] * num_rows
            continue
        depths = [0] if sequence.draft is None else sequence.draft.depths()
        keys += [_signed(position_key(sampling.seed, sequence.request.num_tokens + d)) for d in depths]
        temperature = max(sampling.temperature, MIN_TEMPERATURE)
        log_min_p = math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf
        parameters += [(temperature, float(sampling.top_k), sampling.top_p, log_min_p)] * num_rows
    if all(temperature == 0.0 for temperature, *_ in parameters):
        return cast(list[int], logits.argmax(dim=-1).tolist())
    token_ids = cast(list[int], _draw(logits, keys, parameters).tolist())
    if min(token_ids) < 0:
        raise InvariantError("cannot sample: the logits hold NaN or +inf, or no token is left")
    return token_ids


def _draw(logits: Tensor, keys: list[int], parameters: list[tuple[float, float, float, float]]) -> Tensor:
    """Copies both lists to the device in one asynchronous transfer."""
    on_host = torch.empty(5, len(keys), dtype=torch.int64, pin_memory=logits.is_cuda)
    on_host[0] = torch.tensor(keys)
    on_host[1:] = torch.tensor(parameters, dtype=torch.float64).t().contiguous().view(torch.int64)
    on_device = on_host.to(logits.device, non_blocking=True)
    temperature, top_k, top_p, log_min_p = on_device[1:].view(torch.float64)
    return draw_tokens(logits, on_device[0], temperature.float(), top_k.long(), top_p, log_min_p.float())


def _signed(bits: int) -> int:
    """The same 64 bits as a signed integer, as torch stores them."""
    return bits - (1 << 64) if bits >> 63 else bits
