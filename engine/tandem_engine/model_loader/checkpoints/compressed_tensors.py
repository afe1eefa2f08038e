"""compressed-tensors, which LLM Compressor writes: the module's tensors tell which of its formats it has.

    pack-quantized    weight_packed [N, K * bits / 32] int32, codes plus half their range; weight_shape [2];
                      weight_scale [N, groups]; weight_zero_point [N * bits / 32, groups] int32, packed too;
                      weight_g_idx [K]: GPTQ's act-order
    int-quantized     weight [N, K] int8, weight_scale, weight_zero_point [N, groups] int8: SmoothQuant's W8A8
    float-quantized   weight [N, K] float8, weight_scale: fp8.py
    nvfp4, mxfp4      weight_packed [N, K / 2] uint8, weight_scale [N, K / 16] float8 or [N, K / 32] uint8;
                      NVFP4: weight_global_scale [1], by which scales are divided

Scales of activations are not used: activations are rounded in groups of 32 (tandem_kernels.packed_linear).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from tandem_core.errors import ModelLoadError, quoted
from torch import Tensor

from tandem_engine.model_loader.checkpoints import fp4, fp8
from tandem_engine.model_loader.checkpoints.gptq import order_of
from tandem_engine.model_loader.checkpoints.matrix import (
    Matrix,
    Tensors,
    codes_of,
    nibbles_of,
    refuse,
    require,
)
from tandem_engine.model_loader.stored import Grid, Groups, Lut

_FLOATS = ["F32", "BF16", "F16"]


def read(config: Mapping[str, Any], tensors: Tensors) -> dict[str, Matrix]:
    _check_config(config)
    found: dict[str, Matrix] = {}
    for name in sorted(tensors.names()):
        if name.endswith(".weight_packed"):
            module = name.removesuffix(".weight_packed")
            make = _packed if tensors.dtype(name) == "I32" else _four_bit_floats
            found[f"{module}.weight"] = make(tensors, module)
        elif name.endswith(".weight") and tensors.dtype(name) == "I8":
            found[name] = _eight_bits(tensors, name)
        elif name.endswith(".weight") and tensors.dtype(name) == "F8_E4M3":
            found[name] = fp8.matrix(tensors, name, f"{name}_scale")
    return found


def _check_config(config: Mapping[str, Any]) -> None:
    sparsity = config.get("sparsity_config")
    layout = sparsity.get("format", "dense") if isinstance(sparsity, Mapping) else "dense"
    groups = config.get("config_groups")
    each = groups.values() if isinstance(groups, Mapping) else ()
    formats = [config.get("format"), *(g.get("format") for g in each if isinstance(g, Mapping))]
    for value in (layout, *formats):
        if value not in (None, "dense") and ("spars" in str(value) or "marlin" in str(value)):
            raise ModelLoadError(
                f"config.json: quantization_config has the format {quoted(str(value))}, and sparse weights "
                "cannot be read; use the model's dense files"
            )
    transforms = config.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise ModelLoadError(
            "config.json: quantization_config.transform_config rotates activations, which is not supported; "
            "use a checkpoint without transforms"
        )


def _packed(tensors: Tensors, module: str) -> Matrix:
    packed, sizes, scale = (f"{module}.weight_{part}" for part in ("packed", "shape", "scale"))
    num_rows, words = require(tensors, packed, ["I32"], [None, None])
    require(tensors, sizes, ["I64", "I32"], [2])
    stored_rows, depth = (int(size) for size in tensors.get(sizes))
    bits = next((bits for bits in (4, 8) if words == -(-depth * bits // 32)), 0)
    if stored_rows != num_rows or not bits:
        raise refuse(
            tensors, sizes, f"is {[stored_rows, depth]}, which {packed} of {[num_rows, words]} does not fit"
        )
    groups = _groups(tensors, scale, num_rows, depth)
    names, zeros = [packed, sizes, scale], f"{module}.weight_zero_point"
    if zeros in tensors.names():
        is_packed = tensors.dtype(zeros) == "I32"
        rows = -(-num_rows * bits // 32) if is_packed else num_rows
        require(tensors, zeros, ["I32", "I8"], [rows, groups])
        names.append(zeros)
    else:
        zeros = ""
    order, g_idx = None, f"{module}.weight_g_idx"
    if g_idx in tensors.names():
        require(tensors, g_idx, ["I32", "I64"], [depth])
        names.append(g_idx)
        order = order_of(tensors, g_idx, groups, depth // groups)
    label = f"W{bits}A16/{depth // groups}" + (" act-order" if order is not None else "")
    grid = Grid(label, Groups, bits, depth // groups, has_zeros=True, has_order=order is not None)
    read_rows = partial(_read_packed, tensors, (packed, scale, zeros), bits, depth, order)
    return Matrix((num_rows, depth), grid, tuple(names), read_rows)


def _read_packed(
    tensors: Tensors,
    names: tuple[str, str, str],
    bits: int,
    depth: int,
    order: Tensor | None,
    first: int,
    end: int,
) -> Groups:
    packed, scale, zero = names
    codes = codes_of(tensors.get(packed)[first:end], bits)[:, :depth]
    scales = tensors.get(scale).reshape(-1, tensors.shape(scale)[-1])
    scales = scales[first:end] if len(scales) > 1 else scales.expand(end - first, -1)
    middle = 1 << (bits - 1)
    zeros = torch.full(scales.shape, middle)
    if zero and tensors.dtype(zero) == "I8":
        zeros = tensors.get(zero)[first:end].to(torch.int16) + middle
    elif zero:
        per_word = 32 // bits
        words = tensors.get(zero)[first // per_word : -(-end // per_word)].t().contiguous()
        zeros = codes_of(words, bits)[:, first % per_word :][:, : end - first].t()
    return Groups(codes if order is None else codes[:, order], scales, zeros=zeros, order=order)


def _groups(tensors: Tensors, scale: str, num_rows: int, depth: int) -> int:
    """The groups of a row whose scales have one of the shapes [1], [N, 1], [N, groups]."""
    shape = tensors.shape(scale) if scale in tensors.names() else (num_rows, 1)
    if shape == (1,):
        return 1
    require(tensors, scale, _FLOATS, [num_rows, None])
    if depth % shape[1]:
        raise refuse(tensors, scale, f"has {shape[1]} groups for {depth} inputs, which do not divide")
    return shape[1]


def _eight_bits(tensors: Tensors, name: str) -> Matrix:
    num_rows, depth = require(tensors, name, ["I8"], [None, None])
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    groups = _groups(tensors, scale, num_rows, depth)
    require(tensors, scale, _FLOATS, tensors.shape(scale) if scale in tensors.names() else [num_rows, groups])
    names, has_zeros = [name, scale], zero in tensors.names()
    if has_zeros:
        require(tensors, zero, ["I8"], tensors.shape(scale))
        names.append(zero)

    def per_row(values: Tensor, first: int, end: int) -> Tensor:
        values = values.reshape(-1, groups)
        return values[first:end] if len(values) > 1 else values.expand(end - first, -1)

    def rows(first: int, end: int) -> Groups:
        codes = (tensors.get(name)[first:end].to(torch.int16) + 128).to(torch.uint8)
        scales = per_row(tensors.get(scale), first, end)
        zeros = torch.full(scales.shape, 128)
        if has_zeros:
            zeros = per_row(tensors.get(zero).to(torch.int16) + 128, first, end)
        return Groups(codes, scales, zeros=zeros)

    grid = Grid(f"W8/{depth // groups}", Groups, 8, depth // groups, has_zeros=True)
    return Matrix((num_rows, depth), grid, tuple(names), rows)


def _four_bit_floats(tensors: Tensors, module: str) -> Matrix:
    packed, scale, top = (f"{module}.weight_{part}" for part in ("packed", "scale", "global_scale"))
    num_rows, half = require(tensors, packed, ["U8"], [None, None])
    is_nv = top in tensors.names()
    if is_nv:
        require(tensors, top, ["F32"], [1])
    grid = fp4.NVFP4 if is_nv else fp4.MXFP4
    if 2 * half % grid.group:
        raise refuse(tensors, packed, f"has {2 * half} inputs, which groups of {grid.group} do not divide")
    require(tensors, scale, ["F8_E4M3"] if is_nv else ["U8"], [num_rows, 2 * half // grid.group])

    def rows(first: int, end: int) -> Lut:
        codes = nibbles_of(tensors.get(packed)[first:end])
        scales = tensors.get(scale)[first:end]
        return fp4.lut(codes, scales.float() / tensors.get(top) if is_nv else fp4.powers_of_two(scales))

    names = (packed, scale, top) if is_nv else (packed, scale)
    return Matrix((num_rows, 2 * half), grid, names, rows)
