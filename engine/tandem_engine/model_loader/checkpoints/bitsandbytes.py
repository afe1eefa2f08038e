"""bitsandbytes: NF4 and FP4 (QLoRA, arXiv 2305.14314) and LLM.int8 (arXiv 2208.07339).

4 bits: all codes of the weight in one row, the upper half of a byte first, in blocks of `blocksize`.

    weight                      [N * K / 2, 1] uint8
    weight.absmax               [blocks] float32; nested: uint8, which stand for numbers of nested_quant_map
    weight.quant_map            [16] float32: what a code means
    weight.nested_absmax        [blocks / nested_blocksize] float32, and nested_quant_map [256]
    weight.quant_state.*        JSON as bytes: shape, blocksize, nested_blocksize, nested_offset

8 bits: weight [N, K] int8, SCB [N] float32: weight = code * SCB / 127.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem_engine.model_loader.checkpoints.matrix import Matrix, Tensors, nibbles_of, refuse, require
from tandem_engine.model_loader.stored import Dense, Grid, Groups, Lut

#: Far above a quantization state's size.
_MOST_STATE_BYTES = 1 << 16


class _State(NamedTuple):
    shape: tuple[int, int]
    block: int
    #: 0: the scales are not quantized.
    nested_block: int
    nested_offset: float


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Matrix]:
    found: dict[str, Matrix] = {}
    for name in sorted(tensors.names()):
        weight, is_state, kind = name.partition(".quant_state.bitsandbytes__")
        if is_state:
            found[weight] = _four_bits(tensors, weight, name, kind.upper())
        elif name.endswith(".SCB"):
            module = name.removesuffix(".SCB")
            found[f"{module}.weight"] = _eight_bits(tensors, module)
    return found


def _eight_bits(tensors: Tensors, module: str) -> Matrix:
    names = (f"{module}.weight", f"{module}.SCB", f"{module}.weight_format")
    num_rows, depth = require(tensors, names[0], ["I8"], [None, None])
    require(tensors, names[1], ["F32", "F16", "BF16"], [num_rows])

    def rows(first: int, end: int) -> Groups:
        codes = (tensors.get(names[0])[first:end].to(torch.int16) + 128).to(torch.uint8)
        scales = tensors.get(names[1])[first:end].float().unsqueeze(1) / 127
        return Groups(codes, scales, zeros=torch.full_like(scales, 128))

    return Matrix((num_rows, depth), Grid("LLM.int8", Groups, 8, depth, has_zeros=True), names, rows)


def _four_bits(tensors: Tensors, weight: str, state_name: str, kind: str) -> Matrix:
    state = _state(tensors, state_name)
    num_codes, blocks = math.prod(state.shape), -(-math.prod(state.shape) // state.block)
    names = [weight, f"{weight}.absmax", f"{weight}.quant_map", state_name]
    if num_codes % 2 or tensors.shape(weight) not in ((num_codes // 2, 1), (1, num_codes // 2)):
        raise refuse(
            tensors, weight, f"is {list(tensors.shape(weight))}, which {list(state.shape)} does not fit"
        )
    require(tensors, weight, ["U8"], [None, None])
    require(tensors, names[1], ["U8"] if state.nested_block else ["F32"], [blocks])
    require(tensors, names[2], ["F32"], [16])
    if state.nested_block:
        names += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
        require(tensors, names[4], ["F32"], [-(-blocks // state.nested_block)])
        require(tensors, names[5], ["F32"], [256])
    table = tensors.get(names[2])
    if not table.isfinite().all():
        raise refuse(tensors, names[2], "holds infinite numbers or no numbers")
    depth = state.shape[1]
    # A block that covers the end of a row is a group of no row.
    whole = depth % state.block == 0
    form = Grid(f"{kind}/{state.block}", Lut, 4, state.block, table=tuple(table.tolist()))
    grid = form if whole else Grid(form.name, Dense, 8, depth)
    return Matrix(state.shape, grid, tuple(names), partial(_read, tensors, weight, state, whole))


def _read(tensors: Tensors, weight: str, state: _State, whole: bool, first: int, end: int) -> Lut | Dense:
    depth, block = state.shape[1], state.block
    if not whole:
        # Codes of all blocks that hold a number of these rows.
        from_code, to_code = (
            first * depth // block * block,
            min(-(-end * depth // block) * block, math.prod(state.shape)),
        )
    else:
        from_code, to_code = first * depth, end * depth
    packed = tensors.get(weight).flatten()[from_code // 2 : -(-to_code // 2)]
    codes = nibbles_of(packed, high_first=True)[from_code % 2 :][: to_code - from_code]
    table = tensors.get(f"{weight}.quant_map")
    scales = _scales(tensors, weight, state, from_code // block, -(-to_code // block))
    if whole:
        return Lut(codes.view(end - first, depth), table, scales.view(end - first, -1))
    spread = scales.repeat_interleave(block)[: len(codes)]
    values = (table[codes.int()] * spread)[first * depth - from_code :][: (end - first) * depth]
    return Dense(values.view(end - first, depth))


def _scales(tensors: Tensors, weight: str, state: _State, first: int, end: int) -> Tensor:
    """Those of blocks first .. end - 1."""
    absmax = tensors.get(f"{weight}.absmax")[first:end]
    if not state.nested_block:
        return absmax
    of_block = torch.arange(first, end) // state.nested_block
    steps = tensors.get(f"{weight}.nested_quant_map")[absmax.int()]
    return steps * tensors.get(f"{weight}.nested_absmax")[of_block] + state.nested_offset


def _state(tensors: Tensors, name: str) -> _State:
    (size,) = require(tensors, name, ["U8"], [None])
    try:
        if size > _MOST_STATE_BYTES:
            raise ValueError(f"{size} bytes")
        raw = json.loads(bytes(tensors.get(name).tolist()))
        num_rows, depth = (int(n) for n in raw["shape"])
        state = _State(
            (num_rows, depth),
            int(raw["blocksize"]),
            int(raw.get("nested_blocksize") or 0),
            float(raw.get("nested_offset") or 0.0),
        )
        if min(num_rows, depth, state.block) < 1 or state.nested_block < 0 or state.block % 2:
            raise ValueError("sizes out of range")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise refuse(tensors, name, f"is no quantization state ({type(error).__name__})") from None
    return state
