"""Random layers and texts for the tests of the gated delta rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from tandem_kernels import GatedDeltaWeights, StateMetadata, gated_delta

NUM_SLOTS, TAPS = 7, 4


@dataclass(frozen=True)
class Part:
    """Consecutive rows of a case: a sequence of a step. `parents`: of a tree's nodes, the root's -1."""

    rows: Sequence[int]
    initial: int = -1
    final: int = -1
    snapshot: tuple[int, int] = (-1, 0)
    parents: Sequence[int] | None = None

    def bits(self) -> list[int]:
        if self.parents is None:
            return [0] * len(self.rows)
        bits: list[int] = []
        for node, parent in enumerate(self.parents):
            bits.append(1 << node | (bits[parent] if parent >= 0 else 0))
        return [b - (1 << 64) if b >> 63 else b for b in bits]


@dataclass
class Case:
    """A layer, the inputs of `num_rows` tokens, and slots whose states are random."""

    num_rows: int
    k_heads: int = 2
    v_heads: int = 4
    k_dim: int = 32
    v_dim: int = 48
    dtype: torch.dtype = torch.float32
    per_row: bool = False
    gate: str = "silu"
    seed: int = 0
    inputs: list[torch.Tensor] = field(init=False, repr=False)
    weights: GatedDeltaWeights = field(init=False, repr=False)
    conv: torch.Tensor = field(init=False, repr=False)
    recurrent: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        values, decays = self.v_heads * self.v_dim, self.v_heads * (self.k_dim if self.per_row else 1)
        channels = 2 * self.k_heads * self.k_dim + values
        # Columns of one projection.
        projected = random(self.num_rows, channels + values + self.v_heads + decays).to(self.dtype)
        self.inputs = list(projected.split([channels, values, self.v_heads, decays], 1))
        self.weights = GatedDeltaWeights(
            random(TAPS, channels) / 2, random(self.v_heads).exp() / 4, random(decays) - 3,
            1 + random(self.v_dim) / 4, 1e-6, self.gate,
        )  # fmt: skip
        self.conv = random(NUM_SLOTS, TAPS - 1, channels).to(self.dtype)
        self.recurrent = random(NUM_SLOTS, self.v_heads, self.k_dim, self.v_dim) / 4

    def exact(self) -> Case:
        """The same numbers in float64."""
        other = replace(self)
        other.inputs = [x.double() for x in self.inputs]
        other.conv, other.recurrent = self.conv.double(), self.recurrent.double()
        w = self.weights
        other.weights = replace(
            w, conv=w.conv.double(), decay_rate=w.decay_rate.double(), decay_bias=w.decay_bias.double(),
            norm=w.norm.double(),
        )  # fmt: skip
        return other

    def to(self, device: str) -> Case:
        other = replace(self)
        other.inputs = [x.to(device) for x in self.inputs]
        other.conv, other.recurrent = self.conv.to(device), self.recurrent.to(device)
        w = self.weights
        other.weights = replace(
            w, conv=w.conv.to(device), decay_rate=w.decay_rate.to(device),
            decay_bias=w.decay_bias.to(device), norm=w.norm.to(device),
        )  # fmt: skip
        return other

    def clone(self) -> Case:
        other = replace(self)
        other.inputs, other.weights = self.inputs, self.weights
        other.conv, other.recurrent = self.conv.clone(), self.recurrent.clone()
        return other

    def arguments(self, *parts: Part) -> tuple[object, ...]:
        """Those of `gated_delta`."""
        device = self.conv.device
        rows = torch.tensor([row for part in parts for row in part.rows], dtype=torch.int64, device=device)

        def int32(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        starts = [0]
        for part in parts:
            starts.append(starts[-1] + len(part.rows))
        bits = None
        if any(part.parents is not None for part in parts):
            bits = torch.tensor([b for part in parts for b in part.bits()], device=device)
        metadata = StateMetadata(
            int32(starts), int32([p.initial for p in parts]), int32([p.final for p in parts]),
            int32([p.snapshot[0] for p in parts]), int32([p.snapshot[1] for p in parts]), bits,
        )  # fmt: skip
        return (*(x[rows] for x in self.inputs), self.weights, self.conv, self.recurrent, metadata)

    def run(self, *parts: Part) -> torch.Tensor:
        """The outputs of one step; changes the states."""
        return gated_delta(*self.arguments(*parts))
