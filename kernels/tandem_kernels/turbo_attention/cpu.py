"""turbo_attention on CPU tensors: the compiled kernel where it covers the call, else torch."""

from __future__ import annotations

import torch

from tandem_kernels.turbo_attention import cpu_native, cpu_torch
from tandem_kernels.turbo_attention.inputs import AttentionInputs


def attend(inputs: AttentionInputs, out: torch.Tensor | None) -> torch.Tensor:
    """Return out [T, Hq, D], or a new tensor when None; see `turbo_attention`."""
    if inputs.query.device.type != "cpu":
        raise ValueError(f'query is on {inputs.query.device}, wanted a CPU tensor for backend "cpu"')
    if cpu_native.supports(inputs):
        return cpu_native.attend(inputs, out)
    return cpu_torch.attend(inputs, out)
