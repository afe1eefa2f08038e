"""Chooses how a projection is computed, and in which dtype, on this CPU or GPU.

Each policy has the interface `policy(x [T, in]) -> [T, out]`; loading the weights chooses one. All but the
last compute from the mapped file, without private memory:

    PackedLinear   the compiled CPU kernels, plain or quantized weights. Nearly flat from one row to a dozen,
                   so verifying a draft costs little more than decoding one token; within 6 % of
                   oneDNN on hundreds.
    PlainLinear    torch. GPUs, and CPUs without compiled kernels, where quantized weights are dequantized.
    UpcastLinear   bfloat16 weights on a CPU with neither compiled kernels nor bfloat16 instructions: several
                   rows are multiplied in float32, through one scratch buffer that all layers share.

Measured, SmolLM2's 120 projections, 2 threads of a Zen 4 (AVX-512, bfloat16), ms at M = 1/8/32/512 rows:

    bfloat16   F.linear 18/28/-/303   packed for oneDNN 12/13/24/275   PackedLinear 7/8/21/276
    float32    F.linear 42/54/-/685   packed for oneDNN 22/21/44/525   PackedLinear 13/16/41/558
    8 bits                                                             PackedLinear 5/8/19/201
    4 bits                                                             PackedLinear 4/9/15/213
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from tandem_core.errors import ModelLoadError
from tandem_kernels import (
    PackedProjection,
    PackedWeight,
    dequantize_packed,
    packed_linear,
    runs_packed,
)
from torch import Tensor


class Linear(Protocol):
    """out_dtype None: x's own."""

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor: ...


class PlainLinear:
    """x @ weight.T + bias, weight [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.to(weight.dtype)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return F.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)


class PackedLinear:
    """The same, from weights that packed_linear understands."""

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self.projection = PackedProjection(weight, None if bias is None else bias.float())

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        return packed_linear(x, self.projection.weight, self.projection.bias, out_dtype=out_dtype)


class UpcastLinear:
    """bfloat16 weights [out, in], float32 arithmetic for more than one row."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: Tensor) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.to(weight.dtype)
        #: Shared by all layers, which run one after another; at least out * in float32 numbers.
        self._scratch = scratch[: weight.numel()].view(weight.shape)

    def __call__(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        if x.shape[0] == 1:
            return F.linear(x, self._weight, self._bias).to(out_dtype or x.dtype)
        self._scratch.copy_(self._weight)
        bias = None if self._bias is None else self._bias.float()
        return F.linear(x.float(), self._scratch, bias).to(out_dtype or x.dtype)


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 natively (avx512_bf16 or AMX), not merely converts it."""
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def pick_dtype(name: str = "auto", device: str = "cpu") -> torch.dtype:
    """`auto` is bfloat16 where it is fast, else float32; otherwise the named dtype.

    Raises ModelLoadError for a name that is none of auto, float32, bfloat16, float16.
    """
    if name == "auto":
        fast = torch.device(device).type == "cuda" or cpu_has_bf16()
        return torch.bfloat16 if fast else torch.float32
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in dtypes:
        raise ModelLoadError(f"dtype {name!r} is not supported; use auto, {', '.join(dtypes)}")
    return dtypes[name]


def linear_policy(
    dtype: torch.dtype, device: torch.device, max_numel: int
) -> Callable[[Tensor | PackedWeight, Tensor | None], Linear]:
    """The policy for weights of this dtype here; max_numel: of the largest weight that is not packed."""
    upcast = (
        device.type == "cpu"
        and dtype == torch.bfloat16
        and not cpu_has_bf16()
        and not runs_packed(dtype, device)
    )
    scratch = torch.empty(max_numel if upcast else 0)

    def make(weight: Tensor | PackedWeight, bias: Tensor | None) -> Linear:
        if isinstance(weight, PackedWeight):
            if runs_packed(torch.uint8, device):
                return PackedLinear(weight, bias)
            weight = dequantize_packed(weight).to(dtype)
        return UpcastLinear(weight, bias, scratch) if upcast else PlainLinear(weight, bias)

    return make
