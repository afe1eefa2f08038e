"""AWQ (arXiv 2306.00978), the gemm layout of AutoAWQ.

    qweight   [K, N / 8] int32       eight codes a word
    qzeros    [K / group, N / 8]     the same
    scales    [K / group, N] float16

weight[n, k] = (code - zero) * scale
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tandem_engine.model_loader.checkpoints.matrix import (
    Matrix,
    Tensors,
    codes_of,
    option,
    refuse,
    require,
)
from tandem_engine.model_loader.stored import Grid, Groups

#: Where the code of each of eight neighbouring columns lies in their word, counted in codes.
_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Matrix]:
    option(config, "bits", 4, [4])
    layout = "version" if "version" in config else "format"
    option(config, layout, "gemm", ["gemm", "GEMM"])
    return matrices(tensors)


def matrices(tensors: Tensors) -> dict[str, Matrix]:
    modules = [name.removesuffix(".qweight") for name in tensors.names() if name.endswith(".qweight")]
    return {f"{module}.weight": _matrix(tensors, module) for module in modules}


def _matrix(tensors: Tensors, module: str) -> Matrix:
    depth, words = require(tensors, f"{module}.qweight", ["I32"], [None, None])
    groups, _ = require(tensors, f"{module}.scales", ["F16", "BF16", "F32"], [None, 8 * words])
    names = [f"{module}.qweight", f"{module}.scales"]
    has_zeros = f"{module}.qzeros" in tensors.names()
    if has_zeros:
        require(tensors, f"{module}.qzeros", ["I32"], [groups, words])
        names.append(f"{module}.qzeros")
    if depth % groups:
        raise refuse(
            tensors, f"{module}.scales", f"has {groups} groups for {depth} inputs, which do not divide"
        )
    group = depth // groups
    grid = Grid(f"AWQ 4 bits/{group}", Groups, 4, group, has_zeros=True)
    return Matrix((8 * words, depth), grid, tuple(names), partial(_read, tensors, module, has_zeros))


def _read(tensors: Tensors, module: str, has_zeros: bool, first: int, end: int) -> Groups:
    words = slice(first // 8, -(-end // 8))
    columns = slice(first % 8, first % 8 + end - first)

    def columns_of(name: str) -> Tensor:
        codes = codes_of(tensors.get(f"{module}.{name}")[:, words], 4)
        codes = codes.view(len(codes), -1, 8)[:, :, _PLACES].flatten(1)
        return codes[:, columns].t().contiguous()

    scales = tensors.get(f"{module}.scales")[:, first:end].t()
    zeros = columns_of("qzeros") if has_zeros else torch.full(scales.shape, 8)
    return Groups(columns_of("qweight"), scales, zeros=zeros)
