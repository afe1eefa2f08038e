"""The operators in Triton, for CUDA tensors; one module each, named as the operator it serves.

The public operators check shapes and dtypes and come here with CUDA tensors, importing on demand: Triton is
an extra, absent on CPU-only installations. None of these waits for the device, and all can be captured in a
CUDA graph. Attention is in tandem_kernels.turbo_attention.
"""

from __future__ import annotations

import importlib.util

import torch

if importlib.util.find_spec("triton") is None:
    raise ImportError('CUDA tensors need Triton: install the extra, pip install "tandem[gpu]"')


def check_dense(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError for a tensor that is not contiguous; None is nothing to check."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {list(tensor.stride())}, wanted a contiguous tensor")
