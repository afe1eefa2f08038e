"""Sizes the Triton kernel is compiled for, chosen by the model and most sequences' number of new tokens."""

from __future__ import annotations

from dataclasses import dataclass

#: Fewest keys per split, for sequences of at most MAX_TREE_NODES new tokens, and keys per split of a batch
#: that occupies the GPU without smaller ones. A split costs its rows one partial result, 2 * rows / keys of
#: the traffic for its K and V in 16 bits, and its program some microseconds to begin and end.
SPLIT_SIZE = 256
MAX_SPLIT_SIZE = 1024
#: Most memory for partial results, whatever the length and number of sequences. An 8B model (32 heads of 128)
#: then has 28 splits at most of each sequence with drafts of 9 tokens among 128 sequences, and 126 of each
#: with drafts of 16 among 16.
PARTIALS_BYTES = 512 << 20


@dataclass(frozen=True)
class Tiles:
    """Compile-time sizes of the kernel; see `triton_kernel`."""

    block_rows: int
    block_keys: int
    #: The head size, rounded up to a power of two.
    block_dim: int
    num_warps: int
    #: Buffers of K and V, counting the one that is computed.
    key_stages: int
    #: Limit for the compiler, None for the hardware's.
    max_registers: int | None
    #: As many as registers and shared memory let run at the same time.
    programs_per_multiprocessor: int


def choose_tiles(
    head_size: int,
    group_size: int,
    element_bytes: int,
    cache_bytes: int,
    max_new_tokens: int | None = None,
) -> Tiles:
    """Tiles for a model, as measured on an H200 (benchmarks/results/gpu-h200.md).

    What counts most is how many programs run at the same time, since each waits for one tile after another.

    Args:
        element_bytes, cache_bytes: sizes of an element of the query and of the cache.
        max_new_tokens: what most sequences stay within, None when unknown; more rows than they need waste
            arithmetic, fewer read K and V again.
    """
    # float32 is multiplied without tensor cores and keeps its operands in registers.
    max_rows = 64 if element_bytes == 2 else 32
    rows = max_rows if max_new_tokens is None else group_size * max_new_tokens
    block_rows = 16
    while block_rows < min(rows, max_rows):
        block_rows *= 2
    block_dim = 16
    while block_dim < head_size:
        block_dim *= 2
    large = block_rows == 64 or block_dim > 128 or element_bytes == 4
    largest = block_rows == 64 and block_dim > 128
    block_keys = 16 if element_bytes == 4 else 32 if largest and cache_bytes < element_bytes else 64
    return Tiles(
        block_rows=block_rows,
        block_keys=block_keys,
        block_dim=block_dim,
        num_warps=8 if largest else 4,
        key_stages=2,
        max_registers=None if large else 168,
        programs_per_multiprocessor=1 if largest else 2 if large else 3,
    )
