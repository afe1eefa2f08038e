"""Drawing a token in numpy, step by step: what `draw_token` is compared with.

warp   temperature, top-k, top-p, min-p: the logits that are left, and their tokens
draw   an exponential race among them
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from tandem_core.sampling import SamplingParams
from tandem_engine.sampling.custom import Row
from tandem_engine.sampling.sampler import MIN_TEMPERATURE
from tandem_kernels.draw_tokens import FACTORS, GAMMA

TokenIds = npt.NDArray[np.int64]


def apply_temperature(row: Row, temperature: float) -> Row:
    return (row - row.max()) / np.float32(max(temperature, MIN_TEMPERATURE))


def top_k_ids(row: Row, k: int) -> TokenIds:
    """The k most likely tokens and those equal to the k-th; 0 < k < len(row)."""
    return np.flatnonzero(row >= np.partition(row, -k)[-k])


def top_p_ids(row: Row, p: float) -> TokenIds:
    """The fewest most likely tokens whose probability is at least p < 1; of equals, lower ids."""
    weights = np.exp(row - row.max())
    order = np.argsort(-weights, kind="stable")
    mass = weights[order].cumsum(dtype=np.float64)
    return np.sort(order[: np.searchsorted(mass, p * mass[-1]) + 1])


def min_p_ids(row: Row, min_p: float) -> TokenIds:
    """Tokens at least min_p > 0 times as likely as the most likely one."""
    return np.flatnonzero(row >= row.max() + np.float32(math.log(min_p)))


def warp(row: Row, params: SamplingParams) -> tuple[Row, TokenIds]:
    """Logits whose softmax is the distribution to draw from, and their tokens, ascending."""
    row, token_ids = apply_temperature(row, params.temperature), np.arange(len(row))
    for ids_of, limit, is_on in (
        (top_k_ids, params.top_k, 0 < params.top_k < len(row)),
        (top_p_ids, params.top_p, params.top_p < 1.0),
        (min_p_ids, params.min_p, params.min_p > 0.0),
    ):
        if is_on:
            ids = ids_of(row, limit)
            row, token_ids = row[ids], token_ids[ids]
    return row, token_ids


def draw(warped: tuple[Row, TokenIds], key: int) -> int:
    """A token from the softmax of warp's result: the first in a race of exponential times."""
    row, token_ids = warped
    weights = np.exp(row - row.max())
    with np.errstate(divide="ignore"):
        times = -np.log1p(-uniforms(key, token_ids)) / weights
    return int(token_ids[times.argmin()])


def uniforms(key: int, token_ids: TokenIds) -> npt.NDArray[np.float64]:
    """A uniform number in the open interval (0, 1) for each token id."""
    z = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(GAMMA) + np.uint64(key)
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        z = (z ^ (z >> np.uint64(shift))) * np.uint64(factor)
    z ^= z >> np.uint64(31)
    return ((z >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
