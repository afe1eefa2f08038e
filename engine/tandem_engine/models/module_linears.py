"""Linear layers of transformers' modules, computed by our kernels.

    watch     every plain nn.Linear and Conv1D is replaced, computes as before, and notes reads of its weight
    settle    those whose weight no module has read directly are packed (linear.py), plain or quantized

Which modules multiply by `weight` themselves shows the check of modules.py, which runs in between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from tandem_kernels import PackedWeight, Packing, pack_quantized, pack_weight, quantize_weight, runs_packed
from tandem_kernels.packed_linear import packed_shape, quantized_shape
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from tandem_engine.models.layout import Quantization
from tandem_engine.models.linear import PackedLinear


class WatchedLinear(nn.Module):
    """x [..., in] -> [..., out] as the layer that it replaces.

    kind: of the modules that use it alike; a read in one of them counts for all.
    """

    def __init__(self, plain: nn.Module, kind: tuple[str, str]) -> None:
        super().__init__()
        self.plain: nn.Module | None = plain
        self.kind = kind
        self.was_read = False
        #: The result's, once it is packed; None: x's.
        self.out_dtype: torch.dtype | None = None
        self._packed: PackedLinear | None = None

    @property
    def weight(self) -> Tensor:
        return self._read("weight")

    @property
    def bias(self) -> Tensor | None:
        return self._read("bias")

    def _read(self, name: str) -> Tensor:
        self.was_read = True
        if self.plain is None:
            raise RuntimeError(f"the {name} of a packed {'.'.join(self.kind)} is read")
        tensor: Tensor = getattr(self.plain, name)
        return tensor

    @property
    def packed_parts(self) -> tuple[Tensor, ...]:
        return () if self._packed is None else self._packed.projection.weight.parts

    def forward(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self.plain is not None
            result: Tensor = self.plain(x)
            return result
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        return self._packed(rows, self.out_dtype).view(*x.shape[:-1], -1)

    def pack(self, dtype: torch.dtype, packing: Packing | None) -> None:
        """Gives up the plain weight, if the kernels take it in this dtype or packing."""
        assert self.plain is not None
        given: Any = self.plain
        weight: Tensor = (given.weight.T if isinstance(given, Conv1D) else given.weight).detach()
        num_columns, depth = weight.shape
        if packing is not None and quantized_shape(num_columns, depth, packing):
            packed = pack_quantized(quantize_weight(weight.float(), packing))
        elif weight.dtype == dtype and packed_shape(num_columns, depth, dtype):
            packed = pack_weight(weight.contiguous())
        else:
            return
        bias = None if given.bias is None else given.bias.detach().float()
        self._packed = PackedLinear(PackedWeight((packed,), num_columns), bias)
        self.plain = None


def watch_linears(model: nn.Module) -> list[WatchedLinear]:
    """Replaces the layers, each once where several modules share it."""
    watched: dict[int, WatchedLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None or type(child) not in (nn.Linear, Conv1D):
                continue
            one = watched.get(id(child)) or WatchedLinear(child, (type(parent).__name__, name))
            watched[id(child)] = one
            setattr(parent, name, one)
    return list(watched.values())


def settle(
    linears: Sequence[WatchedLinear],
    dtype: torch.dtype,
    quantization: Quantization,
    head: nn.Module | None,
) -> None:
    """Packs all that were not read. Quantized ones get 8 bits, or 4 with W4A8, where the head gets 8."""
    if not linears or not runs_packed(dtype, _device_of(linears[0])):
        return
    was_read: defaultdict[tuple[str, str], bool] = defaultdict(bool)
    for one in linears:
        was_read[one.kind] |= one.was_read
    packings = {Quantization.NONE: None, Quantization.W8A8: Packing.INT8, Quantization.W4A8: Packing.INT4}
    for one in linears:
        if not was_read[one.kind]:
            packing = packings[quantization]
            one.pack(dtype, Packing.INT8 if packing is not None and one is head else packing)
    if isinstance(head, WatchedLinear):
        head.out_dtype = torch.float32


def _device_of(one: WatchedLinear) -> torch.device:
    assert one.plain is not None
    return next(one.plain.parameters()).device
