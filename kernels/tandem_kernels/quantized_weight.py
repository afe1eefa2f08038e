"""Weights of 8 or 4 bits in groups of 32 along a row, each group with its own scale and minimum.

weight[n, k] = codes[n, k] * scales[n, k // 32] + minimums[n, k // 32]

8 bits   codes 0 to 255, minimum = -128 * scale: symmetric, and GGUF's Q8_0 as it is
4 bits   codes 0 to 15, any minimum: GGUF's Q4_0 and Q4_1 as they are
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Neighbours in a row that share a scale.
GROUP_SIZE = 32


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [N, K], K a multiple of 32."""

    bits: int
    #: [N, K] uint8.
    codes: torch.Tensor
    #: [N, K / 32] float16.
    scales: torch.Tensor
    #: [N, K / 32] float16.
    minimums: torch.Tensor

    def __post_init__(self) -> None:
        num_rows, depth = self.codes.shape
        groups = (num_rows, depth // GROUP_SIZE)
        if self.bits not in (4, 8) or depth % GROUP_SIZE or self.codes.dtype != torch.uint8:
            raise ValueError(
                f"codes are {list(self.codes.shape)} of {self.codes.dtype} with {self.bits} bits, wanted "
                f"[N, K] uint8 of 4 or 8 bits with K a multiple of {GROUP_SIZE}"
            )
        for name in ("scales", "minimums"):
            values = getattr(self, name)
            if values.shape != groups or values.dtype != torch.float16:
                raise ValueError(
                    f"{name} are {list(values.shape)} of {values.dtype}, wanted {list(groups)} float16"
                )

    def dequantize(self) -> torch.Tensor:
        """[N, K] float32."""
        codes = self.codes.float().view(*self.scales.shape, GROUP_SIZE)
        return (codes * self.scales.float().unsqueeze(2) + self.minimums.float().unsqueeze(2)).flatten(1)

    def rows(self, order: torch.Tensor) -> QuantizedWeight:
        """The rows [M] int64 in this order."""
        return QuantizedWeight(self.bits, self.codes[order], self.scales[order], self.minimums[order])


def join_rows(parts: list[QuantizedWeight]) -> QuantizedWeight:
    """Weights of equal depth and bits below each other."""
    return QuantizedWeight(
        parts[0].bits,
        torch.cat([p.codes for p in parts]),
        torch.cat([p.scales for p in parts]),
        torch.cat([p.minimums for p in parts]),
    )


def quantize_weight(
    weight: torch.Tensor, bits: int, candidates: tuple[torch.Tensor, ...] = ()
) -> QuantizedWeight:
    """Nearest codes for weight [N, K], floating point.

    8 bits: the largest magnitude of a group becomes 127, or the scale is one of candidates [N, K / 32]
    float16 where its squared error is less. 4 bits: of several ranges inside a group's extremes the one with
    the least squared error, since cutting off one outlier may serve the other 31 better.

    Raises:
        ValueError: K is not a multiple of 32, or bits is neither 4 nor 8.
    """
    if bits not in (4, 8) or weight.ndim != 2 or weight.shape[1] % GROUP_SIZE:
        raise ValueError(
            f"weight has shape {list(weight.shape)} for {bits} bits, wanted [N, K] with K a multiple of "
            f"{GROUP_SIZE}, and 4 or 8 bits"
        )
    groups = weight.float().reshape(weight.shape[0], -1, GROUP_SIZE)
    if bits == 8:
        scales = (groups.abs().amax(2) / 127).half()
        least = None
        for candidate in candidates:
            if least is None:
                least = _error(groups, scales)
            error = _error(groups, candidate)
            scales, least = torch.where(error < least, candidate, scales), torch.minimum(error, least)
        # A power of two times the scale: exact, unless it overflows.
        return round_to_grid(weight, 8, scales, scales * -128)
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
    return QuantizedWeight(4, best[0].to(torch.uint8).flatten(1), best[1], best[2])


def round_to_grid(
    values: torch.Tensor, bits: int, scales: torch.Tensor, minimums: torch.Tensor
) -> QuantizedWeight:
    """The nearest codes for values [N, K] floating point, with these scales and minimums [N, K / 32] float16;
    with 8 bits minimums are -128 * scales."""
    groups = values.float().reshape(*scales.shape, GROUP_SIZE)
    codes = ((groups - minimums.float().unsqueeze(2)) / _divisor(scales)).round_().clamp_(0, 2**bits - 1)
    return QuantizedWeight(bits, codes.to(torch.uint8).flatten(1), scales, minimums)


def _error(groups: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[N, K / 32]: the squared error of codes -128 .. 127 with these scales."""
    codes = (groups / _divisor(scales)).round_().clamp_(-128, 127)
    return codes.mul_(scales.float().unsqueeze(2)).sub_(groups).square_().sum(2)


def _divisor(scales: torch.Tensor) -> torch.Tensor:
    """[..., 1] float32; 1 where a group is all zeros."""
    scales = scales.float().unsqueeze(2)
    return torch.where(scales == 0, 1.0, scales)
