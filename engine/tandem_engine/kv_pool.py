"""The KV cache in memory: one tensor per layer, addressed by physical block id.

    caches[layer]   [num_blocks + 1, 2, num_kv_heads, block_size, head_size]
                     block           K|V

One (layer, block) is contiguous, so a KV transfer copies it unchanged. The pool knows neither requests nor
hashes: the block manager decides who owns which block.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from tandem_core.errors import CapacityError
from tandem_kernels import gather_blocks, move_slots_in_layers, scatter_blocks

from tandem_engine.prefault import Prefaulter

#: Default pool size, unless a quarter of the free memory is less.
DEFAULT_POOL_BYTES = 3 << 30
_HUGE_PAGE = 2 << 20


@dataclass(frozen=True)
class KVShape:
    """Shape and element type of the cache of one model."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    #: Whether blocks have the layout of the compiled attention (tandem_kernels.interleaved_cache).
    interleaved: bool = False

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, K and V."""
        return 2 * self.num_kv_heads * self.block_size * self.head_size * self.dtype.itemsize


def default_num_blocks(shape: KVShape) -> int:
    """How many blocks a pool of the default size holds on this machine.

    Raises CapacityError when not even two fit.
    """
    budget = min(DEFAULT_POOL_BYTES, psutil.virtual_memory().available // 4)
    num_blocks: int = budget // (shape.block_bytes * shape.num_layers)
    if num_blocks < 2:
        raise CapacityError(
            f"the KV pool needs {2 * shape.block_bytes * shape.num_layers} bytes for two blocks but only "
            f"{budget} are available; free memory, or choose a smaller model or block size"
        )
    return num_blocks


class KVPool:
    """Owns the cache tensors; implements the transport's BlockStore."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        # One extra block, which the block manager does not know: padding rows of a step write their KV there.
        cache_shape = (num_blocks + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
        self.caches = [_zeros(cache_shape, shape.dtype, device) for _ in range(shape.num_layers)]
        self._prefaulter = Prefaulter(self.caches) if device.type == "cpu" else None

    @property
    def scratch_slot(self) -> int:
        """A slot in the extra block, which nobody owns; it is never read."""
        return self.num_blocks * self.shape.block_size

    def will_use(self, block_id: int) -> None:
        """Pre-faults the pages of blocks up to this one, which are about to be written."""
        if self._prefaulter is not None:
            self._prefaulter.will_use(block_id)

    def gather(self, layer: int, block_ids: Sequence[int]) -> NDArray[np.uint8]:
        """Copies blocks of one layer out: [len(block_ids) * block_bytes] uint8, contiguous."""
        cache = self.caches[layer]
        if cache.device.type == "cpu":
            blocks_out: NDArray[np.uint8] = _block_bytes(cache)[np.asarray(block_ids)]
            return blocks_out.reshape(-1)
        blocks = gather_blocks(cache, torch.tensor(block_ids, dtype=torch.int64, device=cache.device))
        payload: NDArray[np.uint8] = blocks.cpu().view(torch.uint8).reshape(-1).numpy()
        return payload

    def scatter(self, layer: int, block_ids: Sequence[int], payload: memoryview) -> None:
        """Writes the result of a `gather` of the same shape into blocks of one layer."""
        cache = self.caches[layer]
        received = np.frombuffer(payload, dtype=np.uint8)
        if cache.device.type == "cpu":
            self.will_use(max(block_ids, default=0))
            _block_bytes(cache)[np.asarray(block_ids)] = received.reshape(len(block_ids), -1)
            return
        # torch has no read-only tensors, and a received buffer may be read-only.
        blocks = torch.from_numpy(received.copy()).view(cache.dtype).view(len(block_ids), *cache.shape[1:])
        ids = torch.tensor(block_ids, dtype=torch.int64, device=cache.device)
        scatter_blocks(cache, ids, blocks.to(cache.device))

    def move(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """Copies KV between slots (block id * block_size + offset) in every layer."""
        device = self.caches[0].device
        src = torch.tensor(src_slots, dtype=torch.int64, device=device)
        dst = torch.tensor(dst_slots, dtype=torch.int64, device=device)
        move_slots_in_layers(self.caches, src, dst, interleaved=self.shape.interleaved)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, because a NaN in a slot that was never written would pass through a mask as 0 * NaN.

    On the CPU the memory is an anonymous mapping, whose pages are zeroed on first use; torch.zeros writes all
    of it at once, which takes seconds for gigabytes. With huge pages a prompt of 4K tokens faults 50 times
    instead of 25,000.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    # Private, because shared memory, Python's default, gets no huge pages.
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    mapped = np.frombuffer(memory, dtype=np.uint8)
    start = -mapped.ctypes.data % _HUGE_PAGE
    return torch.from_numpy(mapped[start : start + num_bytes]).view(dtype).view(shape)


def _block_bytes(cache: torch.Tensor) -> NDArray[np.uint8]:
    """A CPU cache's memory as [num_blocks, block_bytes]; numpy moves it without torch's dispatch."""
    flat: NDArray[np.uint8] = cache.view(cache.shape[0], -1).view(torch.uint8).numpy()
    return flat
