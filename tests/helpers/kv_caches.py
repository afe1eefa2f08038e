"""Caches of random bytes for tests of KV to and from a GPU."""

from __future__ import annotations

import numpy as np
import torch
from kv_groups import kv_group
from tandem_engine.transport.layout import KVLayout

# A frame of one block is 128 KiB: ZeroMQ copies messages below 64 KiB at once.
LAYOUT = KVLayout(
    model_revision="abc",
    dtype="bfloat16",
    kv_quantization="none",
    groups=(kv_group(range(2), 8, 64),),
    block_size=64,
    spec="0123456789abcdef",
)
BLOCK = LAYOUT.max_block_bytes
NUM_BLOCKS = 8


def caches(seed: int | None = None, device: str = "cpu") -> list[torch.Tensor]:
    """Zeros, or random bytes."""
    shape = (NUM_BLOCKS + 1, 2, 8, LAYOUT.block_size, 64)
    size = (LAYOUT.num_layers, 2 * int(np.prod(shape)))
    made = (
        np.zeros(size, np.uint8)
        if seed is None
        else np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    )
    return [torch.from_numpy(layer).view(torch.bfloat16).view(shape).to(device) for layer in made]


def block_bytes(cache: torch.Tensor, block_ids: object) -> bytes:
    return cache.cpu()[torch.tensor(list(block_ids))].view(torch.uint8).numpy().tobytes()  # type: ignore[call-overload]


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Compares bits, because random bytes may be NaN."""
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def fill(cache: torch.Tensor, block: int, value: int) -> None:
    cache[block].view(torch.uint8).fill_(value)
