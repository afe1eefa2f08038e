"""Tandem's operators on the paged KV cache, one per module, each on CPU and CUDA tensors.

    store_kv          new tokens' K and V -> their slots           (every layer of every step)
    turbo_attention   queries x cached K and V -> attention output (every layer of every step)
    move_slots        accepted draft nodes -> consecutive slots    (after verification)
    gather_blocks     cache blocks -> one contiguous payload       (KV leaves a prefill pod)
    scatter_blocks    payload -> cache blocks                      (KV enters a decode pod)

The cache is one contiguous tensor per layer, [num_blocks, 2, Hkv, block_size, D] with K at index 0 and V
at index 1 of the second dimension; slot = block_id * block_size + offset within the block.
"""

from tandem_kernels.gather_blocks import gather_blocks
from tandem_kernels.move_slots import move_slots
from tandem_kernels.scatter_blocks import scatter_blocks
from tandem_kernels.store_kv import store_kv
from tandem_kernels.turbo_attention import turbo_attention

__all__ = ["gather_blocks", "move_slots", "scatter_blocks", "store_kv", "turbo_attention"]
