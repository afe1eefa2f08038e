"""Replays decode steps as CUDA graphs: one launch per step instead of a thousand.

Launching a step's kernels one by one takes longer than most of them run. A graph records launches with fixed
shapes and addresses, so a step is padded to one of a few buckets and copied to the addresses of its graph:

    bucket        rows R >= new tokens T          sequences S >= sequences B
    input rows    |<- T of the batch ->|<- R - T padding: token 0 at position 0, KV to the scratch slot ->|
    sequences     |<- B of the batch ->|<- S - B padding: no new tokens, no keys ->|

Padding rows belong to no sequence. Attention skips them, and the other operators compute each row on its own.
Where the kernels treat rows independently, the batch's rows have the same bits as without padding
(tests/engine/test_cuda_graphs.py).

Graphs cover steps of decoding sequences only: one new token, or a draft, each. A prompt chunk is long enough
to keep the GPU busy while the host launches.

    StaticInputs   the padding, and the buffers; any device
    DecodeGraphs   one captured graph per bucket; CUDA only
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tandem_kernels import Attention, AttentionMetadata
from torch import Tensor

from tandem_engine.batch import Batch
from tandem_engine.draft_tree import MAX_TREE_NODES
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import Decoder, ModelInputs

#: A step of more rows keeps the GPU busy without a graph.
MAX_ROWS = 512
#: Most drafts have at most this many nodes, root included; it sets attention's tile size in all buckets.
TYPICAL_NEW_TOKENS = 8


@dataclass(frozen=True)
class Bucket:
    """The padded size of a step."""

    num_rows: int
    num_seqs: int


def bucket_for(batch: Batch) -> Bucket | None:
    """The smallest bucket that holds the batch; None when graphs do not cover it.

    Sizes are powers of two, and from 6 on one and a half times these: less than a third is padding.
    """
    if not all(s.samples and s.num_new_tokens == s.num_logits_rows for s in batch.sequences):
        return None
    if batch.num_tokens > MAX_ROWS:
        return None
    return Bucket(_padded(batch.num_tokens), _padded(len(batch.sequences)))


def _padded(n: int) -> int:
    power = 1 << (n - 1).bit_length()
    return power * 3 // 4 if power >= 8 and n <= power * 3 // 4 else power


class StaticInputs:
    """A bucket's inputs at fixed addresses, filled from one step after another.

    All but the block table cross to the device in one copy, with the same layout on both sides:

        staging (host, pinned for CUDA)   rows [4, R] int64 | seq_lens [S] | query_start_loc [S + 1] | blocks
        arena (device)                    the same; the graph reads it here
        block table [S, max_blocks]       its used columns, from the arena's `blocks`

    Every part begins at a multiple of 16 bytes, whatever the bucket. Otherwise Triton would compile its
    kernels anew for buckets where a part does not.
    """

    def __init__(self, bucket: Bucket, max_blocks: int, scratch_slot: int, device: torch.device) -> None:
        self.bucket = bucket
        self._scratch_slot = scratch_slot
        rows, seqs = bucket.num_rows, bucket.num_seqs
        self._rows_end = 4 * _aligned(rows * 8)
        self._lens_end = self._rows_end + _aligned(seqs * 4)
        self._seqs_end = self._lens_end + _aligned((seqs + 1) * 4)
        num_bytes = self._seqs_end + seqs * max_blocks * 4
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._arena = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host_rows, self._host_seq_lens, self._host_starts = self._parts(self._staging)
        on_device, seq_lens, query_start_loc = self._parts(self._arena)
        input_ids, positions, slot_mapping, ancestor_bits = on_device[:, :rows].unbind()
        block_table = torch.zeros(seqs, max_blocks, dtype=torch.int32, device=device)
        #: What the graph reads.
        self.inputs = ModelInputs(
            input_ids,
            positions,
            slot_mapping,
            AttentionMetadata(block_table, seq_lens[:seqs], query_start_loc[: seqs + 1], ancestor_bits),
        )

    def _parts(self, memory: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """rows [4, R or more], seq_lens and query_start_loc in the staging memory or the arena."""
        return (
            memory[: self._rows_end].view(torch.int64).view(4, -1),
            memory[self._rows_end : self._lens_end].view(torch.int32),
            memory[self._lens_end : self._seqs_end].view(torch.int32),
        )

    def load(self, step: ModelInputs) -> None:
        """Copy a step of CPU tensors that fits the bucket; on CUDA the copies are asynchronous."""
        if self._copied is not None:
            # The previous copy may still read the staging memory.
            self._copied.synchronize()
        metadata = step.attention
        num_tokens, (num_seqs, width) = len(step.input_ids), metadata.block_table.shape
        input_ids, positions, slot_mapping, ancestor_bits = self._host_rows
        self._host_rows[:, num_tokens:] = 0
        slot_mapping[num_tokens:] = self._scratch_slot
        input_ids[:num_tokens] = step.input_ids
        positions[:num_tokens] = step.positions
        slot_mapping[:num_tokens] = step.slot_mapping
        ancestor_bits[:num_tokens] = 0 if metadata.ancestor_bits is None else metadata.ancestor_bits
        self._host_seq_lens[:num_seqs], self._host_seq_lens[num_seqs:] = metadata.seq_lens, 0
        self._host_starts[: num_seqs + 1] = metadata.query_start_loc
        self._host_starts[num_seqs + 1 :] = num_tokens

        end = self._seqs_end + metadata.block_table.nbytes
        self._staging[self._seqs_end : end].view(torch.int32).copy_(metadata.block_table.view(-1))
        self._arena[:end].copy_(self._staging[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        used = self._arena[self._seqs_end : end].view(torch.int32).view(num_seqs, width)
        self.inputs.attention.block_table[:num_seqs, :width].copy_(used)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def compute(
    decoder: Decoder, caches: Sequence[Tensor], inputs: ModelInputs, attention: Attention | None = None
) -> Tensor:
    """Logits [bucket.num_rows, vocab] float32; those of padding rows are undefined."""
    return decoder.logits(decoder.forward(inputs, caches, attention=attention))


class DecodeGraphs:
    """Runs decode steps through one graph per bucket, captured when a batch first needs it."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool
        # A draft's nodes take one slot each, though their positions end with the model's.
        self._max_blocks = -(-(decoder.config.max_model_len + MAX_TREE_NODES) // pool.shape.block_size)
        self._attention = self._make_attention()
        self._graphs: dict[Bucket, tuple[StaticInputs, torch.cuda.CUDAGraph]] = {}
        #: Graphs run one at a time, so they share the memory of their intermediate results and their logits.
        self._memory = torch.cuda.graph_pool_handle()
        self._logits = torch.empty(
            MAX_ROWS, decoder.config.vocab_size, dtype=torch.float32, device=decoder.device
        )

    def run(self, step: ModelInputs, bucket: Bucket) -> Tensor:
        """Logits [T, vocab] float32 of a step of this bucket, given as CPU tensors; valid until the next run.

        A bucket's first step is computed without a graph, which compiles the kernels that need it, and then
        captured for the next ones.
        """
        logits = self._logits[: len(step.input_ids)]
        if bucket in self._graphs:
            static, graph = self._graphs[bucket]
            static.load(step)
            graph.replay()
            return logits
        static = StaticInputs(bucket, self._max_blocks, self._pool.scratch_slot, self._decoder.device)
        static.load(step)
        self._compute(static)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device during capture, so only this thread's calls are restricted.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._compute(static)
        self._graphs[bucket] = static, graph
        return logits

    def _compute(self, static: StaticInputs) -> None:
        logits = compute(self._decoder, self._pool.caches, static.inputs, self._attention)
        self._logits[: static.bucket.num_rows].copy_(logits)

    def _make_attention(self) -> Attention:
        """One plan per sliding window, shared by all buckets and layers."""
        # Imported on demand: these need Triton.
        from tandem_kernels.turbo_attention.triton_backend import TritonAttention
        from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

        config, shape = self._decoder.config, self._pool.shape
        return TritonAttention(
            AttentionPlan(
                max_tokens=MAX_ROWS,
                max_seqs=MAX_ROWS,
                max_seq_len=min(self._max_blocks, self._pool.num_blocks) * shape.block_size,
                num_heads=config.num_heads,
                num_kv_heads=config.num_kv_heads,
                head_size=config.head_dim,
                dtype=self._decoder.dtype,
                cache_dtype=shape.dtype,
                device=self._decoder.device,
                window=window,
                max_new_tokens=TYPICAL_NEW_TOKENS,
            )
            for window in set(config.windows)
        )
