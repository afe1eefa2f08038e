"""Max-min fair division: nobody gets more than asked for, and what one leaves the others share."""

from __future__ import annotations

from collections.abc import Mapping


def fair_shares(
    total: float, asked: Mapping[str, float], weights: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Of a total > 0, for each name in `asked` (>= 0, or infinity); by weights > 0, or evenly."""
    shares: dict[str, float] = {}
    weight_of = dict.fromkeys(asked, 1.0) if weights is None else weights
    left, weight_left = total, sum([weight_of[name] for name in asked])
    for name in sorted(asked, key=lambda name: asked[name] / weight_of[name]):
        shares[name] = min(asked[name], left * weight_of[name] / weight_left)
        left -= shares[name]
        weight_left -= weight_of[name]
    return shares
