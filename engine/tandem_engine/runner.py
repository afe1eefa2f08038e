"""Runs the model over one batch: batch -> StepInputs -> forward -> logits, and moves accepted KV into place.

A drafted sequence occupies the slots start .. start + n - 1, one per node in topological order, whatever
the nodes' depth. The runner then copies the accepted path's KV to the slots that plain decoding uses:

    slots        start   +1   +2   +3   +4          path = (0, 2, 4)
    nodes          0      1    2    3    4    ->    KV of 2 moves to start + 1, of 4 to start + 2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
from tandem_core.errors import InvariantError
from tandem_kernels import StateMetadata, StepInputs, StepTable
from torch import Tensor

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.cuda_graphs import Capture, DecodeGraphs
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import ModelInputs
from tandem_engine.models.mixers import StateInputs
from tandem_engine.state_pool import StatePool
from tandem_engine.state_slots import StateSlots, StateStep
from tandem_engine.workspace import Workspace

if TYPE_CHECKING:
    from tandem_engine.models.executors import AnyDecoder

#: Rows of prompts' logits that exist at once; one has a float per token of the vocabulary.
MAX_PROMPT_ROWS = 64
#: Called with a sequence, the first of n <= MAX_PROMPT_ROWS positions, and their logits [n, vocab] float32.
PromptListener: TypeAlias = Callable[[ScheduledSequence, int, Tensor], None]


@dataclass(frozen=True)
class StepLogits:
    """The logits of a step's rows that sample, in batch order; a drafted sequence has one row per node."""

    #: [rows, vocab] float32, valid until the next step.
    values: Tensor
    #: Each row's most likely token, the lowest of equals, -1 if it holds NaN or +inf; None: not known yet.
    most_likely: list[int] | None = None


def step_inputs(batch: Batch, block_size: int) -> StepInputs:
    sequences = batch.sequences
    seq_lens: list[int] = []
    query_start_loc = [0]
    token_ids: list[int] = []
    positions: list[int] = []
    for sequence in sequences:
        seq_lens.append(sequence.start + sequence.num_new_tokens)
        token_ids += sequence.token_ids
        query_start_loc.append(len(token_ids))
        positions += sequence.positions()
    bits = None
    if any(s.draft is not None for s in sequences):
        bits = [node for s in sequences for node in s.ancestor_bits()]
    first, *more = [_step_table(batch, block_size, group) for group in range(len(sequences[0].block_ids))]
    return StepInputs(
        token_ids,
        positions,
        first.slot_mapping,
        first.block_table,
        seq_lens,
        query_start_loc,
        bits,
        tuple(more),
    )


def _step_table(batch: Batch, block_size: int, group: int) -> StepTable:
    width = max([len(s.block_ids[group]) for s in batch.sequences])
    block_table: list[int] = []
    slots: list[int] = []
    for sequence in batch.sequences:
        blocks, start = sequence.block_ids[group], sequence.start
        end = start + sequence.num_new_tokens
        block_table += blocks
        block_table += [0] * (width - len(blocks))
        for n in range(start // block_size, -(-end // block_size)):
            ahead = (blocks[n] - n) * block_size
            slots += range(max(start, n * block_size) + ahead, min(end, (n + 1) * block_size) + ahead)
    return StepTable(slots, block_table)


def _state_of(sequence: ScheduledSequence) -> StateStep:
    if sequence.state is None:
        raise InvariantError(f"request {sequence.request.request_id} was scheduled without a state")
    return sequence.state


def _state_metadata(
    steps: Sequence[StateStep], query_start_loc: Tensor, ancestor_bits: Tensor | None
) -> StateMetadata:
    slots = torch.tensor(
        [(step.initial, step.final, step.snapshot, step.snapshot_rows) for step in steps], dtype=torch.int32
    )
    initial, final, snapshot, rows = (column.contiguous() for column in slots.unbind(1))
    return StateMetadata(query_start_loc, initial, final, snapshot, rows, ancestor_bits)


def _logits_rows(batch: Batch) -> list[int]:
    """The rows that sample: of each sequence the last num_logits_rows."""
    rows: list[int] = []
    end = 0
    for sequence in batch.sequences:
        end += sequence.num_new_tokens
        rows += range(end - sequence.num_logits_rows, end)
    return rows


class ModelRunner:
    """Joins the decoder with the KV pool; knows nothing of queues or sampling.

    workspace: what steps on a GPU need. None: the decoder gets CPU tensors as they are.
    states: recurrent states; None: no layer has one.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        pool: KVPool,
        device: torch.device,
        workspace: Workspace | None = None,
        states: StatePool | None = None,
    ) -> None:
        self.decoder = decoder
        self.pool = pool
        self.device = device
        self.workspace = workspace
        self.states = states
        #: Belongs to the last step.
        self._state_inputs: StateInputs | None = None
        #: Blocks have the same tokens and order in all groups.
        self._shape = pool.groups[0].shape
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
        self._graphs.capture(capture, ModelInputs.of(step_inputs(idle, self._shape.block_size)))

    def execute(
        self,
        batch: Batch,
        on_layer_done: Callable[[int], None] | None = None,
        on_prompt_logits: PromptListener | None = None,
    ) -> StepLogits:
        """Computes the batch's KV, and the logits of its rows that sample.

        on_layer_done(layer) is called when the layer's KV of the whole batch is in the pool; on a GPU, when
        what writes it is launched, so that a reader must wait for an event recorded then. on_prompt_logits
        is called for the `scored_positions` of every sequence.
        """
        if batch.copies:
            with torch.inference_mode():
                self.pool.copy(batch.copies)
        step = step_inputs(batch, self._shape.block_size)
        logits_rows = _logits_rows(batch)
        if self.workspace is None:
            for g, group in enumerate(self.pool.groups):
                group.will_use(max([max(s.block_ids[g]) for s in batch.sequences]))
            is_scoring = on_prompt_logits is not None and any(s.scored_positions for s in batch.sequences)
            is_whole = on_layer_done is None and not is_scoring
            if self.decoder.is_batch_invariant and is_whole:
                interleaved = self._shape.interleaved
                done = self.decoder.step(step, logits_rows, self.pool.caches, interleaved=interleaved)
                return StepLogits(*done)
        return StepLogits(self._forward(batch, step, logits_rows, on_layer_done, on_prompt_logits))

    @torch.inference_mode()
    def _forward(
        self,
        batch: Batch,
        step: StepInputs,
        logits_rows: Sequence[int],
        on_layer_done: Callable[[int], None] | None,
        on_prompt_logits: PromptListener | None,
    ) -> Tensor:
        """`execute` through `Decoder.forward`."""
        if self.device.type == "cuda":
            # Triton launches on the thread's current device. The engine's thread is not the one that began.
            torch.cuda.set_device(self.device)
        inputs, attention = ModelInputs.of(step), None
        if self.states is not None:
            self._state_inputs = StateInputs(
                _state_metadata(
                    [_state_of(s) for s in batch.sequences],
                    inputs.attention.query_start_loc,
                    inputs.attention.ancestor_bits,
                ),
                self.states.layers,
                keeps=any(s.defers_state for s in batch.sequences),
            )
            inputs = replace(inputs, states=self._state_inputs)
        if self._graphs is not None and on_layer_done is None and (size := self._graphs.size_for(batch)):
            return self._graphs.run(inputs, size)
        if self.workspace is None:
            rows = torch.tensor(logits_rows, dtype=torch.int64)
        else:
            static, attention = self.workspace.inputs, self.workspace.attention
            static.load(inputs, self.pool.groups[0].scratch_slot, logits_rows)
            inputs = static.view(batch.num_tokens, len(batch.sequences))
            rows = static.logits_rows(len(logits_rows))
        hidden = self.decoder.forward(
            inputs,
            self.pool.caches,
            on_layer_done,
            attention=attention,
            interleaved=self._shape.interleaved,
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

    def compact(self, batch: Batch, paths: Sequence[Sequence[int]], states: StateSlots | None = None) -> None:
        """Moves accepted nodes' KV to consecutive slots, and advances recurrent states over them; paths as
        verified, one per sampling sequence."""
        if states is not None:
            self._replay(batch, paths, states)
        sampling = [s for s in batch.sequences if s.samples]
        moves = [
            (sequence, node, k)
            for sequence, path in zip(sampling, paths, strict=True)
            for k, node in enumerate(path)
            if node != k
        ]
        if not moves:
            return
        with torch.inference_mode():
            for g, group in enumerate(self.pool.groups):
                src = [self._slot(g, sequence, node) for sequence, node, _ in moves]
                group.move(src, [self._slot(g, sequence, k) for sequence, _, k in moves])

    def _replay(self, batch: Batch, paths: Sequence[Sequence[int]], states: StateSlots) -> None:
        rows: list[int] = []
        starts, steps = [0], []
        path_of = dict(zip([s.request.request_id for s in batch.sequences if s.samples], paths, strict=True))
        first_row = 0
        for sequence in batch.sequences:
            path = path_of.get(sequence.request.request_id, ())
            if sequence.defers_state and path:
                rows += [first_row + node for node in path]
                starts.append(len(rows))
                steps.append(states.plan(sequence.request.request_id, len(path)))
            first_row += sequence.num_new_tokens
        if rows and self._state_inputs is not None:
            metadata = _state_metadata(steps, torch.tensor(starts, dtype=torch.int32), None)
            self.decoder.replay(self._state_inputs, torch.tensor(rows), metadata)

    def _slot(self, group: int, sequence: ScheduledSequence, node: int) -> int:
        logical = sequence.start + node
        size = self._shape.block_size
        return sequence.block_ids[group][logical // size] * size + logical % size
