"""Weights in float8 (e4m3): DeepSeek's blocks of 128 x 128, scales per tensor, and per row.

weight             [N, K] float8_e4m3fn
weight_scale_inv   [N / 128, K / 128] float32: factors of blocks, in spite of the name
weight_scale       [], [1], [N] or [N, 1], or of blocks too
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tandem_core.errors import ModelLoadError, quoted
from torch import Tensor

from tandem_engine.model_loader.checkpoints.matrix import Matrix, Tensors, refuse, require
from tandem_engine.model_loader.stored import Dense, Grid

_FLOATS = ["F32", "BF16", "F16"]


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Matrix]:
    block = config.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
    ):
        raise ModelLoadError(
            f"config.json: quantization_config.weight_block_size is {quoted(str(block))}, wanted two sizes; "
            "pull the model again"
        )
    found = {}
    for name in sorted(tensors.names()):
        if name.endswith(".weight") and tensors.dtype(name) == "F8_E4M3":
            inverse = f"{name}_scale_inv"
            scale = inverse if inverse in tensors.names() else f"{name}_scale"
            found[name] = matrix(tensors, name, scale, tuple(block) if block else (128, 128))
    return found


def matrix(tensors: Tensors, name: str, scale: str, block: tuple[int, int] = (128, 128)) -> Matrix:
    """The weight `name`, whose scales are in `scale`; block: rows and columns of a block, where they have
    blocks."""
    num_rows, depth = require(tensors, name, ["F8_E4M3"], [None, None])
    dims = len(tensors.shape(scale)) if scale in tensors.names() else 1
    shape = require(tensors, scale, _FLOATS, [None] * min(dims, 2))
    in_blocks = (-(-num_rows // block[0]), -(-depth // block[1]))
    known = ((), (1,), (1, 1), (num_rows,), (num_rows, 1), in_blocks)
    if shape not in known:
        raise refuse(tensors, scale, f"is {list(shape)}, wanted one of {[list(s) for s in known]}")
    size = block if shape == in_blocks else (num_rows if shape in ((), (1,), (1, 1)) else 1, depth)
    label = f"fp8/{size[0]}x{size[1]}" if shape == in_blocks else "fp8 per row" if size[0] == 1 else "fp8"
    grid = Grid(label, Dense, 8, depth)
    return Matrix((num_rows, depth), grid, (name, scale), partial(_read, tensors, name, scale, size))


def _read(tensors: Tensors, name: str, scale: str, size: tuple[int, int], first: int, end: int) -> Dense:
    values = tensors.get(name)[first:end].float()
    scales = tensors.get(scale).float().reshape(-(-tensors.shape(name)[0] // size[0]), -1)
    return Dense(values * spread_blocks(scales, size, first, end, values.shape[1]))


def spread_blocks(scales: Tensor, size: tuple[int, int], first: int, end: int, depth: int) -> Tensor:
    """[blocks, blocks] -> [end - first, depth], for rows from `first` on."""
    start = first // size[0]
    rows = scales[start : -(-end // size[0])].repeat_interleave(size[0], 0)[first - start * size[0] :]
    return rows[: end - first].repeat_interleave(size[1], 1)[:, :depth]
