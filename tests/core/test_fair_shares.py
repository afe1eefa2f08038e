"""Max-min division against shares computed by hand."""

from __future__ import annotations

import math

import pytest
from tandem_core.fair_shares import fair_shares


@pytest.mark.parametrize(
    ("total", "asked", "weights", "shares"),
    [
        (9.0, {"a": 10, "b": 10, "c": 10}, None, {"a": 3, "b": 3, "c": 3}),
        (10.0, {"a": 100, "b": 2, "c": 4}, None, {"a": 4, "b": 2, "c": 4}),
        (50.0, {"a": 10, "b": 5}, None, {"a": 10, "b": 5}),
        (1.0, {"a": math.inf, "b": 0.25, "c": 0.0}, None, {"a": 0.75, "b": 0.25, "c": 0.0}),
        (8.0, {"a": 100, "b": 100}, {"a": 3.0, "b": 1.0}, {"a": 6, "b": 2}),
        (8.0, {"a": 3, "b": 100}, {"a": 3.0, "b": 1.0}, {"a": 3, "b": 5}),
    ],
)
def test_a_fair_share_gives_to_others_what_one_did_not_ask_for(
    total: float, asked: dict[str, float], weights: dict[str, float] | None, shares: dict[str, float]
) -> None:
    assert fair_shares(total, asked, weights) == pytest.approx(shares)
