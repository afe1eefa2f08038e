"""What a step copies between host and device, and the one place where the engine waits for the device.

A copy from or to pinned memory is asynchronous; any other stops the host until all work before it is done.
torch reuses pinned memory only after the copies of it have ended.
"""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


def staging(num_bytes: int, device: torch.device) -> Tensor:
    """Zeroed bytes on the host for copies to the device; pinned for CUDA."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """A copy on the device, without waiting for it."""
    source = torch.from_numpy(array)
    if device.type == "cpu":
        return source
    staged = torch.empty(source.shape, dtype=source.dtype, pin_memory=True).copy_(source)
    return torch.empty(source.shape, dtype=source.dtype, device=device).copy_(staged, non_blocking=True)


def to_host(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Copies tensors to the CPU: starts all copies, then waits once until the device has done all its
    work."""
    if tensors[0].device.type == "cpu":
        return tensors
    copies = tuple(
        torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in tensors
    )
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies
