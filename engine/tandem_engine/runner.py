"""Runs the model over one batch: batch -> tensors -> forward -> logits, and moves accepted KV into place.

A drafted sequence occupies the slots start .. start + n - 1, one per node in topological order, whatever
the nodes' depth; the accepted path's KV is then copied to the slots where plain decoding would have put it:

    slots        start   +1   +2   +3   +4          path = (0, 2, 4)
    nodes          0      1    2    3    4    ->    KV of 2 moves to start + 1, of 4 to start + 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.cuda_graphs import DecodeGraphs, bucket_for
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import Decoder
from tandem_engine.models.metadata import AttentionMetadata


class ModelRunner:
    """Joins the decoder with the KV pool; knows nothing of queues or sampling."""

    def __init__(self, decoder: Decoder, pool: KVPool, device: torch.device) -> None:
        self.decoder = decoder
        self.pool = pool
        self.device = device
        self._graphs = DecodeGraphs(decoder, pool) if device.type == "cuda" else None

    @torch.inference_mode()
    def execute(self, batch: Batch, on_layer_done: Callable[[int], None] | None = None) -> Tensor:
        """Computes the batch's KV and returns logits [batch.num_logits_rows, vocab] float32.

        Rows are in batch order; a drafted sequence has one row per node. on_layer_done(layer) is called
        when the layer's KV of the whole batch is in the pool. The logits are valid until the next step.
        """
        if self._graphs is not None and on_layer_done is None and (bucket := bucket_for(batch)):
            return self._graphs.run(batch, bucket)
        input_ids: list[int] = []
        positions: list[int] = []
        logits_rows: list[int] = []
        for row, sequence in zip(self._first_rows(batch), batch.sequences, strict=True):
            input_ids.extend(sequence.token_ids)
            positions.extend(sequence.positions())
            logits_rows.extend(range(row + sequence.num_new_tokens - sequence.num_logits_rows,
                                     row + sequence.num_new_tokens))  # fmt: skip
        hidden = self.decoder.forward(
            self._tensor(input_ids),
            self._tensor(positions),
            self.pool.caches,
            self._metadata(batch),
            on_layer_done,
        )
        return self.decoder.logits(hidden[self._tensor(logits_rows)])

    @torch.inference_mode()
    def compact(self, batch: Batch, paths: Sequence[Sequence[int]]) -> None:
        """Moves accepted nodes' KV to consecutive slots; paths as verified, one per sampling sequence."""
        src: list[int] = []
        dst: list[int] = []
        sampling = [s for s in batch.sequences if s.samples]
        for sequence, path in zip(sampling, paths, strict=True):
            for k, node in enumerate(path):
                if node != k:
                    src.append(self._slot(sequence, node))
                    dst.append(self._slot(sequence, k))
        if src:
            self.pool.move(src, dst)

    def _metadata(self, batch: Batch) -> AttentionMetadata:
        width = max(len(s.block_ids) for s in batch.sequences)
        block_table = np.zeros((len(batch.sequences), width), dtype=np.int32)
        seq_lens, query_start_loc = [], [0]
        slot_mapping: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        ancestor_bits: list[int] = []
        size = self.pool.shape.block_size
        for i, sequence in enumerate(batch.sequences):
            n = sequence.num_new_tokens
            block_table[i, : len(sequence.block_ids)] = sequence.block_ids
            seq_lens.append(sequence.start + n)
            query_start_loc.append(query_start_loc[-1] + n)
            logical = np.arange(sequence.start, sequence.start + n)
            blocks = block_table[i, logical // size].astype(np.int64)
            slot_mapping.append(blocks * size + logical % size)
            ancestor_bits.extend(sequence.ancestor_bits())
        self.pool.will_use(int(block_table.max()))
        drafted = any(s.draft is not None for s in batch.sequences)
        return AttentionMetadata(
            block_table=torch.from_numpy(block_table).to(self.device),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=self.device),
            query_start_loc=torch.tensor(query_start_loc, dtype=torch.int32, device=self.device),
            slot_mapping=torch.from_numpy(np.concatenate(slot_mapping)).to(self.device),
            ancestor_bits=self._tensor(ancestor_bits) if drafted else None,
            interleaved=self.pool.shape.interleaved,
        )

    def _first_rows(self, batch: Batch) -> list[int]:
        rows = [0]
        for sequence in batch.sequences[:-1]:
            rows.append(rows[-1] + sequence.num_new_tokens)
        return rows

    def _slot(self, sequence: ScheduledSequence, node: int) -> int:
        logical = sequence.start + node
        size = self.pool.shape.block_size
        return sequence.block_ids[logical // size] * size + logical % size

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)
