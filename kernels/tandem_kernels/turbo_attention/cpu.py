"""turbo_attention on CPU tensors: the compiled kernel where it covers the call, else torch."""

from __future__ import annotations

import torch

from tandem_kernels.interleaved_cache import runs_interleaved
from tandem_kernels.turbo_attention import cpu_native, cpu_torch
from tandem_kernels.turbo_attention.inputs import AttentionInputs


def attend(inputs: AttentionInputs, out: torch.Tensor | None, interleaved: bool) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    if inputs.query.device.type != "cpu":
        raise ValueError(f'query is on {inputs.query.device}, wanted a CPU tensor for backend "cpu"')
    cache = inputs.kv_cache
    if interleaved and not (
        cache.dtype == inputs.query.dtype
        and cache.is_contiguous()
        and runs_interleaved(cache.dtype, cache.shape[4], inputs.block_size)
    ):
        raise ValueError(
            f"kv_cache has dtype {cache.dtype}, shape {list(cache.shape)} and strides {list(cache.stride())} "
            f"and cannot be read interleaved; wanted a contiguous one of {inputs.query.dtype}, for which "
            "runs_interleaved says True"
        )
    if cpu_native.supports(inputs):
        return cpu_native.attend(inputs, out, interleaved)
    return cpu_torch.attend(inputs, out)
