"""Chooses a step's tokens on the device of its logits, and brings to the host what that needs of them.

Covers requests whose choice depends only on a row of logits and its position. All nodes of their drafts are
then decided at once. Requests with penalties, biases or a minimum length depend on the tokens so far and are
sampled on the host (sampler.py); their rows, and those of requests with log probabilities, come whole.

The filters and the random numbers are those of the host; only exp is rounded differently. A token differs
where two race times agree within a relative 1e-6, or a nucleus ends that close to p. The logits of two
devices differ by more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tandem_kernels import draw_tokens
from torch import Tensor

from tandem_engine import device_copies
from tandem_engine.batch import ScheduledSequence
from tandem_engine.draft_source import Likeliest
from tandem_engine.sampling.rng import position_key
from tandem_engine.sampling.sampler import draw_parameters


@dataclass(frozen=True)
class StepResults:
    """What the host gets of a step's logits."""

    #: A token per row, -1 for one that holds NaN or +inf; without meaning for requests that are sampled on
    #: the host.
    token_ids: list[int]
    #: By index among the sequences that sample: the logits of those whose rows come whole.
    rows: dict[int, Tensor]
    #: None if it was not asked for.
    likeliest: Likeliest | None


def read_back(sequences: Sequence[ScheduledSequence], logits: Tensor, num_likeliest: int = 0) -> StepResults:
    """The results of logits [R, V] float32 on a device; the rows are the sequences', in order.

    All that the step needs is started before the one wait for the device.
    """
    parts = [choose_tokens(sequences, logits)]
    if num_likeliest:
        top = torch.topk(logits, min(num_likeliest, logits.shape[1]))
        parts += [top.indices, top.values]
    counts = [s.num_logits_rows for s in sequences]
    whole = [n for n, s in enumerate(sequences) if _needs_rows(s)]
    if whole:
        by_sequence = torch.split_with_sizes(logits, counts)
        parts.append(torch.cat([by_sequence[n] for n in whole]))
    on_host = device_copies.to_host(*parts)
    token_ids: list[int] = on_host[0].tolist()
    rows: dict[int, Tensor] = {}
    if whole:
        parts_of_whole = torch.split_with_sizes(on_host[-1], [counts[n] for n in whole])
        rows = dict(zip(whole, parts_of_whole, strict=True))
    likeliest = Likeliest(on_host[1].numpy(), on_host[2].numpy()) if num_likeliest else None
    return StepResults(token_ids, rows, likeliest)


def _needs_rows(sequence: ScheduledSequence) -> bool:
    sampling = sequence.request.sampling
    return sampling.needs_processing or sampling.logprobs is not None or sampling.beam_search is not None


def choose_tokens(sequences: Sequence[ScheduledSequence], logits: Tensor) -> Tensor:
    """One token per row of logits [R, V] float32, on their device; the rows are the sequences', in order.

    Rows of requests that this does not cover get their most likely token. -1 stands for a row that holds NaN
    or +inf.
    """
    keys: list[int] = []
    parameters: list[tuple[float, int, float, float]] = []
    for sequence in sequences:
        sampling = sequence.request.sampling
        num_rows = sequence.num_logits_rows
        if sampling.is_greedy or sampling.needs_processing or sampling.beam_search is not None:
            keys += [0] * num_rows
            parameters += [(0.0, 0, 1.0, -math.inf)] * num_rows
            continue
        depths = [0] if sequence.draft is None else sequence.draft.depths()
        keys += [_signed(position_key(sampling.seed, sequence.request.num_tokens + d)) for d in depths]
        parameters += [draw_parameters(sampling)] * num_rows
    if all(temperature == 0.0 for temperature, *_ in parameters):
        likeliest = logits.argmax(dim=-1, keepdim=True)
        return likeliest.where(logits.gather(1, likeliest).isfinite(), -1)[:, 0]
    return _draw(logits, keys, parameters)


def _draw(logits: Tensor, keys: list[int], parameters: list[tuple[float, int, float, float]]) -> Tensor:
    """Copies both lists to the device in one asynchronous transfer."""
    num_rows = len(keys)
    # An even number of columns, so that each row of the table begins at a multiple of 16 bytes: where one did
    # not, Triton would compile the kernel anew.
    packed = np.zeros((5, num_rows + num_rows % 2), dtype=np.int64)
    packed[0, :num_rows] = keys
    packed[1:].view(np.float64)[:, :num_rows] = np.array(parameters, dtype=np.float64).T
    on_device = device_copies.to_device(packed, logits.device)
    key, temperature, top_k, top_p, log_min_p = on_device.unbind()
    return draw_tokens(
        logits,
        key[:num_rows],
        temperature.view(torch.float64)[:num_rows].float(),
        top_k.view(torch.float64)[:num_rows].long(),
        top_p.view(torch.float64)[:num_rows],
        log_min_p.view(torch.float64)[:num_rows].float(),
    )


def _signed(bits: int) -> int:
    """The 64 bits as a signed integer, as torch stores them."""
    return bits - (1 << 64) if bits >> 63 else bits
