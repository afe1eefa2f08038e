"""Memory is faulted in ahead of use, and not much further."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
import psutil
import pytest
import torch
from tandem_engine.kv_pool import KVPool, KVShape
from tandem_engine.prefault import Prefaulter

BLOCK_BYTES = 1 << 20
AHEAD_BYTES = 16 << 20


def fresh(num_blocks: int) -> torch.Tensor:
    """[num_blocks, 1 MiB] that nobody has touched."""
    memory = mmap.mmap(-1, num_blocks * BLOCK_BYTES)
    return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(num_blocks, BLOCK_BYTES)


def resident_mib(caches: Sequence[torch.Tensor]) -> float:
    """Of the caches alone: other threads of the process may allocate meanwhile."""
    starts = {f"{cache.data_ptr():x}" for cache in caches}
    mappings = psutil.Process().memory_maps(grouped=False)
    found = [mapping for mapping in mappings if mapping.addr.split("-")[0].lstrip("0") in starts]
    assert len(found) == len(starts), "each cache is a mapping of its own"
    return sum(mapping.rss for mapping in found) / 2**20


def settled(prefaulter: Prefaulter) -> None:
    assert prefaulter.worker is not None
    prefaulter.worker.join(30)
    assert not prefaulter.worker.is_alive()


def test_memory_is_faulted_in_ahead_of_use() -> None:
    caches = [fresh(64), fresh(64)]
    assert resident_mib(caches) == 0
    prefaulter = Prefaulter(caches, AHEAD_BYTES)
    settled(prefaulter)
    if resident_mib(caches) == 0:
        pytest.skip("this kernel does not populate memory on request")
    assert 12 <= resident_mib(caches) <= 24, "8 blocks of two caches"
    prefaulter.will_use(20)
    settled(prefaulter)
    assert 24 <= resident_mib(caches) <= 72, "up to 8 blocks beyond the 20th"
    prefaulter.will_use(63)
    settled(prefaulter)
    assert (caches[0] == 0).all() and (caches[1] == 0).all()


def test_no_thread_starts_while_enough_memory_is_ahead() -> None:
    prefaulter = Prefaulter([fresh(64)], AHEAD_BYTES)
    first = prefaulter.worker
    prefaulter.will_use(3)
    assert prefaulter.worker is first
    prefaulter.will_use(15)
    assert prefaulter.worker is not first
    settled(prefaulter)


def test_prefaulting_leaves_written_blocks_unchanged() -> None:
    shape = KVShape(num_layers=2, num_kv_heads=1, head_size=16, block_size=16, dtype=torch.float32)
    pool = KVPool([shape], [40], torch.device("cpu"))
    payload = np.random.default_rng(1).bytes(2 * shape.block_bytes)
    pool.scatter(1, [39, 3], memoryview(payload))
    pool.groups[0].will_use(39)
    assert pool.gather(1, [39, 3]).tobytes() == payload
    assert not pool.gather(0, [39, 3]).any()
