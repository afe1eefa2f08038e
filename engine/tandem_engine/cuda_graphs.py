"""Replays decode steps as CUDA graphs: one launch per step instead of a thousand.

Launching a step's kernels one by one takes longer than most of them run. A graph records launches with fixed
shapes and addresses, so a step is padded to one of a few sizes, R rows of S = min(R, most of a step)
sequences, and copied to the buffers that the graphs of all sizes read (device_inputs.py):

    input rows    |<- T of the batch ->|<- R - T padding: token 0 at position 0, KV to the scratch slot ->|
    sequences     |<- B of the batch ->|<- S - B padding: no new tokens, no keys ->|

Padding rows belong to no sequence. Attention skips them, and the other operators compute each row on its own.
Where the kernels treat rows independently, the batch's rows have the same bits as without padding
(tests/engine/test_cuda_graphs.py).

Graphs cover steps of decoding sequences only: one new token, or a draft, each. A prompt chunk is long enough
to keep the GPU busy while the host launches. All graphs are captured before the engine serves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from tandem_kernels import Attention
from torch import Tensor

from tandem_engine.batch import Batch
from tandem_engine.device_inputs import StaticInputs
from tandem_engine.kv_pool import KVPool
from tandem_engine.models.decoder import ModelInputs

if TYPE_CHECKING:
    from tandem_engine.models.executors import AnyDecoder

#: A step of more rows keeps the GPU busy without a graph.
MAX_ROWS = 512
#: Most drafts have at most this many nodes, root included. It sets attention's tile size in all graphs.
#: On an H200, with 8 in place of 16, attention took a quarter less for one sequence of an 8B model, and 40 to
#: 80 % more for 16 rows of each of 8 to 32 sequences.
TYPICAL_NEW_TOKENS = 16
log = logging.getLogger(__name__)

#: Records what a function launches and returns a function that launches it again.
Capture = Callable[[Callable[[], None]], Callable[[], object]]


def graph_sizes(max_rows: int) -> list[int]:
    """Rows that steps of at most max_rows rows are padded to, ascending.

    Powers of two, and from 6 on one and a half times these: less than a third is padding. The last one is
    max_rows itself.
    """
    max_rows = min(max_rows, MAX_ROWS)
    powers = [1 << n for n in range(max_rows.bit_length())]
    sizes = sorted({*powers, *(power * 3 // 2 for power in powers if power >= 4)})
    return [*(size for size in sizes if size < max_rows), max_rows]


def is_decode(batch: Batch) -> bool:
    """Whether every sequence decodes: each new token is sampled from."""
    return all(s.samples and s.num_new_tokens == s.num_logits_rows for s in batch.sequences)


def compute(
    decoder: AnyDecoder, caches: Sequence[Tensor], inputs: ModelInputs, attention: Attention | None = None
) -> Tensor:
    """Logits [num_rows, vocab] float32; those of padding rows are undefined."""
    return decoder.logits(decoder.forward(inputs, caches, attention=attention))


class CudaCapture:
    """Captures CUDA graphs, which share the memory of their intermediate results: they run one at a time."""

    def __init__(self) -> None:
        self._memory = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Callable[[], object]:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        try:
            # Other threads may use the device during capture, so only this thread's calls are restricted.
            with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
                function()
        finally:
            # torch leaves the thread on the capture's stream if the capture cannot be ended.
            torch.cuda.set_stream(stream)
        return graph.replay


class DecodeGraphs:
    """Runs decode steps through one graph per size.

    inputs: the buffers of all graphs, with room for the rows of the largest and the sequences of any step.
    logits: [rows of the largest, vocab] float32, where all graphs leave their result.
    """

    def __init__(
        self,
        decoder: AnyDecoder,
        pool: KVPool,
        attention: Attention | None,
        inputs: StaticInputs,
        logits: Tensor,
    ) -> None:
        self._decoder = decoder
        self._pool = pool
        self._attention = attention
        self._inputs = inputs
        self._logits = logits
        self._replays: dict[int, Callable[[], object]] = {}

    def capture(self, capture: Capture, idle: ModelInputs) -> None:
        """Captures all sizes, the largest first: the others then fit into its memory.

        idle: a step that may run in place of real ones. Each size runs once without a graph, so that nothing
        is compiled or loaded during capture. After a failure there are no graphs, and steps run eagerly.
        """
        replays: dict[int, Callable[[], object]] = {}
        try:
            for num_rows in reversed(graph_sizes(self._inputs.max_rows)):
                self._load(idle, num_rows)
                step = self._step(num_rows)
                step()
                replays[num_rows] = capture(step)
        except Exception as error:
            log.warning("no CUDA graphs, decode steps launch their kernels one by one: %s", error)
            return
        self._replays = replays

    def size_for(self, batch: Batch) -> int | None:
        """Rows of the smallest graph that holds the batch; None when no graph does."""
        if not is_decode(batch):
            return None
        return min((size for size in self._replays if size >= batch.num_tokens), default=None)

    def run(self, step: ModelInputs, num_rows: int) -> Tensor:
        """Logits [T, vocab] float32 of a step of CPU tensors, by the graph of this size; valid until the next
        run.
        """
        self._load(step, num_rows)
        self._replays[num_rows]()
        return self._logits[: len(step.input_ids)]

    def _load(self, step: ModelInputs, num_rows: int) -> None:
        num_seqs = min(num_rows, self._inputs.max_seqs)
        self._inputs.load(step, self._pool.groups[0].scratch_slot, num_rows=num_rows, num_seqs=num_seqs)

    def _step(self, num_rows: int) -> Callable[[], None]:
        inputs = self._inputs.view(num_rows, min(num_rows, self._inputs.max_seqs))
        logits = self._logits[:num_rows]

        def step() -> None:
            logits.copy_(compute(self._decoder, self._pool.caches, inputs, self._attention))

        return step
