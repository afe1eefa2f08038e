"""Computes the masks of guides in other threads during the forward pass.

If the masks of a sequence are not ready soon after the step's logits, the sequence skips the step: it gets no
token and computes the same position again, with the same draft, in a later step. A slow guide therefore
delays only the requests that use it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from tandem_core.errors import InvariantError
from tandem_core.guide import Guide
from tandem_core.nice_thread import nice_threads

from tandem_engine.batch import Batch
from tandem_engine.draft_tree import DraftTree
from tandem_engine.guided import GuideState, Mask
from tandem_engine.request import Request

#: Time that a step waits for masks once it has its logits.
_PATIENCE_S = 0.005
#: More threads than cores, so that a few slow masks do not delay fast ones. With many more, slow masks take
#: cores from the forward pass.
_NUM_WORKERS = 8


@dataclass(frozen=True)
class StepMasks:
    """Masks of one sequence in one step, as `GuideState.masks` gives them."""

    draft: DraftTree | None
    masks: Future[list[Mask | None]] = field(default_factory=Future)

    @property
    def are_ready(self) -> bool:
        return self.masks.done()


class MaskWorkers:
    """Threads that compute masks, one of them for slow guides."""

    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="guide")
        self._slow = nice_threads(1, "slow-guide")

    def start(self, batch: Batch) -> None:
        """Starts the masks of all sequences, except those that still have masks from a skipped step."""
        by_guide: defaultdict[Guide | None, list[tuple[Request, GuideState]]] = defaultdict(list)
        for sequence in batch.sequences:
            request, state = sequence.request, sequence.request.guide
            if state is None or not sequence.samples or request.masks is not None:
                continue
            request.masks = StepMasks(sequence.draft)
            if request.output_token_ids or sequence.draft is not None:
                by_guide[request.sampling.guide].append((request, state))
            else:
                request.masks.masks.set_result([state.first_mask])
        for guided in by_guide.values():
            is_slow = any(state.is_slow for _, state in guided)
            (self._slow if is_slow else self._workers).submit(_compute, guided)

    @staticmethod
    def wait(batch: Batch) -> None:
        """Waits a little for masks that are not ready."""
        masks = [s.request.masks.masks for s in batch.sequences if s.samples and s.request.masks is not None]
        wait(masks, timeout=_PATIENCE_S)


def _compute(guided: Sequence[tuple[Request, GuideState]]) -> None:
    """Computes the masks of requests with the same guide one after the other."""
    for request, state in guided:
        step = request.masks
        if step is None:
            continue
        try:
            masks = state.masks(request.output_token_ids, step.draft, request.eos_token_ids)
            step.masks.set_result(masks)
        except BaseException as error:  # panics in Rust libraries are not Exceptions
            step.masks.set_exception(error if isinstance(error, Exception) else InvariantError(repr(error)))
