"""GPTQ (arXiv 2210.17323), as AutoGPTQ and GPTQModel write it; 2, 4 and 8 bits.

    qweight   [K * bits / 32, N] int32        neighbouring inputs in a word
    qzeros    [groups, N * bits / 32] int32   minus 1, except in gptq_v2
    scales    [groups, N] float16
    g_idx     [K] int32                       the group of each input; may be absent

weight[n, k] = (code - zero) * scale. With act-order (desc_act) inputs are spread over the groups; they are
sorted by group here, and Groups.order keeps where each came from.
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


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Matrix]:
    option(config, "bits", 4, [2, 4, 8])
    version = option(config, "checkpoint_format", "gptq", ["gptq", "gptq_v2"])
    return matrices(config, tensors, less_one=version == "gptq")


def matrices(config: Mapping[str, Any], tensors: Tensors, *, less_one: bool) -> dict[str, Matrix]:
    """less_one: the zero points are stored minus 1."""
    modules = [name.removesuffix(".qweight") for name in tensors.names() if name.endswith(".qweight")]
    return {f"{module}.weight": _matrix(config, tensors, module, less_one) for module in modules}


def _matrix(config: Mapping[str, Any], tensors: Tensors, module: str, less_one: bool) -> Matrix:
    names = tuple(f"{module}.{part}" for part in ("qweight", "qzeros", "scales"))
    words, num_rows = require(tensors, names[0], ["I32"], [None, None])
    groups, _ = require(tensors, names[2], ["F16", "BF16", "F32"], [None, num_rows])
    _, zero_words = require(tensors, names[1], ["I32"], [groups, None])
    # Some checkpoints have more bits in some layers; the zero points' words tell how many.
    bits = 32 * zero_words // num_rows
    if bits not in (2, 4, 8) or 32 * zero_words != bits * num_rows or 32 * words % bits:
        raise refuse(
            tensors, names[1], f"is {[groups, zero_words]}, which fits no 2, 4 or 8 bits for {num_rows} rows"
        )
    depth = 32 * words // bits
    if depth % groups:
        raise refuse(tensors, names[2], f"has {groups} groups for {depth} inputs, which do not divide")
    group, order = depth // groups, None
    if f"{module}.g_idx" in tensors.names():
        require(tensors, f"{module}.g_idx", ["I32", "I64"], [depth])
        names += (f"{module}.g_idx",)
        order = order_of(tensors, f"{module}.g_idx", groups, group)
    name = f"GPTQ {bits} bits/{group}" + (" act-order" if order is not None else "")
    grid = Grid(name, Groups, bits, group, has_zeros=True, has_order=order is not None)
    return Matrix((num_rows, depth), grid, names, partial(_read, tensors, module, bits, less_one, order))


def order_of(tensors: Tensors, name: str, groups: int, group: int) -> Tensor | None:
    """The inputs sorted by their groups; None: they are in order."""
    of_input = tensors.get(name).long()
    if not torch.equal(of_input.sort().values, torch.arange(groups).repeat_interleave(group)):
        raise refuse(tensors, name, f"does not put {group} inputs in each of {groups} groups")
    order = of_input.argsort(stable=True)
    return None if torch.equal(order, torch.arange(len(order))) else order


def _read(
    tensors: Tensors, module: str, bits: int, less_one: bool, order: Tensor | None, first: int, end: int
) -> Groups:
    per_word = 32 // bits
    codes = codes_of(tensors.get(f"{module}.qweight")[:, first:end].t().contiguous(), bits)
    words = slice(first // per_word, -(-end // per_word))
    zeros = codes_of(tensors.get(f"{module}.qzeros")[:, words], bits)
    zeros = zeros[:, first % per_word :][:, : end - first].t()
    if less_one:
        # 0 is stored as the largest code.
        zeros = (zeros + 1) & ((1 << bits) - 1)
    scales = tensors.get(f"{module}.scales")[:, first:end].t()
    return Groups(codes if order is None else codes[:, order], scales, zeros=zeros, order=order)
