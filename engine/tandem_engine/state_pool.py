"""The memory of recurrent states: slots of all layers that have one (state_slots.py assigns them)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray
from tandem_core.errors import InvariantError
from tandem_core.model.spec import CacheGroup, CacheKind, ModelSpec

from tandem_engine.kv_pool import KVPool
from tandem_engine.transport.base import ByteArray, Mark, PendingRead

#: Memory of snapshots that a pod has besides the slots of its sequences; with Qwen3.5-9B 20 of them.
SNAPSHOT_BYTES = 1 << 30
MAX_SNAPSHOTS = 4096


class StatePool:
    """The memory of the slots: of each layer one tensor per part of the group, [num_slots, *shape].

    dtype: of parts of type "kv".
    """

    def __init__(self, group: CacheGroup, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.num_slots = num_slots
        #: Each layer's parts, in the order of the group's.
        self.layers = [
            tuple(
                torch.zeros(num_slots, *part.shape, dtype=_dtype(part.dtype, dtype), device=device)
                for part in group.parts
            )
            for _ in group.layers
        ]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one slot in one layer."""
        return sum(part[0].nbytes for part in self.layers[0])

    def gather(self, layer: int, slot: int) -> NDArray[np.uint8]:
        """A slot's bytes in one layer of the group: its parts one after the other."""
        parts = [part[slot].reshape(-1).view(torch.uint8).cpu() for part in self.layers[layer]]
        joined: NDArray[np.uint8] = torch.cat(parts).numpy()
        return joined

    def scatter(self, layer: int, slot: int, payload: memoryview) -> None:
        """Writes the result of a `gather`."""
        received = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8).copy())
        if received.numel() != self.layer_bytes:
            raise InvariantError(f"a state of {received.numel()} bytes arrived, wanted {self.layer_bytes}")
        begin = 0
        for part in self.layers[layer]:
            end = begin + part[slot].nbytes
            part[slot].copy_(received[begin:end].view(part.dtype).view(part.shape[1:]))
            begin = end


class LayerStore:
    """Blocks and states of a model's layers as a transport reads and writes them (transport.base.BlockStore):
    the block ids of a layer with a state are slots."""

    def __init__(self, pool: KVPool, states: StatePool, spec: ModelSpec) -> None:
        self._pool, self._states = pool, states
        group = state_group(spec)
        recurrent = () if group is None else group.layers
        self._state_of = {layer: n for n, layer in enumerate(recurrent)}
        attention = [layer for layer in range(len(spec.cached)) if layer not in self._state_of]
        self._cache_of = {layer: n for n, layer in enumerate(attention)}

    @property
    def max_frame_bytes(self) -> int:
        return self._pool.max_frame_bytes

    def mark(self) -> Mark | None:
        return self._pool.mark()

    def gather(
        self, layer: int, block_ids: Sequence[int], after: object | None = None
    ) -> memoryview | ByteArray | PendingRead:
        if layer in self._state_of:
            return np.concatenate([self._states.gather(self._state_of[layer], slot) for slot in block_ids])
        return self._pool.gather(self._cache_of[layer], block_ids, after)

    def scatter(
        self, layer: int, block_ids: Sequence[int], payload: memoryview, after: object | None = None
    ) -> Callable[[], None] | None:
        if layer not in self._state_of:
            return self._pool.scatter(self._cache_of[layer], block_ids, payload, after)
        size = self._states.layer_bytes
        for n, slot in enumerate(block_ids):
            self._states.scatter(self._state_of[layer], slot, payload[n * size : (n + 1) * size])
        return None


def state_group(spec: ModelSpec) -> CacheGroup | None:
    """The layers of a model that have recurrent states; of one shape (models.decoder.supports)."""
    return next((group for group in spec.cache_groups() if group.kind is CacheKind.STATE), None)


def slot_bytes(group: CacheGroup, dtype: torch.dtype) -> int:
    """Bytes of one slot in all layers."""
    of_layer = sum(prod(part.shape) * _dtype(part.dtype, dtype).itemsize for part in group.parts)
    return len(group.layers) * of_layer


def num_state_slots(group: CacheGroup, dtype: torch.dtype, max_seqs: int) -> int:
    """Two for each sequence of a full batch, the live one and the copy, and SNAPSHOT_BYTES of snapshots."""
    return 2 * max_seqs + min(max(SNAPSHOT_BYTES // slot_bytes(group, dtype), 1), MAX_SNAPSHOTS)


def _dtype(name: str, kv: torch.dtype) -> torch.dtype:
    if name == "kv":
        return kv
    dtype: torch.dtype = getattr(torch, name)
    return dtype
