"""The scheduler; the engine runs `batch = schedule()`, the model, `update(batch, verified)`.

    add() ───────> waiting ─────────────────────> running ────────> finished
                      ^   (blocks for all known   │   ^                 ^
                      │    tokens are free)       │   │                 └ finish(), abort(): from anywhere
                      └── preempted: its blocks ──┘   │
                          go, its tokens stay         │
    reserve() ──> waiting for KV ─── adopt() ──> ready
                  (holds its blocks, a           (holds blocks and KV, needs
                  prefill pod fills them)        a place in the batch)

Prefill and decode share one rule: num_computed_tokens approaches num_tokens. A step holds, in this order and
within the token budget: one token per decoding sequence, the nodes of their drafts, and chunks of prompts.
The order is earliest deadline first (`queues`).

A sequence joins only when blocks for all its known tokens are free, so a prefill never stalls half way.
Decoding then takes a block every block_size tokens. A draft uses only free blocks; for the next token itself
the last sequence in order is preempted.

Not here: which deadline a request has (gateway), stop strings (pods, through `finish`). All calls come from
the engine's thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tandem_core.errors import CapacityError, InvalidRequestError, InvariantError
from tandem_core.sampling import FinishReason

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.beam_search import BeamSearch
from tandem_engine.block_manager import BlockCopy, BlockManager
from tandem_engine.request import Request, RequestStatus
from tandem_engine.scheduler.config import PromptWork, RequestCounts, Reservation, SchedulerConfig
from tandem_engine.scheduler.queues import RequestQueues
from tandem_engine.scheduler.sequences import (
    RequestUpdate,
    VerifiedTokens,
    advance_beams,
    append_tokens,
    beam_sequences,
    check_verified,
    decode_sequence,
    fit_draft,
    prefill_sequence,
    token_limit,
)


class Scheduler:
    """Owns every request, and its blocks, from `add` or `reserve` until it is finished."""

    def __init__(self, block_manager: BlockManager, config: SchedulerConfig) -> None:
        if block_manager.has_windows and config.chunk_size > block_manager.max_step_tokens:
            raise ValueError(
                f"chunk_size ({config.chunk_size}) must not be more than the {block_manager.max_step_tokens} "
                "tokens per step for which groups with a window have blocks"
            )
        self.config = config
        self._blocks = block_manager
        self._queues = RequestQueues(block_manager, config)
        self._in_flight: Batch | None = None
        #: Requests that finished during a step; their blocks are freed when it ends.
        self._freed_after_step: list[Request] = []

    # -- entering and leaving -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidRequestError when the prompt does not fit the context, CapacityError when the whole
        pool could not hold the request at its longest. An answer that only the context
        limits is cut to the pool's size.
        """
        self._validate(request)
        self._queues.enter(request)

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for a prompt that a prefill pod will compute; None while they are short (retry later).

        The request is then WAITING_FOR_KV until `adopt` or `abort`. Raises as `add` does. Earlier
        requests that wait here for blocks come first.
        """
        self._validate(request)
        # The blocks of requests in the step under way may still be written.
        if not self._queues.reserve(request, may_preempt=self._in_flight is None):
            return None
        block_ids = self._blocks.block_ids(request.request_id)
        num_cached = request.num_computed_tokens
        first = self._blocks.blocks_for(num_cached)
        wanted = tuple(
            tuple(i for i in range(first, len(ids)) if self._blocks.is_block(group, ids[i]))
            for group, ids in enumerate(block_ids)
        )
        if self._blocks.states is not None:
            block_ids += ((self._blocks.states.live(request.request_id),),)
            wanted += ((0,),)
        return Reservation(block_ids, num_cached, wanted)

    def num_received(self, request: Request, missing_blocks: Sequence[Sequence[int]]) -> int:
        """Tokens of a reservation from which the rest can be computed here, when these logical blocks of each
        group did not arrive."""
        if not self._queues.is_reserved(request):
            raise InvariantError(f"request {request.request_id} has no reservation to adopt")
        return self._blocks.num_received(request, missing_blocks)

    def adopt(
        self, request: Request, num_computed_tokens: int, first_token: tuple[int, ...] | None
    ) -> RequestUpdate | None:
        """End a reservation: the KV of [0, num_computed_tokens) is here and checked.

        With the token(s) that the prefill pod sampled, the whole prompt must be computed; they are
        appended, the finish rules apply, and what happened is returned. With None (the transfer failed or
        fell short) the rest of the prompt is computed here and None is returned. Either way the request
        keeps its blocks and runs from the next step if there is a place, else in its order.

        A request aborted meanwhile is FINISHED and must not be adopted.
        """
        num_tokens = request.num_tokens
        if not self._queues.is_reserved(request):
            raise InvariantError(f"request {request.request_id} has no reservation to adopt")
        if not request.num_computed_tokens <= num_computed_tokens <= num_tokens:
            raise InvariantError(
                f"request {request.request_id}: {num_computed_tokens} tokens arrived, outside "
                f"[{request.num_computed_tokens}, {num_tokens}]"
            )
        if first_token and num_computed_tokens != num_tokens:
            raise InvariantError(f"request {request.request_id} has a first token without all of its KV")
        self._queues.make_ready(request)
        if not first_token:
            # One token is left to compute even if all KV came: its logits did not.
            request.num_computed_tokens = min(num_computed_tokens, num_tokens - 1)
            self._blocks.end_transfer(request)
            self._computed(request)
            return None
        request.num_computed_tokens = num_computed_tokens
        self._computed(request, num_computed_tokens)
        update = append_tokens(request, first_token, self.config.max_model_len)
        if update.finished:
            self._retire(request)
        return update

    def abort(self, request_id: str) -> Request | None:
        """Drop a request in whatever state; None when it is unknown or already finished."""
        return self.finish(request_id, FinishReason.CANCELLED)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request for a cause outside its token ids: cancellation or a stop string."""
        request = self._queues.get(request_id)
        if request is not None:
            request.finish_reason = reason
            self._retire(request)
        return request

    # -- a step ---------------------------------------------------------------------------------------

    def schedule(
        self, max_prompt_tokens: int | None = None, score_weight: float = 1.0, *, now: float = -math.inf
    ) -> Batch | None:
        """The next step's work; None when nothing can run (idle, or all wait for KV or its blocks).
        `now`: monotonic seconds, by which answers are late.

        While a sequence decodes, all prompts together get at most `max_prompt_tokens`, and at most the
        `enough_prompt_tokens` of the configuration. A token of a prompt with log probabilities counts as
        `score_weight` tokens, so that such chunks take no longer than others.
        The draft of each running request is used, shrunk or dropped, and cleared. The batch must come
        back through `update` before the next call.
        """
        if self._in_flight is not None:
            raise InvariantError("the last batch has not come back through update()")
        self._queues.admit(now)
        able = [r for r in self._queues.secure_next_tokens() if not r.waits_for_guide]
        decoding = [r for r in able if r.is_decoding]
        prefilling = [r for r in able if not r.is_decoding]
        budget = self.config.max_tokens_per_step - sum([r.num_places for r in decoding])
        # Prompts are certain work, drafts may be rejected: with both, drafts get at most half of the budget.
        draft_budget = budget // 2 if prefilling else budget
        sequences: list[ScheduledSequence] = []
        copies: list[BlockCopy] = []
        for request in decoding:
            if request.search is not None:
                sequences += beam_sequences(self._blocks, request, request.search)
                copies += self._blocks.take_copies(request)
                continue
            draft = fit_draft(self._blocks, request, draft_budget, self.config.max_model_len)
            if draft is not None:
                draft_budget -= len(draft)
                budget -= len(draft)
            sequences.append(decode_sequence(self._blocks, request, draft))
        enough = self.config.enough_prompt_tokens
        if decoding:
            budget = min([limit for limit in (budget, max_prompt_tokens, enough) if limit is not None])
        wanted = enough or budget
        for request in prefilling:
            if budget > 0 and wanted > 0:
                weight = 1.0 if request.prompt_scores is None else score_weight
                most = max(int(min(budget, self.config.chunk_size) / weight), 1)
                chunk = prefill_sequence(self._blocks, request, most)
                budget -= math.ceil(weight * chunk.num_new_tokens)
                wanted -= math.ceil(weight * chunk.num_new_tokens)
                sequences.append(chunk)
        for request in self._queues.running:
            request.draft = None
        self._in_flight = Batch(tuple(sequences), tuple(copies)) if sequences else None
        return self._in_flight

    def update(self, batch: Batch, verified: Sequence[VerifiedTokens]) -> list[RequestUpdate]:
        """Apply a finished step. `verified` has one item per sampling sequence, in batch order; so has the
        result. A request that was aborted meanwhile emits nothing and is finished. A beam search emits
        nothing, and its state, which has the step's result, says what becomes of it.

        The model runner has by now moved the accepted nodes' KV to [start, start + len(path)).
        """
        sampling = [s for s in batch.sequences if s.samples]
        if len(verified) != len(sampling):
            raise InvariantError(f"{len(sampling)} sequences sample, but {len(verified)} were verified")
        for sequence, result in zip(sampling, verified, strict=True):
            check_verified(sequence, result)
        self._end_step(batch)
        for sequence in batch.sequences:
            if not sequence.samples and sequence.request.status is RequestStatus.RUNNING:
                end = sequence.request.num_computed_tokens = sequence.start + sequence.num_new_tokens
                self._computed(sequence.request, end)
        return [self._apply(s, v) for s, v in zip(sampling, verified, strict=True)]

    # -- accounting -----------------------------------------------------------------------------------

    def decoding(self) -> list[Request]:
        """Requests in the batch that decode: those worth a draft before the next `schedule`, so no beam
        search."""
        return [r for r in self._queues.running if r.is_decoding and r.search is None]

    def has_work(self) -> bool:
        """Whether schedule() is worth calling; requests that wait for KV are not work."""
        return self._queues.has_work

    def counts(self) -> RequestCounts:
        return self._queues.counts()

    def prompt_work(self) -> tuple[PromptWork, ...]:
        return self._queues.prompt_work()

    def check(self) -> list[str]:
        """Audit queues and blocks; one sentence per fault, empty when every invariant holds."""
        faults = self._queues.check() + self._blocks.check()
        if (
            self._queues.block_owners() | {r.request_id for r in self._freed_after_step}
            != self._blocks.owners()
        ):
            faults.append("the block tables and the requests that should own one differ")
        if self._freed_after_step and self._in_flight is None:
            faults.append("finished requests keep blocks although no step is under way")
        return faults

    def _validate(self, request: Request) -> None:
        if self._queues.get(request.request_id) is not None or self._blocks.has_table(request.request_id):
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in use; send a new one")
        max_model_len = self.config.max_model_len
        if request.num_tokens >= max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"has {request.num_tokens} tokens, but the context holds {max_model_len} including at "
                f"least one of output; shorten it to {max_model_len - 1} tokens or fewer",
            )
        if request.search is not None and self._blocks.states is not None:
            raise InvalidRequestError(
                "beam_width", "is set, but models with recurrent layers have no beam search; leave it out"
            )
        if request.num_places > self.config.max_batch:
            raise InvalidRequestError(
                "beam_width",
                f"is {request.num_places}, but the pods compute {self.config.max_batch} sequences at once; "
                f"ask for at most {self.config.max_batch}",
            )
        if request.search is not None and request.num_tokens + request.sampling.max_tokens > max_model_len:
            raise InvalidRequestError(
                "max_tokens",
                f"is {request.sampling.max_tokens}, but the prompt of {request.num_tokens} tokens leaves "
                f"{max_model_len - request.num_tokens} of the context, and beam search needs all; lower it",
            )
        # The last token's KV is never computed.
        longest, size = token_limit(request, max_model_len) - 1, self._blocks.block_size
        # Beams share the full blocks of the prompt.
        shared = (request.num_places - 1) * (request.num_prompt_tokens // size)
        most = self._blocks.max_tokens(request.num_places, shared) + 1
        if longest < most:
            return
        if longest + 1 == max_model_len and most > request.num_tokens:
            request.shorten(most - request.num_prompt_tokens)
        else:
            of_beams = f" of each of {request.num_places} beams" if request.search is not None else ""
            num_blocks = request.num_places * self._blocks.blocks_for(longest) - shared
            raise CapacityError(
                f"prompt and max_tokens{of_beams} need KV for {longest} tokens, {num_blocks} blocks of "
                f"{size}, but this pod holds {self._blocks.num_blocks * size}: lower max_tokens, shorten the "
                "prompt, or give the pod more blocks"
            )

    def _apply(self, sequence: ScheduledSequence, verified: VerifiedTokens) -> RequestUpdate:
        request = sequence.request
        if request.status is not RequestStatus.RUNNING:
            return RequestUpdate(request, (), finished=True)
        if request.search is not None:
            return self._apply_search(sequence, request.search)
        update = append_tokens(request, verified.token_ids, self.config.max_model_len)
        num_valid = sequence.num_new_tokens if sequence.draft is None else len(verified.path)
        # A text that ended inside the accepted path leaves KV beyond its end. A sequence that skipped the
        # step needs the logits of its last token again.
        most = request.num_tokens - (not verified.token_ids)
        request.num_computed_tokens = min(sequence.start + num_valid, most)
        num_advanced = len(verified.path) if sequence.defers_state else num_valid
        self._computed(request, sequence.start + num_advanced)
        if update.finished:
            self._retire(request)
        else:
            self._blocks.trim(request, request.num_tokens)
        return update

    def _apply_search(self, sequence: ScheduledSequence, search: BeamSearch) -> RequestUpdate:
        """Once a step, with the first beam."""
        request = sequence.request
        if sequence.beam > 0:
            return RequestUpdate(request, (), finished=False)
        is_prompt = not request.output_token_ids
        request.num_computed_tokens = sequence.start + sequence.num_new_tokens
        if is_prompt:  # what beams generate is not findable
            self._blocks.commit(request)
        self._blocks.slide(request)
        update = advance_beams(request, search)
        if update.finished:
            self._retire(request)
        return update

    def _computed(self, request: Request, num_advanced: int | None = None) -> None:
        """More of its tokens are computed; num_advanced: tokens that its recurrent state covers, None if it
        did not change."""
        self._blocks.commit(request)
        self._blocks.slide(request)
        request.num_computed_tokens = self._blocks.advance_state(request, num_advanced)

    def _end_step(self, batch: Batch) -> None:
        """The step is over: blocks of requests that finished during it can be reused."""
        if batch is not self._in_flight:
            raise InvariantError("this batch is not the one in flight")
        self._in_flight = None
        for request in self._freed_after_step:
            self._blocks.free(request)
        self._freed_after_step.clear()

    def _retire(self, request: Request) -> None:
        """Take a finished request out of its queue and give its blocks back, after the step in flight if
        that may still write to them."""
        self._queues.remove(request)
        if self._in_flight is not None and any(s.request is request for s in self._in_flight.sequences):
            self._freed_after_step.append(request)
        elif self._blocks.has_table(request.request_id):
            self._blocks.free(request)
