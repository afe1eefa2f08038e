"""Runs the model over one batch: batch -> ModelInputs -> forward -> logits, and moves accepted KV into place.

A drafted sequence occupies the slots start .. start + n - 1, one per node in topological order, whatever
the nodes' depth. The runner then copies the accepted path's KV to the slots that plain decoding uses:

    slots        start   +1   +2   +3   +4          path = (0, 2, 4)
    nodes          0      1    2    3    4    ->    KV of 2 moves to start + 1, of 4 to start + 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from tandem_kernels import AttentionMetadata
from torch import Tensor

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.cuda_graphs import DecodeGraphs, bucket_for
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import Decoder, ModelInputs


def model_inputs(batch: Batch, block_size: int) -> ModelInputs:
    """The batch as CPU tensors."""
    sequences = batch.sequences
    block_table = np.zeros((len(sequences), max(len(s.block_ids) for s in sequences)), dtype=np.int32)
    for row, sequence in zip(block_table, sequences, strict=True):
        row[: len(sequence.block_ids)] = sequence.block_ids
    counts = np.array([s.num_new_tokens for s in sequences], dtype=np.int32)
    starts = np.array([s.start for s in sequences], dtype=np.int32)
    query_start_loc = np.zeros(len(sequences) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start_loc[1:])
    sequence_of = np.repeat(np.arange(len(sequences)), counts)
    logical = np.arange(len(sequence_of)) + (starts - query_start_loc[:-1])[sequence_of]
    blocks = block_table[sequence_of, logical // block_size].astype(np.int64)
    bits = None
    if any(s.draft is not None for s in sequences):
        bits = torch.tensor([node for s in sequences for node in s.ancestor_bits()])
    return ModelInputs(
        input_ids=torch.tensor([token for s in sequences for token in s.token_ids]),
        positions=torch.tensor([position for s in sequences for position in s.positions()]),
        slot_mapping=torch.from_numpy(blocks * block_size + logical % block_size),
        attention=AttentionMetadata(
            torch.from_numpy(block_table),
            torch.from_numpy(starts + counts),
            torch.from_numpy(query_start_loc),
            bits,
        ),
    )


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
        inputs = model_inputs(batch, self.pool.shape.block_size)
        if self._graphs is not None and on_layer_done is None and (bucket := bucket_for(batch)):
            return self._graphs.run(inputs, bucket)
        self.pool.will_use(int(inputs.attention.block_table.max()))
        hidden = self.decoder.forward(
            inputs.to(self.device),
            self.pool.caches,
            on_layer_done,
            interleaved=self.pool.shape.interleaved,
        )
        logits_rows = [
            row
            for sequence, end in zip(
                batch.sequences, inputs.attention.query_start_loc[1:].tolist(), strict=True
            )
            for row in range(end - sequence.num_logits_rows, end)
        ]
        return self.decoder.logits(hidden[torch.tensor(logits_rows, dtype=torch.int64, device=self.device)])

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

    def _slot(self, sequence: ScheduledSequence, node: int) -> int:
        logical = sequence.start + node
        size = self.pool.shape.block_size
        return sequence.block_ids[logical // size] * size + logical % size
