"""Runs the model over one batch: batch -> ModelInputs -> forward -> logits, and moves accepted KV into place.

A drafted sequence occupies the slots start .. start + n - 1, one per node in topological order, whatever
the nodes' depth. The runner then copies the accepted path's KV to the slots that plain decoding uses:

    slots        start   +1   +2   +3   +4          path = (0, 2, 4)
    nodes          0      1    2    3    4    ->    KV of 2 moves to start + 1, of 4 to start + 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from tandem_kernels import AttentionMetadata
from torch import Tensor

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.cuda_graphs import Capture, DecodeGraphs
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import Decoder, ModelInputs
from tandem_engine.workspace import Workspace

#: Rows of prompts' logits that exist at once; one has a float per token of the vocabulary.
MAX_PROMPT_ROWS = 64
#: Called with a sequence, the first of n <= MAX_PROMPT_ROWS positions, and their logits [n, vocab] float32.
PromptListener: TypeAlias = Callable[[ScheduledSequence, int, Tensor], None]


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
        bits = _int64([node for s in sequences for node in s.ancestor_bits()])
    return ModelInputs(
        input_ids=_int64([token for s in sequences for token in s.token_ids]),
        positions=_int64([position for s in sequences for position in s.positions()]),
        slot_mapping=torch.from_numpy(blocks * block_size + logical % block_size),
        attention=AttentionMetadata(
            torch.from_numpy(block_table),
            torch.from_numpy(starts + counts),
            torch.from_numpy(query_start_loc),
            bits,
        ),
    )


def _int64(values: list[int]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.int64))


def _logits_rows(batch: Batch) -> NDArray[np.int64]:
    """The rows that sample: of each sequence the last num_logits_rows."""
    rows: list[int] = []
    end = 0
    for sequence in batch.sequences:
        end += sequence.num_new_tokens
        rows += range(end - sequence.num_logits_rows, end)
    return np.array(rows, dtype=np.int64)


class ModelRunner:
    """Joins the decoder with the KV pool; knows nothing of queues or sampling.

    workspace: what steps on a GPU need. None: the decoder gets CPU tensors as they are.
    """

    def __init__(
        self, decoder: Decoder, pool: KVPool, device: torch.device, workspace: Workspace | None = None
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.device = device
        self.workspace = workspace
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture_graphs(self, capture: Capture, idle: Batch) -> None:
        """Captures a graph of each size of a decode step, if the workspace has room for them.

        idle: a decode step that may run in place of real ones.
        """
        space = self.workspace
        if space is None or space.graph_inputs is None or space.graph_logits is None:
            return
        self._graphs = DecodeGraphs(
            self.decoder, self.pool, space.graph_attention, space.graph_inputs, space.graph_logits
        )
        self._graphs.capture(capture, model_inputs(idle, self.pool.shape.block_size))

    @torch.inference_mode()
    def execute(
        self,
        batch: Batch,
        on_layer_done: Callable[[int], None] | None = None,
        on_prompt_logits: PromptListener | None = None,
    ) -> Tensor:
        """Computes the batch's KV and returns logits [batch.num_logits_rows, vocab] float32.

        Rows are in batch order; a drafted sequence has one row per node. on_layer_done(layer) is called
        when the layer's KV of the whole batch is in the pool; on a GPU, when what writes it is
        launched, so that a reader must wait for an event recorded then. on_prompt_logits is called for the
        `scored_positions` of every sequence. The logits are valid until the next step.
        """
        if batch.copies:
            self.pool.copy(batch.copies)
        inputs = model_inputs(batch, self.pool.shape.block_size)
        logits_rows = _logits_rows(batch)
        if self.device.type == "cuda":
            # Triton launches on the thread's current device. The engine's thread is not the one that began.
            torch.cuda.set_device(self.device)
        if self._graphs is not None and on_layer_done is None and (size := self._graphs.size_for(batch)):
            return self._graphs.run(inputs, size)
        attention = None
        if self.workspace is None:
            rows = torch.from_numpy(logits_rows)
            self.pool.will_use(int(inputs.attention.block_table.max()))
        else:
            static, attention = self.workspace.inputs, self.workspace.attention
            static.load(inputs, self.pool.scratch_slot, logits_rows)
            inputs = static.view(batch.num_tokens, len(batch.sequences))
            rows = static.logits_rows(len(logits_rows))
        hidden = self.decoder.forward(
            inputs,
            self.pool.caches,
            on_layer_done,
            attention=attention,
            interleaved=self.pool.shape.interleaved,
        )
        if on_prompt_logits is not None:
            self._score_prompts(batch, hidden, on_prompt_logits)
        return self.decoder.logits(hidden.index_select(0, rows))

    def _score_prompts(self, batch: Batch, hidden: Tensor, on_prompt_logits: PromptListener) -> None:
        """hidden [T, H]: of the batch's tokens."""
        first_row = 0
        for sequence in batch.sequences:
            positions = sequence.scored_positions
            for first in positions[::MAX_PROMPT_ROWS]:
                row = first_row + first - sequence.start
                num_rows = min(MAX_PROMPT_ROWS, positions.stop - first)
                on_prompt_logits(sequence, first, self.decoder.logits(hidden[row : row + num_rows]))
            first_row += sequence.num_new_tokens

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
