"""Rows of logits and parameters for the tests of draw_tokens."""

from __future__ import annotations

import math

import torch

#: How logits are distributed; levels make ties, flat ones large nuclei, dropped ones many zero weights.
KINDS = ["normal", "levels", "flat", "peaked", "dropped"]
#: temperature, top_k, top_p, min_p
PARAMETERS = [
    (0.0, 0, 1.0, 0.0),
    (0.8, 0, 1.0, 0.0),
    (1.3, 40, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.0, 0, 1.0, 0.05),
    (0.7, 50, 0.95, 0.02),
    (2.0, 3, 0.5, 0.0),
    (1.0, 10**6, 1e-6, 0.0),
]
Case = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def draw_logits(kind: str, vocab_size: int, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    noise = torch.randn(num_rows, vocab_size, generator=generator)
    if kind == "levels":
        return (noise * 2).round() / 2
    if kind == "flat":
        return noise * 0.01
    if kind == "peaked":
        return noise * 8
    if kind == "dropped":
        noise[:, 1:][noise[:, 1:] < 0.5] = -torch.inf
    return noise * 3


def draw_case(kind: str, vocab_size: int, num_rows: int) -> Case:
    """The arguments of draw_tokens; rows take the parameters in turn."""
    generator = torch.Generator().manual_seed(vocab_size)
    chosen = [PARAMETERS[i % len(PARAMETERS)] for i in range(num_rows)]
    temperature, top_k, top_p, min_p = zip(*chosen, strict=True)
    return (
        draw_logits(kind, vocab_size, num_rows, generator),
        torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=generator),
        torch.tensor(temperature),
        torch.tensor(top_k),
        torch.tensor(top_p, dtype=torch.float64),
        torch.tensor([math.log(m) if m else -math.inf for m in min_p]),
    )
