"""How a projection is computed, and in which dtype, on the CPU at hand.

Each policy has the same face, `policy(x [T, in]) -> [T, out]`, and one is chosen when weights are loaded:

    MappedLinear   straight from the mapped file; no private memory. Prefill pods, and GPUs.
    PackedLinear   weights reordered once for oneDNN; a private copy. Flat from one row to some tens of
                   rows, so decode pods verify drafts at the price of one token.
    UpcastLinear   bfloat16 weights on a CPU without bfloat16 instructions: several rows are multiplied in
                   float32, through one scratch buffer that all layers share.

Measured on a Zen 3 (2 threads, AVX2, SmolLM2's 120 projections, ms at M = 1/8/512 rows): float32 mapped
35/51/750, packed 28/34/727; bfloat16 mapped 16/90/5900, which is why UpcastLinear exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from tandem_engine.errors import ModelLoadError

#: Rows the packed layout is tuned for: a few sequences' drafts.
_PACK_ROWS = 8


class Linear(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...


class MappedLinear:
    """x @ weight.T + bias, weight [out, in] as it lies in the file."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self._weight, self._bias)


class PackedLinear:
    """The same, from weights in oneDNN's blocked order."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_ROWS)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return out


class UpcastLinear:
    """bfloat16 weights [out, in], float32 arithmetic for more than one row."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: Tensor) -> None:
        self._weight, self._bias = weight, bias
        #: Shared by all layers, which run one after another; at least out * in float32 numbers.
        self._scratch = scratch[: weight.numel()].view(weight.shape)

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            return F.linear(x, self._weight, self._bias)
        self._scratch.copy_(self._weight)
        bias = None if self._bias is None else self._bias.float()
        return F.linear(x.float(), self._scratch, bias).to(x.dtype)


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
    dtype: torch.dtype, device: torch.device, pack: bool, max_numel: int
) -> Callable[[Tensor, Tensor | None], Linear]:
    """The policy for weights of this dtype here; max_numel: elements of the largest weight."""
    if device.type != "cpu":
        return MappedLinear
    if dtype == torch.bfloat16 and not cpu_has_bf16():
        scratch = torch.empty(max_numel)
        return lambda weight, bias: UpcastLinear(weight, bias, scratch)
    if pack and _can_pack(dtype):
        return PackedLinear
    return MappedLinear


def _can_pack(dtype: torch.dtype) -> bool:
    """oneDNN says only by trying whether it packs a dtype on this CPU."""
    try:
        packed = PackedLinear(torch.ones(32, 32, dtype=dtype), None)
        return bool(packed(torch.ones(1, 32, dtype=dtype)).eq(32).all())
    except (RuntimeError, NotImplementedError, AttributeError):
        return False
