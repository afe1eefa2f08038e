"""Decode steps replayed as CUDA graphs, so that a step costs one launch and not a thousand.

Launching a step's kernels one by one takes longer than most of them run. A graph remembers the launches, but
also their shapes and addresses; so batches are padded to one of few buckets, and inputs copied to where the
graph reads them:

    bucket        rows R >= new tokens T          sequences S >= sequences B
    input rows    |<- T of the batch ->|<- R - T padding: token 0 at position 0, KV to the scratch slot ->|
    sequences     |<- B of the batch ->|<- S - B padding: no new tokens, no keys ->|

Padding rows belong to no sequence, so attention leaves them out; what the other operators make of them stays
in their rows. Rows of the batch come out as without padding, to the last bit where the kernels treat rows
independently (tests/engine/test_cuda_graphs.py).

Only steps of decoding sequences are covered: one new token, or a draft, each. A prompt chunk is long enough
to keep the GPU busy while the host launches.

    StaticInputs   the padding, and the buffers; any device
    DecodeGraphs   one captured graph per bucket; CUDA only
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tandem_engine.batch import Batch
from tandem_engine.draft_tree import MAX_TREE_NODES
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import Decoder
from tandem_engine.models.metadata import AttentionMetadata

if TYPE_CHECKING:
    from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

#: A step of more rows keeps the GPU busy without a graph.
MAX_ROWS = 512
#: What most drafts stay within, root included; attention's tiles are made for it, in all buckets alike.
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
    """A bucket's inputs at fixed addresses, filled from one batch after another.

    All but the block table cross to the device as they lie, in one copy:

        staging (host, pinned for CUDA)   rows [4, R] int64 | seq_lens [S] | query_start_loc [S + 1] | blocks
        arena (device)                    the same; the graph reads it here
        block table [S, max_blocks]       its used columns, from the arena's `blocks`

    Every part begins at a multiple of 16 bytes, whatever the bucket: else Triton would compile its kernels
    anew for buckets where a part does not.
    """

    def __init__(
        self, bucket: Bucket, max_blocks: int, block_size: int, scratch_slot: int, device: torch.device
    ) -> None:
        self.bucket = bucket
        self._block_size = block_size
        self._scratch_slot = scratch_slot
        rows, seqs = bucket.num_rows, bucket.num_seqs
        self._rows_end = 4 * _aligned(rows * 8)
        self._lens_end = self._rows_end + _aligned(seqs * 4)
        self._seqs_end = self._lens_end + _aligned((seqs + 1) * 4)
        num_bytes = self._seqs_end + seqs * max_blocks * 4
        self._staging = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._arena = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self._block_table = torch.zeros(seqs, max_blocks, dtype=torch.int32, device=device)
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._host = self._staging.numpy()
        on_device = self._arena[: self._rows_end].view(torch.int64).view(4, -1)[:, :rows]
        self.input_ids, self.positions, slot_mapping, ancestor_bits = on_device.unbind()
        self.metadata = AttentionMetadata(
            block_table=self._block_table,
            seq_lens=self._arena[self._rows_end : self._lens_end].view(torch.int32)[:seqs],
            query_start_loc=self._arena[self._lens_end : self._seqs_end].view(torch.int32)[: seqs + 1],
            slot_mapping=slot_mapping,
            ancestor_bits=ancestor_bits,
        )

    def load(self, batch: Batch) -> None:
        """Takes over a batch that fits the bucket; on CUDA the copies are queued, not waited for."""
        if self._copied is not None:
            # The copy before may still read the staging memory; it is long done, but nothing promises so.
            self._copied.synchronize()
        num_seqs, num_tokens = len(batch.sequences), batch.num_tokens
        width = max(len(s.block_ids) for s in batch.sequences)
        table = self._host[self._seqs_end :].view(np.int32)[: num_seqs * width].reshape(num_seqs, width)
        table.fill(0)
        for row, sequence in zip(table, batch.sequences, strict=True):
            row[: len(sequence.block_ids)] = sequence.block_ids

        counts = np.array([s.num_new_tokens for s in batch.sequences])
        first_rows = np.cumsum(counts) - counts
        starts = np.array([s.start for s in batch.sequences])
        seq_lens = self._host[self._rows_end : self._lens_end].view(np.int32)
        query_start_loc = self._host[self._lens_end : self._seqs_end].view(np.int32)
        seq_lens[:num_seqs], seq_lens[num_seqs:] = starts + counts, 0
        query_start_loc[:num_seqs], query_start_loc[num_seqs:] = first_rows, num_tokens

        rows = self._host[: self._rows_end].view(np.int64).reshape(4, -1)
        input_ids, positions, slot_mapping, ancestor_bits = rows
        rows[:, num_tokens:] = 0
        slot_mapping[num_tokens:] = self._scratch_slot
        input_ids[:num_tokens] = [token for s in batch.sequences for token in s.token_ids]
        positions[:num_tokens] = [position for s in batch.sequences for position in s.positions()]
        ancestor_bits[:num_tokens] = [bits for s in batch.sequences for bits in s.ancestor_bits()]
        sequence_of = np.repeat(np.arange(num_seqs), counts)
        logical = np.arange(num_tokens) + (starts - first_rows)[sequence_of]
        blocks = table[sequence_of, logical // self._block_size].astype(np.int64)
        slot_mapping[:num_tokens] = blocks * self._block_size + logical % self._block_size

        end = self._seqs_end + table.nbytes
        self._arena[:end].copy_(self._staging[:end], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        used = self._arena[self._seqs_end : end].view(torch.int32).view(num_seqs, width)
        self._block_table[:num_seqs, :width].copy_(used)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 16) * 16


def compute(decoder: Decoder, caches: Sequence[Tensor], inputs: StaticInputs) -> Tensor:
    """Logits [bucket.num_rows, vocab] float32; those of padding rows mean nothing."""
    hidden = decoder.forward(inputs.input_ids, inputs.positions, caches, inputs.metadata)
    return decoder.logits(hidden)


class DecodeGraphs:
    """Runs decode steps through one graph per bucket, captured when a batch first needs it."""

    def __init__(self, decoder: Decoder, pool: KVPool) -> None:
        self._decoder = decoder
        self._pool = pool
        # A draft's nodes take one slot each, though their positions end with the model's.
        self._max_blocks = -(-(decoder.config.max_model_len + MAX_TREE_NODES) // pool.shape.block_size)
        self._plans = self._make_plans()
        self._graphs: dict[Bucket, tuple[StaticInputs, torch.cuda.CUDAGraph]] = {}
        #: Graphs run one at a time, so they share the memory of their intermediate results, and the result.
        self._memory = torch.cuda.graph_pool_handle()
        self._logits = torch.empty(
            MAX_ROWS, decoder.config.vocab_size, dtype=torch.float32, device=decoder.device
        )

    def run(self, batch: Batch, bucket: Bucket) -> Tensor:
        """Logits [batch.num_tokens, vocab] float32 of a batch of this bucket, valid until the next run.

        A bucket's first batch is computed without a graph, which compiles what needs compiling, and
        leaves the graph behind for the next.
        """
        logits = self._logits[: batch.num_tokens]
        if bucket in self._graphs:
            inputs, graph = self._graphs[bucket]
            inputs.load(batch)
            graph.replay()
            return logits
        inputs = StaticInputs(
            bucket,
            self._max_blocks,
            self._pool.shape.block_size,
            self._pool.scratch_slot,
            self._decoder.device,
        )
        inputs.metadata = replace(inputs.metadata, plans=self._plans)
        inputs.load(batch)
        self._compute(inputs)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the device meanwhile: only this one is watched for what cannot be captured.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            self._compute(inputs)
        self._graphs[bucket] = inputs, graph
        return logits

    def _compute(self, inputs: StaticInputs) -> None:
        for plan in self._plans.values():
            plan.update(inputs.metadata.seq_lens, inputs.metadata.query_start_loc)
        self._logits[: inputs.bucket.num_rows].copy_(compute(self._decoder, self._pool.caches, inputs))

    def _make_plans(self) -> dict[int | None, AttentionPlan]:
        """One work list per sliding window, which all buckets and layers share, one after another."""
        # Imported on demand: it needs Triton.
        from tandem_kernels.turbo_attention.triton_plan import AttentionPlan

        config, shape = self._decoder.config, self._pool.shape
        return {
            window: AttentionPlan(
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
        }
