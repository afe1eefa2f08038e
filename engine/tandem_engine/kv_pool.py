"""The KV cache in memory: one tensor per layer, addressed by physical block id of the layer's group.

    caches[layer]   [num_blocks + 1, 2, num_kv_heads, block_size, head_size]
                     block           K|V

One (layer, block) is contiguous, so a KV transfer copies it unchanged. The pool knows neither requests nor
hashes: the block manager decides who owns which block.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tandem_core.errors import CapacityError, InvariantError
from tandem_core.model.spec import CacheGroup, ModelSpec
from tandem_core.usable_cpus import usable_cpus
from tandem_kernels import move_slots_in_layers

from tandem_engine import device_copies
from tandem_engine.block_manager import BlockCopy
from tandem_engine.gpu_block_store import CopyCounts, CudaStreams, Event, GpuBlockStore
from tandem_engine.prefault import Prefaulter
from tandem_engine.transport.base import MAX_FRAME_BYTES, PendingRead

#: Default pool size on a CPU, where memory allows it (memory.py).
DEFAULT_POOL_BYTES = 3 << 30
_HUGE_PAGE = 2 << 20
_GIB = 1 << 30
#: Most connections to a peer; each takes up to a core at both ends while KV flows.
MAX_CONNECTIONS = 8
#: Tokens of cached text per window that is kept for its end.
_CACHED_TEXT_TOKENS = 4096
#: Memory of the driver for one graph of a decode step.
_GRAPH_BYTES = 16 << 20


@dataclass(frozen=True)
class KVShape:
    """Shape and element type of the caches of a group of layers."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: torch.dtype
    #: Whether blocks have the layout of the compiled attention (tandem_kernels.interleaved_cache).
    interleaved: bool = False
    #: The layers' numbers among those with keys and values; by default the first ones.
    layers: tuple[int, ...] = ()
    #: Keys that a query sees, its own included; None: all.
    window: int | None = None

    def __post_init__(self) -> None:
        if not self.layers:
            object.__setattr__(self, "layers", tuple(range(self.num_layers)))

    @classmethod
    def of_group(
        cls, group: CacheGroup, block_size: int, dtype: torch.dtype, *, interleaved: bool = False
    ) -> KVShape:
        """The shape of layers with keys and values of one size."""
        num_kv_heads, head_size = group.parts[0].shape
        return cls(
            len(group.layers),
            num_kv_heads,
            head_size,
            block_size,
            dtype,
            interleaved,
            group.layers,
            group.window,
        )

    @classmethod
    def of(
        cls, spec: ModelSpec, block_size: int, dtype: torch.dtype, *, interleaved: bool = False
    ) -> KVShape:
        """The shapes of a model whose layers have keys and values of one shape (models.decoder.supports)."""
        first = spec.attentions[0]
        return cls(len(spec.attentions), first.kv_heads, first.k_dim, block_size, dtype, interleaved)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in one layer, K and V."""
        return 2 * self.num_kv_heads * self.block_size * self.head_size * self.dtype.itemsize

    @property
    def all_layers_bytes(self) -> int:
        """Bytes of one block in all layers of the group."""
        return self.block_bytes * self.num_layers


@dataclass(frozen=True)
class PoolSizes:
    """How many blocks each group gets, given those that hold whole texts.

    A window holds a bounded part of each running sequence. What is left of its pool keeps the windows at the
    ends of cached texts, without which their prefix could not be continued.
    """

    shapes: tuple[KVShape, ...]
    max_seqs: int
    #: Tokens of one sequence in a step.
    max_step_tokens: int

    def num_blocks(self, num_blocks: int) -> list[int]:
        """Blocks of each group, when texts have `num_blocks`."""
        if all(shape.window is not None for shape in self.shapes):
            return [num_blocks] * len(self.shapes)
        return [min(num_blocks, self._for_window(shape, num_blocks)) for shape in self.shapes]

    def _for_window(self, shape: KVShape, num_blocks: int) -> int:
        if shape.window is None:
            return num_blocks
        running = -(-(shape.window + self.max_step_tokens) // shape.block_size) + 1
        return self.max_seqs * running + -(-num_blocks * shape.window // _CACHED_TEXT_TOKENS)

    def num_bytes(self, num_blocks: int) -> int:
        """Bytes of all groups, without the scratch blocks."""
        sizes = zip(self.shapes, self.num_blocks(num_blocks), strict=True)
        return sum(shape.all_layers_bytes * size for shape, size in sizes)

    @property
    def scratch_bytes(self) -> int:
        return sum(shape.all_layers_bytes for shape in self.shapes)

    def fitting(self, num_bytes: int) -> int:
        """The largest number of blocks for texts whose pools, without the scratch blocks, take num_bytes."""
        least = min(shape.all_layers_bytes for shape in self.shapes)
        candidates = range(1, max(num_bytes, 0) // least + 2)
        return bisect_right(candidates, num_bytes, key=self.num_bytes)


def default_num_blocks(sizes: PoolSizes, most_bytes: int) -> int:
    """How many blocks for texts a pool of the default size holds that may take `most_bytes`.

    Raises CapacityError when not even two fit.
    """
    budget = min(DEFAULT_POOL_BYTES, most_bytes)
    num_blocks = sizes.fitting(budget)
    if num_blocks < 2:
        raise CapacityError(
            f"the KV pool needs {sizes.num_bytes(2)} bytes for two blocks but only "
            f"{budget} are available; free memory, or choose a smaller model or block size"
        )
    return num_blocks


@dataclass(frozen=True)
class GpuMemory:
    """What decides the size of a pool on a GPU, in bytes."""

    total: int
    #: With weights, workspaces and whatever other processes hold already allocated.
    free: int
    #: Most that a step allocates and frees again.
    activations: int
    #: Kept for CUDA graphs.
    graphs: int


def graph_reserve(num_graphs: int, activations: int) -> int:
    """Bytes to keep for CUDA graphs: their own intermediate results, at most as large as an eager step's, and
    what the driver keeps for each.
    """
    return activations + num_graphs * _GRAPH_BYTES if num_graphs else 0


def gpu_num_blocks(shape: KVShape, memory: GpuMemory, utilization: float) -> int:
    """How many blocks fit on a GPU, of whose memory all processes together may use this share.

    Raises CapacityError when not even two fit.
    """
    all_layers = shape.all_layers_bytes
    left_free = memory.total - int(memory.total * utilization)
    budget = memory.free - left_free - memory.activations - memory.graphs
    # One more is the scratch block.
    num_blocks = budget // all_layers - 1
    if num_blocks < 2:
        raise CapacityError(
            f"the KV pool needs {3 * all_layers / _GIB:.2f} GiB for two blocks but gets "
            f"{max(budget, 0) / _GIB:.2f}: of the GPU's {memory.total / _GIB:.2f} GiB, "
            f"{memory.free / _GIB:.2f} are free, {left_free / _GIB:.2f} stay unused at "
            f"--gpu-memory-utilization {utilization:g}, a step takes {memory.activations / _GIB:.2f} and "
            f"CUDA graphs {memory.graphs / _GIB:.2f}; raise --gpu-memory-utilization, lower --chunk-size or "
            "--max-batch, end other processes on the GPU, or choose a smaller model"
        )
    return num_blocks


class GroupPool:
    """The cache tensors of one group; layers count within it."""

    def __init__(self, shape: KVShape, num_blocks: int, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        # One extra block, which the block manager does not know: padding rows of a step write their KV there.
        cache_shape = (num_blocks + 1, 2, shape.num_kv_heads, shape.block_size, shape.head_size)
        self._layers: torch.Tensor | list[torch.Tensor]
        if device.type == "cpu":
            self._layers = [_zeros(cache_shape, shape.dtype) for _ in range(shape.num_layers)]
        else:
            # One tensor: a kernel then reaches all layers.
            self._layers = torch.zeros((shape.num_layers, *cache_shape), dtype=shape.dtype, device=device)
        self.caches = list(self._layers)
        self._prefaulter = Prefaulter(self.caches) if device.type == "cpu" else None
        self._gpu = GpuBlockStore(self.caches, CudaStreams(device)) if device.type == "cuda" else None
        if self._gpu is not None:
            # Loads the kernels of both directions, which may stall the device, before there is traffic.
            payload = self._gpu.gather(0, [num_blocks]).wait()
            self._gpu.scatter(0, [num_blocks], payload)()

    @property
    def scratch_slot(self) -> int:
        """A slot in the extra block, which is in no block table; it is never read."""
        return self.num_blocks * self.shape.block_size

    def will_use(self, block_id: int) -> None:
        """Pre-faults the pages of blocks up to this one, which are about to be written."""
        if self._prefaulter is not None:
            self._prefaulter.will_use(block_id)

    @property
    def gpu(self) -> GpuBlockStore | None:
        return self._gpu

    def gather(
        self, layer: int, block_ids: Sequence[int], after: Any = None
    ) -> NDArray[np.uint8] | PendingRead:
        """Copies blocks of one layer out: [len(block_ids) * block_bytes] uint8, contiguous."""
        if self._gpu is not None:
            return self._gpu.gather(layer, block_ids, after)
        blocks: NDArray[np.uint8] = _block_bytes(self.caches[layer])[np.asarray(block_ids)]
        return blocks.reshape(-1)

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: Any = None
    ) -> Callable[[], None] | None:
        """Writes the result of a `gather` of the same shape into blocks of one layer."""
        if self._gpu is not None:
            return self._gpu.scatter(layer, block_ids, payload, after)
        self.will_use(max(block_ids, default=0))
        received = np.frombuffer(payload, dtype=np.uint8)
        _block_bytes(self.caches[layer])[np.asarray(block_ids)] = received.reshape(len(block_ids), -1)
        return None

    def move(self, src_slots: Sequence[int], dst_slots: Sequence[int]) -> None:
        """Copies KV between slots (block id * block_size + offset) in every layer.

        No destination may be the source of a later move.
        """
        slots = np.array([src_slots, dst_slots], dtype=np.int64)
        src, dst = device_copies.to_device(slots, self.caches[0].device).unbind()
        move_slots_in_layers(self._layers, src, dst, interleaved=self.shape.interleaved)


class KVPool:
    """The caches of all groups, with layers by their number among those with keys and values; implements the
    transport's BlockStore.

    shapes, num_blocks: of each group.
    """

    def __init__(self, shapes: Sequence[KVShape], num_blocks: Sequence[int], device: torch.device) -> None:
        self.groups = tuple(
            GroupPool(shape, size, device) for shape, size in zip(shapes, num_blocks, strict=True)
        )
        self._places = {
            layer: (group, index) for group in self.groups for index, layer in enumerate(group.shape.layers)
        }
        if sorted(self._places) != list(range(sum(shape.num_layers for shape in shapes))):
            raise InvariantError("every layer is in one group of the KV pool")
        #: By layer.
        self.caches = [group.caches[index] for _, (group, index) in sorted(self._places.items())]
        self._gpu = self.groups[0].gpu

    @property
    def max_frame_bytes(self) -> int:
        return MAX_FRAME_BYTES if self._gpu is None else self._gpu.max_frame_bytes

    @property
    def num_connections(self) -> int:
        """Connections to a peer for transfers. A GPU computes KV faster than one connection encrypts it."""
        if self._gpu is None:
            return 1
        return max(1, min(MAX_CONNECTIONS, usable_cpus() // 2))

    @property
    def copy_counts(self) -> CopyCounts | None:
        """Counts of a GPU's transfers."""
        return None if self._gpu is None else self._gpu.counts

    def mark(self) -> Event | None:
        return None if self._gpu is None else self._gpu.mark()

    def gather(
        self, layer: int, block_ids: Sequence[int], after: Any = None
    ) -> NDArray[np.uint8] | PendingRead:
        group, index = self._places[layer]
        return group.gather(index, block_ids, after)

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: Any = None
    ) -> Callable[[], None] | None:
        group, index = self._places[layer]
        return group.scatter(index, block_ids, payload, after)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copies the beginnings of blocks in every layer of their groups. No destination may be a source."""
        for g, group in enumerate(self.groups):
            if own := [c for c in copies if c.group == g]:
                group.will_use(max(c.destination for c in own))
                size = group.shape.block_size
                group.move(
                    [c.source * size + i for c in own for i in range(c.num_slots)],
                    [c.destination * size + i for c in own for i in range(c.num_slots)],
                )


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, because a NaN in a slot that was never written would pass through a mask as 0 * NaN.

    The memory is an anonymous mapping, whose pages are zeroed on first use; torch.zeros writes all of it at
    once, which takes seconds for gigabytes. With huge pages a prompt of 4K tokens faults 50 times instead of
    25,000.
    """
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
