"""Sizes the Triton kernel is compiled for, chosen by what a model and a GPU are, never by the batch.

A row's result would depend on the batch if these did: sums are made in the order of the tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Fewest keys per split, for sequences of at most MAX_TREE_NODES new tokens, and keys per split of a batch
#: that occupies the GPU without smaller ones. A split costs its rows one partial result, 2 * rows / keys of
#: the traffic for its K and V in 16 bits, and its program some microseconds to begin and end.
SPLIT_SIZE = 256
MAX_SPLIT_SIZE = 1024
#: Most memory for partial results, whatever the length and number of sequences. An 8B model (32 heads of 128)
#: then has 28 splits of each sequence with drafts of 9 tokens among 128 sequences: 8 K/V heads times 28 are
#: programs enough for one sequence to occupy a GPU.
PARTIALS_BYTES = 512 << 20


@dataclass(frozen=True)
class Tiles:
    """Compile-time sizes of the kernel; see `triton_kernel`."""

    block_rows: int
    block_keys: int
    block_dim: int
    num_warps: int
    #: Stages of the loop over keys, and of the loop over chunks of dimensions in it: two buffers. Only the
    #: innermost loop has any: that over keys where one chunk is the whole head.
    key_stages: int
    chunk_stages: int
    #: Limit for the compiler, None for the hardware's.
    max_registers: int | None
    swapped: bool
    programs_per_multiprocessor: int


def choose_tiles(
    head_size: int,
    group_size: int,
    element_bytes: int,
    cache_bytes: int,
    max_new_tokens: int | None = None,
    capability: int | None = None,
) -> Tiles:
    """Tiles for a model on a GPU of compute capability `capability` (90 for sm_90; None: the interpreter).

    The sizes keep all values of a thread in registers; benchmarks/results/triton-resources.md shows how many.

    Args:
        element_bytes, cache_bytes: sizes of an element of the query and of the cache.
        max_new_tokens: what most sequences stay within, None when unknown; more rows than they need waste
            arithmetic, fewer read K and V again.
    """
    hopper, quantized = capability == 90, cache_bytes < element_bytes
    # A quantized tile is held twice, as it is and as it is multiplied. float32 is multiplied without tensor
    # cores and keeps its operands in registers.
    large = element_bytes == 2 and (hopper or (head_size <= 128 and not quantized))
    max_rows = 64 if large else 32
    rows = max_rows if max_new_tokens is None else group_size * max_new_tokens
    block_rows = 16
    while block_rows < min(rows, max_rows):
        block_rows *= 2
    narrow = block_rows == 64 and head_size <= 128 and (quantized or not hopper or head_size <= 64)
    block_keys = 32 if element_bytes == 4 or narrow else 64
    block_dim = 16
    while block_dim < min(head_size, 32 if element_bytes == 4 else 64):
        block_dim *= 2
    few = block_rows == 16 and head_size <= 128 and not quantized
    return Tiles(
        block_rows=block_rows,
        block_keys=block_keys,
        block_dim=block_dim,
        num_warps=8 if block_rows == 64 and head_size > 128 else 4,
        key_stages=2 if hopper else 3,
        # sm_90's products read both of their operands from shared memory while the next chunk arrives.
        chunk_stages=2 if hopper else 3,
        max_registers=168 if few else None,
        swapped=hopper and element_bytes == 2 and block_rows < 64,
        programs_per_multiprocessor=3 if few else 2,
    )
