"""Writes quantized checkpoints, each format from its description, and the numbers that they hold.

`FORMATS` maps a name to (quantization_config, writer). A writer turns a module's weight [N, K] into its
tensors and the weight's values as the format defines them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

Tensors = dict[str, Tensor]
E2M1 = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
#: The quantiles of a normal distribution that QLoRA's authors chose.
NF4 = torch.tensor(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
        0.7229568362236023, 1.0,
    ]
)  # fmt: skip


def words_of(codes: Tensor, bits: int) -> Tensor:
    """[..., n] -> [..., n * bits / 32] int32, the first code in the lowest bits."""
    codes = codes.to(torch.int64).unflatten(-1, (-1, 32 // bits))
    words = sum(codes[..., n] << (bits * n) for n in range(32 // bits))
    assert isinstance(words, Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def rounded(
    weight: Tensor, group: int, bits: int, *, symmetric: bool = False, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [N, K], scales and zeros [N, K / group], and the values."""
    groups = weight.float().unflatten(1, (-1, group))
    top = (1 << bits) - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (top // 2)).to(dtype)
        zeros = torch.full(scales.shape, (top + 1) // 2)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    steps, middle = scales.float().unsqueeze(2), zeros.float().unsqueeze(2)
    codes = (groups / steps + middle).round().clamp(0, top)
    values = (codes - middle) * steps
    return codes.flatten(1).long(), scales, zeros, values.flatten(1)


def awq(module: str, weight: Tensor, group: int = 64) -> tuple[Tensors, Tensor]:
    codes, scales, zeros, values = rounded(weight, group, 4)

    def packed(columns: Tensor) -> Tensor:
        return words_of(columns.unflatten(1, (-1, 8))[:, :, [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1), 4)

    tensors = {"qweight": packed(codes.t()), "qzeros": packed(zeros.t()), "scales": scales.t().contiguous()}
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, values


def inputs_by_group(depth: int) -> Tensor:
    """A permutation of the inputs, of which neighbours share a group; the same for modules of one depth."""
    return torch.randperm(depth, generator=torch.Generator().manual_seed(depth))


def gptq(
    module: str,
    weight: Tensor,
    group: int = 64,
    bits: int = 4,
    *,
    act_order: bool = False,
    less_one: bool = True,
    symmetric: bool = False,
) -> tuple[Tensors, Tensor]:
    depth = weight.shape[1]
    order = torch.arange(depth)
    if act_order:
        order = inputs_by_group(depth)
    codes, scales, zeros, values = rounded(weight[:, order], group, bits, symmetric=symmetric)
    natural, g_idx = torch.empty_like(codes), torch.empty(depth, dtype=torch.int32)
    natural[:, order] = codes
    g_idx[order] = (torch.arange(depth) // group).int()
    dense = torch.empty_like(values)
    dense[:, order] = values
    stored_zeros = (zeros - int(less_one)) & ((1 << bits) - 1)
    tensors = {
        "qweight": words_of(natural, bits).t().contiguous(),
        "qzeros": words_of(stored_zeros.t(), bits),
        "scales": scales.t().contiguous(),
        "g_idx": g_idx,
    }
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, dense


def pack_quantized(
    module: str,
    weight: Tensor,
    group: int = 64,
    bits: int = 4,
    *,
    symmetric: bool = True,
    act_order: bool = False,
) -> tuple[Tensors, Tensor]:
    depth = weight.shape[1]
    order = inputs_by_group(depth) if act_order else torch.arange(depth)
    codes, scales, zeros, values = rounded(
        weight[:, order], group, bits, symmetric=symmetric, dtype=torch.bfloat16
    )
    natural, dense = torch.empty_like(codes), torch.empty_like(values)
    natural[:, order], dense[:, order] = codes, values
    tensors = {
        "weight_packed": words_of(natural, bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        tensors["weight_zero_point"] = words_of(zeros.t(), bits).t().contiguous()
    if act_order:
        g_idx = torch.empty(depth, dtype=torch.int32)
        g_idx[order] = (torch.arange(depth) // group).int()
        tensors["weight_g_idx"] = g_idx
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}, dense


def int_quantized(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).to(torch.bfloat16)
    codes = (weight / scales.float()).round().clamp(-128, 127)
    return {
        f"{module}.weight": codes.to(torch.int8), f"{module}.weight_scale": scales
    }, codes * scales.float()  # fmt: skip


def float_quantized(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scales = (weight.float().abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    codes = (weight / scales.float()).to(torch.float8_e4m3fn)
    return {f"{module}.weight": codes, f"{module}.weight_scale": scales}, codes.float() * scales.float()


def fp8_blocks(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    """Blocks of 128 x 128; the last ones are smaller."""
    num_rows, depth = weight.shape
    scales = torch.empty(-(-num_rows // 128), -(-depth // 128))
    codes, values = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(weight.shape)
    for n in range(scales.shape[0]):
        for k in range(scales.shape[1]):
            rows, columns = slice(128 * n, 128 * n + 128), slice(128 * k, 128 * k + 128)
            scales[n, k] = weight[rows, columns].abs().max() / 448
            codes[rows, columns] = (weight[rows, columns] / scales[n, k]).to(torch.float8_e4m3fn)
            values[rows, columns] = codes[rows, columns].float() * scales[n, k]
    return {f"{module}.weight": codes, f"{module}.weight_scale_inv": scales}, values


def fp8_tensor(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(1.0)}
    return {f"{module}.{name}": t for name, t in tensors.items()}, codes.float() * scale


def nearest(values: Tensor, table: Tensor) -> Tensor:
    """Index of the nearest number of the table, which is sorted."""
    middles = (table[1:] + table[:-1]) / 2
    return torch.bucketize(values, middles)


def e2m1(values: Tensor) -> Tensor:
    codes = nearest(values.abs(), E2M1)
    return codes | (values < 0).long() << 3


def halves(codes: Tensor, *, high_first: bool = False) -> Tensor:
    first, second = codes.unflatten(-1, (-1, 2)).unbind(-1)
    return ((first << 4 | second) if high_first else (second << 4 | first)).to(torch.uint8)


def values_of_e2m1(codes: Tensor) -> Tensor:
    return torch.cat([E2M1, -E2M1])[codes]


def mxfp4_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], exponents [N, K / 32] and values."""
    groups = weight.float().unflatten(1, (-1, 32))
    exponents = (groups.abs().amax(2) / 6).log2().ceil().clamp(-126, 127)
    scales = exponents.exp2().unsqueeze(2)
    codes = e2m1(groups / scales)
    return codes.flatten(1), (exponents + 127).to(torch.uint8), (values_of_e2m1(codes) * scales).flatten(1)


def mxfp4_packed(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    codes, exponents, values = mxfp4_groups(weight)
    return {f"{module}.weight_packed": halves(codes), f"{module}.weight_scale": exponents}, values


def nvfp4_packed(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    groups = weight.float().unflatten(1, (-1, 16))
    top = 448 * 6 / groups.abs().max()
    scales = (groups.abs().amax(2) / 6 * top).to(torch.float8_e4m3fn)
    steps = (scales.float() / top).unsqueeze(2)
    codes = e2m1(groups / steps)
    tensors = {
        "weight_packed": halves(codes.flatten(1)), "weight_scale": scales,
        "weight_global_scale": top.reshape(1),
    }  # fmt: skip
    return {f"{module}.{name}": t for name, t in tensors.items()}, (values_of_e2m1(codes) * steps).flatten(1)


def nf4(module: str, weight: Tensor, *, nested: bool = True, block: int = 64) -> tuple[Tensors, Tensor]:
    blocks = torch.nn.functional.pad(weight.float().flatten(), (0, -weight.numel() % block)).view(-1, block)
    absmax = blocks.abs().amax(1)
    name, state = (
        f"{module}.weight",
        {"quant_type": "nf4", "blocksize": block, "dtype": "float32", "shape": list(weight.shape)},
    )
    tensors = {f"{name}.quant_map": NF4.clone()}
    if nested:
        offset = float(absmax.mean())
        steps = torch.linspace(-1, 1, 256)
        padded = torch.nn.functional.pad(absmax - offset, (0, -len(absmax) % 256)).view(-1, 256)
        tops = padded.abs().amax(1)
        codes = nearest(padded / tops.unsqueeze(1), steps)
        absmax = (steps[codes] * tops.unsqueeze(1) + offset).flatten()[: len(absmax)]
        tensors |= {
            f"{name}.absmax": codes.flatten()[: len(absmax)].to(torch.uint8),
            f"{name}.nested_absmax": tops,
            f"{name}.nested_quant_map": steps,
        }
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    else:
        tensors[f"{name}.absmax"] = absmax
    codes = nearest(blocks / absmax.unsqueeze(1), NF4)
    values = (NF4[codes] * absmax.unsqueeze(1)).flatten()[: weight.numel()].view_as(weight)
    tensors[name] = halves(codes.flatten()[: weight.numel()], high_first=True).unsqueeze(1)
    text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {f"{name}.quant_state.bitsandbytes__nf4": text}, values


def llm_int8(module: str, weight: Tensor) -> tuple[Tensors, Tensor]:
    tops = weight.float().abs().amax(1)
    codes = (weight / tops.unsqueeze(1) * 127).round()
    tensors = {
        f"{module}.weight": codes.to(torch.int8), f"{module}.SCB": tops,
        f"{module}.weight_format": torch.tensor(0, dtype=torch.uint8),
    }  # fmt: skip
    return tensors, codes * (tops / 127).unsqueeze(1)


class Format(NamedTuple):
    config: dict[str, Any]
    write: Callable[[str, Tensor], tuple[Tensors, Tensor]]


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False}
_CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}
_BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
FORMATS: dict[str, Format] = {
    "awq": Format(_AWQ, awq),
    "gptq": Format(_GPTQ, gptq),
    "gptq v2": Format(_GPTQ | {"checkpoint_format": "gptq_v2"}, lambda m, w: gptq(m, w, less_one=False)),
    "gptq act-order": Format(
        _GPTQ | {"desc_act": True, "sym": True}, lambda m, w: gptq(m, w, act_order=True, symmetric=True)
    ),
    "gptq 8 bits": Format(_GPTQ | {"bits": 8, "sym": True}, lambda m, w: gptq(m, w, bits=8, symmetric=True)),
    "auto-round": Format(
        {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_awq"}, awq
    ),
    "w4a16": Format(_CT | {"format": "pack-quantized"}, pack_quantized),
    "w4a16 zeros": Format(
        _CT | {"format": "pack-quantized"}, lambda m, w: pack_quantized(m, w, symmetric=False)
    ),
    "w4a16 act-order": Format(
        _CT | {"format": "pack-quantized"}, lambda m, w: pack_quantized(m, w, act_order=True)
    ),
    "w8a8": Format(_CT | {"format": "int-quantized"}, int_quantized),
    "fp8 rows": Format(_CT | {"format": "float-quantized"}, float_quantized),
    "nvfp4": Format(_CT | {"format": "nvfp4-pack-quantized"}, nvfp4_packed),
    "mxfp4": Format(_CT | {"format": "mxfp4-pack-quantized"}, mxfp4_packed),
    "fp8 blocks": Format({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8_blocks),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "nf4": Format(_BNB4 | {"bnb_4bit_use_double_quant": True}, nf4),
    "nf4 plain": Format(_BNB4, lambda m, w: nf4(m, w, nested=False)),
    "llm.int8": Format({"quant_method": "bitsandbytes", "load_in_8bit": True}, llm_int8),
}


def write_quantized(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor], format_: Format
) -> Tensors:
    """A checkpoint of these weights, with quantized projections. Returns the values that it holds."""
    folder.mkdir(parents=True, exist_ok=True)
    stored: Tensors = {}
    values: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            made, values[name] = format_.write(name.removesuffix(".weight"), tensor)
            stored |= made
        else:
            stored[name] = values[name] = tensor
    save_file({name: t.contiguous() for name, t in stored.items()}, folder / "model.safetensors")
    text = json.dumps({**config, "quantization_config": format_.config}, indent=2)
    (folder / "config.json").write_text(text)
    return values
