"""Weights of 8, 6 or 4 bits in groups of 32 along a row, each group with its own scale and minimum.

weight[n, k] = codes[n, k] * scale + minimum

INT8       codes 0 to 255, minimum = -128 * scale: symmetric, and GGUF's Q8_0 as it is
INT4       codes 0 to 15, any minimum: GGUF's Q4_0 and Q4_1 as they are
Q4_K       codes 0 to 15; eight groups share a scale and a minimum, and each has a factor for both
Q6_K       codes 0 to 63, minimum = -32 * scale; eight groups share a scale with a factor for each 16 codes
INT4_ZEROS codes 0 to 15; four groups share a scale and a zero point: AWQ's and GPTQ's groups of 128
LUT4       codes 0 to 15 that stand for table[code], minimum = -128 * scale: MXFP4, NF4, GGUF's IQ4_NL
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

#: Neighbours in a row that share a scale.
GROUP_SIZE = 32


class Packing(IntEnum):
    """Numbers by which the kernels know the packings (csrc/linear.h)."""

    INT8 = 2
    INT4 = 3
    Q4_K = 4
    Q6_K = 5
    INT4_ZEROS = 6
    LUT4 = 7

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return {Packing.INT8: 8, Packing.Q6_K: 6}.get(self, 4)

    @property
    def has_factors(self) -> bool:
        return self in (Packing.Q4_K, Packing.Q6_K)

    @property
    def has_minimums(self) -> bool:
        """Beside the scales; elsewhere the minimum is a fixed multiple of the scale."""
        return self in (Packing.INT4, Packing.Q4_K, Packing.INT4_ZEROS)

    @property
    def zero(self) -> int:
        """The code, or with LUT4 the number in its table, that means 0, unless has_minimums."""
        return 32 if self is Packing.Q6_K else 128

    @property
    def groups(self) -> int:
        """That share a scale."""
        return 8 if self.has_factors else 4 if self is Packing.INT4_ZEROS else 1

    @property
    def depth(self) -> int:
        """Neighbours in a row that share a scale, but for its factors."""
        return self.groups * GROUP_SIZE


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K], K a multiple of the packing's depth."""

    packing: Packing
    #: [N, K] uint8.
    codes: torch.Tensor
    #: [N, K / depth] float16.
    scales: torch.Tensor
    #: [N, K / depth] float16; INT4_ZEROS: in multiples of the scale, so minus the code that means 0.
    minimums: torch.Tensor
    #: [N, K / 32, 2] int8; Q4_K: of scale and minimum; Q6_K: of both, for the first and the second 16 codes.
    factors: torch.Tensor | None = None
    #: [16] uint8, of LUT4.
    table: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_rows, depth = self.codes.shape
        if depth % self.packing.depth or self.codes.dtype != torch.uint8:
            raise ValueError(
                f"codes are {list(self.codes.shape)} of {self.codes.dtype}, wanted [N, K] uint8 with K a "
                f"multiple of {self.packing.depth}"
            )
        shape = (num_rows, depth // self.packing.depth)
        for name in ("scales", "minimums"):
            values = getattr(self, name)
            if values.shape != shape or values.dtype != torch.float16:
                raise ValueError(
                    f"{name} are {list(values.shape)} of {values.dtype}, wanted {list(shape)} float16"
                )
        wanted = (num_rows, depth // GROUP_SIZE, 2) if self.packing.has_factors else None
        found = None if self.factors is None else tuple(self.factors.shape)
        if found != wanted or (self.factors is not None and self.factors.dtype != torch.int8):
            raise ValueError(f"factors have shape {found}, wanted {wanted} int8 for {self.packing.name}")
        if (self.table is not None) != (self.packing is Packing.LUT4):
            raise ValueError(f"{self.packing.name} {'lacks its' if self.table is None else 'has no'} table")

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32."""
        scales, minimums = (
            # One per half of a group.
            values.float().repeat_interleave(2 * self.packing.groups, 1)
            for values in (self.scales, self.minimums)
        )
        if self.factors is not None:
            factors = self.factors.float()
            if self.packing is Packing.Q4_K:
                scales *= factors[:, :, 0].repeat_interleave(2, 1)
                minimums *= factors[:, :, 1].repeat_interleave(2, 1)
            else:
                scales *= factors.flatten(1)
                minimums *= factors.flatten(1)
        elif self.packing is Packing.INT4_ZEROS:
            minimums *= scales
        codes = self.codes if self.table is None else self.table[self.codes.int()]
        codes = codes.float().view(*scales.shape, GROUP_SIZE // 2)
        return (codes * scales.unsqueeze(2) + minimums.unsqueeze(2)).flatten(1)

    def rows(self, order: torch.Tensor) -> QuantizedWeight:
        """The rows [M] int64 in this order."""
        factors = None if self.factors is None else self.factors[order]
        return QuantizedWeight(
            self.packing, self.codes[order], self.scales[order], self.minimums[order], factors, self.table
        )


def join_rows(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Weights of equal depth and packing below each other."""
    factors = [p.factors for p in parts if p.factors is not None]
    return QuantizedWeight(
        parts[0].packing,
        torch.cat([p.codes for p in parts]),
        torch.cat([p.scales for p in parts]),
        torch.cat([p.minimums for p in parts]),
        torch.cat(factors) if factors else None,
        parts[0].table,
    )


def quantize_weight(weight: torch.Tensor, packing: Packing) -> QuantizedWeight:
    """Nearest codes for weight [N, K], floating point.

    INT8: the largest magnitude of a group becomes 127. INT4: of several ranges inside a group's extremes the
    one with the least squared error, since cutting off one outlier may serve the other 31 better.

    Raises:
        ValueError: K is not a multiple of 32, or another packing.
    """
    if packing not in (Packing.INT8, Packing.INT4) or weight.ndim != 2 or weight.shape[1] % GROUP_SIZE:
        raise ValueError(
            f"weight has shape {list(weight.shape)} for {packing.name}, wanted [N, K] with K a multiple of "
            f"{GROUP_SIZE}, and INT4 or INT8"
        )
    groups = weight.float().reshape(weight.shape[0], -1, GROUP_SIZE)
    if packing is Packing.INT8:
        scales = (groups.abs().amax(2) / 127).half()
        # A power of two times the scale: exact, unless it overflows.
        return round_to_grid(weight, packing, scales, scales * -128)
    best: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    least = torch.full(groups.shape[:2], torch.inf)
    low, high = groups.amin(2), groups.amax(2)
    for share in torch.linspace(1.0, 0.72, 8):
        middle, half_range = (low + high) / 2, (high - low) / 2 * share
        scales = (2 * half_range / 15).half()
        minimums = (middle - half_range).half()
        codes = ((groups - minimums.float().unsqueeze(2)) / _divisor(scales)).round().clamp(0, 15)
        values = codes * scales.float().unsqueeze(2) + minimums.float().unsqueeze(2)
        error = (values - groups).square().sum(2)
        better = error < least
        least = torch.where(better, error, least)
        if best is None:
            best = (codes, scales, minimums)
        else:
            best = (
                torch.where(better.unsqueeze(2), codes, best[0]),
                torch.where(better, scales, best[1]),
                torch.where(better, minimums, best[2]),
            )
    assert best is not None
    return QuantizedWeight(packing, best[0].to(torch.uint8).flatten(1), best[1], best[2])


def round_to_grid(
    values: torch.Tensor, packing: Packing, scales: torch.Tensor, minimums: torch.Tensor
) -> QuantizedWeight:
    """The nearest codes for values [N, K] floating point, with these scales and minimums [N, K / 32] float16;
    with INT8 minimums are -128 * scales."""
    groups = values.float().reshape(*scales.shape, GROUP_SIZE)
    codes = (groups - minimums.float().unsqueeze(2)) / _divisor(scales)
    codes = codes.round_().clamp_(0, 2**packing.bits - 1)
    return QuantizedWeight(packing, codes.to(torch.uint8).flatten(1), scales, minimums)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """[..., 1] float32; 1 where a group is all zeros."""
    scales = scales.float().unsqueeze(2)
    return torch.where(scales == 0, 1.0, scales)
