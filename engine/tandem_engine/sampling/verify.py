"""Verification: from the logits at every node of every draft to the tokens that are emitted.

    batch.sequences  those that sample, in order, own consecutive rows of logits [R, V]:
                     |<- seq 0: 1 row (no draft) ->|<- seq 1: root, node 1, ... ->|<- ... ->|

Ancestral sampling over each sequence's tree: at node u a token y is sampled from the target's distribution
after u's path and emitted. If y is a child of u, the walk continues there, else it stops. Each token is
sampled as without a draft, with the same random numbers, so drafts change only the speed.

The walk also stops at a token that ends the text, and at a node without a mask of the request's guide. The
scheduler applies limits, the pod stop strings.

An exception while one sequence is verified is that sequence's result; the others continue. A sequence whose
masks are late skips the step (step_masks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from tandem_core.errors import InvariantError
from tandem_core.sampling import TokenLogprobs
from torch import Tensor

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.guided import Mask
from tandem_engine.sampling.custom import NO_PROCESSORS, LogitsProcessors
from tandem_engine.sampling.device import StepResults
from tandem_engine.sampling.sampler import TokenChooser, checked
from tandem_engine.step_masks import MaskWorkers


@dataclass(frozen=True)
class Verified:
    """The result of verification for one sequence.

    token_ids[i] was chosen at node path[i]; token_ids[i] is the token of node path[i + 1], and the last
    one, the bonus, is no node: its KV is not computed yet.
    """

    #: At least one; none if the sequence skips the step, which also discards its draft's KV.
    token_ids: tuple[int, ...]
    #: Nodes whose KV stays, in order; the root (0) first.
    path: tuple[int, ...]
    #: Where each accepted guess came from; one fewer than token_ids.
    accepted_sources: tuple[str, ...]
    #: One per token if the request asked for them, else empty.
    logprobs: tuple[TokenLogprobs, ...]
    #: Why no token could be chosen; the token is then without meaning, and the request must end.
    error: Exception | None = None

    def __post_init__(self) -> None:
        num_accepted = max(len(self.token_ids) - 1, 0)
        if not (len(self.token_ids) == len(self.path) and len(self.accepted_sources) == num_accepted):
            raise InvariantError("every emitted token is chosen at one node of the path")


class Verifier:
    """Turns a step's logits into tokens; holds no state between steps.

    custom: the logits processors that requests may name.
    """

    def __init__(self, custom: LogitsProcessors = NO_PROCESSORS) -> None:
        self.custom = custom
        #: Changes with each sequence.
        self.work_done = 0
        #: "": none is being verified.
        self.verified_request_id = ""
        self.mask_workers = MaskWorkers()

    def verify(
        self,
        batch: Batch,
        logits: Tensor,
        results: StepResults | None = None,
        most_likely: list[int] | None = None,
    ) -> list[Verified]:
        """One result per sampling sequence, in batch order; logits [R, V] float32, R = batch.num_logits_rows.

        results: what was read back of logits on a device. There all nodes of a draft are decided beforehand;
        on the host only nodes that are visited are worth the time. most_likely: the token of each row's
        largest logit, -1 for a row that holds NaN or +inf; None: not known. Must be called before the step's
        tokens are added to the requests, and after `mask_workers.start`.
        """
        if logits.ndim != 2 or logits.shape[0] != batch.num_logits_rows:
            raise InvariantError(
                f"logits are {tuple(logits.shape)}, the batch samples from {batch.num_logits_rows} rows"
            )
        sampling = [s for s in batch.sequences if s.samples]
        is_decided = [
            not s.request.sampling.needs_processing
            and s.request.search is None
            and (s.request.sampling.is_greedy or results is not None)
            for s in sampling
        ]
        self.mask_workers.wait(batch)
        decided: list[int] = []
        if any(is_decided):
            decided = results.token_ids if results is not None else most_likely or _argmax(logits)
        verified: list[Verified] = []
        first_row = 0
        for n, (sequence, is_known) in enumerate(zip(sampling, is_decided, strict=True)):
            self.work_done += 1
            end_row = first_row + sequence.num_logits_rows
            request = sequence.request
            self.verified_request_id = request.request_id
            search = request.search
            try:
                if request.prompt_scores is not None and request.prompt_scores.error is not None:
                    raise request.prompt_scores.error
                if search is not None:
                    if sequence.beam == 0:
                        num_beams = search.num_running
                        rows_of_beams = (
                            logits[first_row : first_row + num_beams]
                            if results is None
                            else torch.cat([results.rows[n + beam] for beam in range(num_beams)])
                        )
                        search.advance(torch.log_softmax(rows_of_beams.float(), dim=-1).numpy())
                    verified.append(_NO_RESULT)
                elif request.masks is not None and not request.masks.are_ready:
                    verified.append(_SITS_OUT)
                else:
                    choices = decided[first_row:end_row] if is_known else None
                    rows = None
                    if results is not None:
                        rows = results.rows.get(n)
                    elif choices is None or request.sampling.logprobs is not None:
                        rows = logits[first_row:end_row]
                    step, request.masks = request.masks, None
                    if step is None and request.guide is not None:
                        raise InvariantError("the masks of a guide were not started")
                    allowed = step.masks.result() if step is not None else None
                    verified.append(_verify_sequence(sequence, rows, choices, allowed, self.custom))
            except Exception as error:
                verified.append(replace(_NO_RESULT, error=error))
            first_row = end_row
        self.verified_request_id = ""
        return verified


#: For a beam search, which has the step's result itself, and for a sequence that failed.
_NO_RESULT = Verified((0,), (0,), (), ())
_SITS_OUT = Verified((), (), (), ())


def _argmax(logits: Tensor) -> list[int]:
    """The most likely token of each row, the lowest of equals, or -1; numpy is ten times as fast as torch
    here."""
    rows = logits.numpy()
    tokens = rows.argmax(axis=-1)
    is_finite = np.isfinite(np.take_along_axis(rows, tokens[:, None], axis=-1)[:, 0])
    result: list[int] = np.where(is_finite, tokens, -1).tolist()
    return result


def _verify_sequence(
    sequence: ScheduledSequence,
    rows: Tensor | None,
    choices: list[int] | None,
    masks: list[Mask | None] | None,
    custom: LogitsProcessors,
) -> Verified:
    """rows [n, V] raw logits on the host, one per node, None if unused; choices [n] if they are decided
    already; masks [n] of a request with a guide. Raises LogitsError, and InvalidRequestError if a custom
    logits processor fails.
    """
    request = sequence.request
    num_present = 1 if sequence.draft is not None else sequence.num_new_tokens
    if sequence.start + num_present != request.num_tokens:
        raise InvariantError(
            f"request {request.request_id} has {request.num_tokens} tokens, "
            f"but the step samples after {sequence.start + num_present}"
        )
    if choices is not None:
        token_ids, path = _walk(sequence, lambda node: checked(choices[node]))
    else:
        chooser = TokenChooser(request, custom)
        host_rows = _present(rows).numpy()
        allowed = masks or [None] * len(host_rows)
        token_ids, path = _walk(sequence, lambda node: chooser.choose(host_rows[node], allowed[node]), masks)
    num_top = request.sampling.logprobs
    logprobs: tuple[TokenLogprobs, ...] = ()
    if num_top is not None:
        logprobs = token_logprobs(_present(rows)[list(path)], token_ids, num_top)
    return Verified(
        token_ids=token_ids,
        path=path,
        accepted_sources=tuple(sequence.draft.sources[n - 1] for n in path[1:]) if sequence.draft else (),
        logprobs=logprobs,
    )


def _present(rows: Tensor | None) -> Tensor:
    if rows is None:
        raise InvariantError("the logits of a sequence that needs them were left on the device")
    return rows


def _walk(
    sequence: ScheduledSequence, choose: Callable[[int], int], masks: list[Mask | None] | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids and nodes from the root until a choice is no child, has no mask, or ends the text."""
    request = sequence.request
    if sequence.draft is None:
        return (choose(0),), (0,)
    children = sequence.draft.children()
    ends = request.end_token_ids
    num_output = len(request.output_token_ids)
    token_ids: list[int] = []
    path: list[int] = []
    node: int | None = 0
    while node is not None:
        path.append(node)
        token_id = choose(node)
        ends_here = token_id in ends and num_output + len(token_ids) >= request.sampling.min_tokens
        token_ids.append(token_id)
        if ends_here or num_output + len(token_ids) >= request.sampling.max_tokens:
            break
        node = children[node].get(token_id)
        if masks is not None and node is not None and masks[node] is None:
            break
    return tuple(token_ids), tuple(path)


def token_logprobs(rows: Tensor, token_ids: tuple[int, ...], num_top: int) -> tuple[TokenLogprobs, ...]:
    """Log probabilities under the raw logits [n, V], before any processing (as in vLLM): per row the chosen
    token's and the num_top largest.

    The list runs from most to least likely, equals by ascending id, so that a greedy choice heads it.
    """
    logprobs = torch.log_softmax(rows.float(), dim=-1)
    num_top = min(num_top, rows.shape[1])
    return tuple(
        TokenLogprobs(token_id, float(row[token_id]), most_likely(row, num_top))
        for row, token_id in zip(logprobs, token_ids, strict=True)
    )


def most_likely(row: Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """Ids and values of the num_top largest of row [V], descending, equals by ascending id."""
    if num_top == 0:
        return ()
    # topk breaks ties as it likes: take all that equal the last one, then sort them stably.
    candidates = (row >= torch.topk(row, num_top).values[-1]).nonzero()[:, 0]
    values, order = torch.sort(row[candidates], descending=True, stable=True)
    ids = candidates[order[:num_top]].tolist()
    return tuple(zip(ids, values[:num_top].tolist(), strict=True))
