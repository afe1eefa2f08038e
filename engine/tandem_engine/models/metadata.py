"""What attention must know about one step's batch; made by the model runner, read by every layer.

tokens of the step, sequence after sequence:
query_start_loc  [0,          n0,               n0+n1]
                 |<- seq 0 ->|<---- seq 1 ----->|
seq 1's keys: block_table[1], the first seq_lens[1] slots; its last n1 keys are this step's tokens
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from tandem_kernels.turbo_attention.triton_plan import AttentionPlan


@dataclass(frozen=True)
class AttentionMetadata:
    """B sequences, T new tokens in total."""

    #: [B, max_blocks] int32: physical block of each logical block.
    block_table: Tensor
    #: [B] int32: keys per sequence, the new tokens included.
    seq_lens: Tensor
    #: [B + 1] int32: where each sequence's new tokens start; the last entry is T.
    query_start_loc: Tensor
    #: [T] int64: block_id * block_size + offset that receives each new token's key and value.
    slot_mapping: Tensor
    #: [T] int64: per draft node one bit for itself and each ancestor, 0 on rows of causal sequences.
    #: None: every sequence is causal.
    ancestor_bits: Tensor | None = None
    #: How the caches lie (tandem_kernels.interleaved_cache).
    interleaved: bool = False
    #: On a GPU, attention's work list for this step by the layers' sliding window; None: each call makes one.
    plans: Mapping[int | None, AttentionPlan] | None = None
