"""MXFP4 as gpt-oss has it: `NAME_blocks` [..., N, K / 32, 16] uint8, the lower half of a byte first, and
`NAME_scales` [..., N, K / 32] uint8; the leading dimension, where there is one, counts experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from tandem_engine.model_loader.checkpoints.fp4 import MXFP4, lut, powers_of_two
from tandem_engine.model_loader.checkpoints.matrix import Matrix, Tensors, nibbles_of, require
from tandem_engine.model_loader.stored import Lut


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Matrix]:
    names = [name.removesuffix("_blocks") for name in tensors.names() if name.endswith("_blocks")]
    return {name: _matrix(tensors, name) for name in names}


def _matrix(tensors: Tensors, name: str) -> Matrix:
    blocks = tensors.shape(f"{name}_blocks")
    leading: list[int | None] = [None] * max(len(blocks) - 1, 2)
    require(tensors, f"{name}_blocks", ["U8"], [*leading, 16])
    require(tensors, f"{name}_scales", ["U8"], blocks[:-1])
    shape = (*blocks[:-2], 32 * blocks[-2])
    return Matrix(
        shape, MXFP4, (f"{name}_blocks", f"{name}_scales"), partial(_read, tensors, name, blocks[-2])
    )


def _read(tensors: Tensors, name: str, groups: int, first: int, end: int) -> Lut:
    codes = tensors.get(f"{name}_blocks").reshape(-1, 16 * groups)[first:end]
    scales = tensors.get(f"{name}_scales").reshape(-1, groups)[first:end]
    return lut(nibbles_of(codes), powers_of_two(scales))
