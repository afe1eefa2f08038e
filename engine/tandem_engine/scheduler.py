"""Decides what each step computes; the pod's loop runs `batch = schedule()`, the model, `update(batch)`.

    add() ───────> waiting ──────────────> running ──────> finished
                      ^   blocks for all      │ ^ │           ^
                      │   known tokens        │ │ └── finish()/abort(), from anywhere
                      └── preempted: blocks ──┘ │
                          taken, tokens kept    │
    reserve() ──> waiting for KV ── adopt() ──> ready
                  (blocks held, a prefill       (blocks and KV held, waits for a
                   pod fills them)               place in the batch)

Prefill and decode are one thing here: num_computed_tokens chases num_tokens. A step holds, in this order,
one token for every running sequence that decodes, the nodes of their drafts, and chunks of prompts, as
far as the token budget goes. Whoever came first is served first.

Memory. A sequence joins only when blocks for all its known tokens are free, so a prefill never stalls
half way; decoding then takes a block every block_size tokens. When one is missing the youngest
sequence is preempted and later computes its KV again. A sequence that has nobody younger waits a step:
the oldest can always evict all others, so somebody always advances.

All calls come from one engine thread.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.block_manager import BlockManager
from tandem_engine.drafts.tree import DraftTree
from tandem_engine.errors import CapacityError, InvalidRequestError, InvariantError
from tandem_engine.finishing import Progress, VerifiedTokens, append_tokens, token_limit
from tandem_engine.request import FinishReason, Request, RequestStatus

__all__ = ["Progress", "Reservation", "Scheduler", "SchedulerBooks", "SchedulerConfig", "VerifiedTokens"]


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step and of one request, in tokens unless said otherwise."""

    #: Prompt and output together.
    max_model_len: int
    #: Sequences that share a step.
    max_batch: int = 32
    #: Tokens computed in a step: decoded, drafted and prefilled ones.
    max_tokens_per_step: int = 512
    #: Of one prompt in one step.
    chunk_size: int = 512

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_batch", "chunk_size"):
            if self.__dict__[name] < 1:
                raise ValueError(f"{name} must be at least 1, not {self.__dict__[name]}")
        if self.max_tokens_per_step < self.max_batch:
            raise ValueError(
                f"max_tokens_per_step ({self.max_tokens_per_step}) must let every sequence of a batch "
                f"decode one token: raise it, or lower max_batch ({self.max_batch})"
            )


@dataclass(frozen=True)
class Reservation:
    """Where a prefill pod's KV goes: blocks for the whole prompt, of which the leading ones may be cached."""

    #: Physical blocks in logical order.
    block_ids: tuple[int, ...]
    #: Leading prompt tokens whose KV is already here; a multiple of the block size.
    num_cached_tokens: int
    #: Logical indices into block_ids that are still to be filled.
    wanted_blocks: tuple[int, ...]


@dataclass(frozen=True)
class SchedulerBooks:
    """Requests by state; those with KV that wait for a place in the batch count as waiting."""

    waiting: int
    running: int
    waiting_for_kv: int


class Scheduler:
    """Owns every request from `add` or `reserve` until it is finished."""

    def __init__(self, block_manager: BlockManager, config: SchedulerConfig) -> None:
        self.blocks = block_manager
        self.config = config
        self._num_arrivals = 0
        #: Every live request's place in the order of arrival.
        self._arrivals: dict[str, int] = {}
        self._requests: dict[str, Request] = {}
        # Each in order of arrival. Waiting requests own no blocks, all others do.
        self._waiting: list[Request] = []
        self._ready: list[Request] = []
        self._running: list[Request] = []
        self._reserved: dict[str, Request] = {}
        #: The queue's head when blocks, not places, keep it waiting: reservations then hold back.
        self._short_of_blocks: Request | None = None
        self._in_flight: Batch | None = None
        #: Finished while a step still writes their blocks; freed when the step is over.
        self._doomed: list[Request] = []

    # -- entering and leaving -------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises InvalidRequestError when the prompt does not fit the context, CapacityError when the whole
        pool could not hold the request at its longest.
        """
        self._validate(request)
        self._register(request)
        insort(self._waiting, request, key=self._arrival)

    def reserve(self, request: Request) -> Reservation | None:
        """Blocks for a prompt that a prefill pod will compute; None while they are short (retry later).

        The request is then WAITING_FOR_KV until `adopt` or `abort`. Raises as `add` does. Older requests
        that wait here for blocks come first.
        """
        self._validate(request)
        if self._short_of_blocks is not None or not self._allocate_all(request):
            return None
        self._register(request)
        request.status = RequestStatus.WAITING_FOR_KV
        self._reserved[request.request_id] = request
        block_ids = self.blocks.block_ids(request.request_id)
        cached = request.num_computed_tokens
        wanted = tuple(range(cached // self.blocks.block_size, len(block_ids)))
        return Reservation(block_ids, cached, wanted)

    def adopt(
        self, request: Request, num_computed_tokens: int, first_tokens: tuple[int, ...] | None
    ) -> Progress | None:
        """End a reservation: the KV of [0, num_computed_tokens) has arrived and is verified.

        With the first output token(s) the whole prompt must be computed; they are appended, the finish
        rules apply, and what happened is returned. With None (the transfer failed or fell short) the
        rest of the prompt is computed here and None is returned. Either way the request keeps its blocks
        and joins the batch at the next step if there is a place, else in order of arrival.
        """
        expected = request.num_tokens
        if self._reserved.get(request.request_id) is not request:
            raise InvariantError(f"request {request.request_id} has no reservation to adopt")
        if not request.num_computed_tokens <= num_computed_tokens <= expected:
            raise InvariantError(
                f"request {request.request_id}: {num_computed_tokens} tokens arrived, outside "
                f"[{request.num_computed_tokens}, {expected}]"
            )
        if first_tokens and num_computed_tokens != expected:
            raise InvariantError(f"request {request.request_id} has a first token without all of its KV")
        del self._reserved[request.request_id]
        request.status = RequestStatus.WAITING
        insort(self._ready, request, key=self._arrival)
        # Without a first token one token is left to compute even if all KV came: its logits did not.
        request.num_computed_tokens = (
            num_computed_tokens if first_tokens else min(num_computed_tokens, expected - 1)
        )
        self.blocks.commit(request)
        if not first_tokens:
            return None
        progress = append_tokens(request, first_tokens, self.config.max_model_len)
        if progress.finished:
            self._leave(request)
        return progress

    def abort(self, request_id: str) -> Request | None:
        """Drop a request in whatever state; None when it is unknown or already finished."""
        return self.finish(request_id, FinishReason.CANCELLED)

    def finish(self, request_id: str, reason: FinishReason, stop_reason: str = "") -> Request | None:
        """End a request for a cause the token ids do not show: cancelled, or its text met a stop string."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        request.finish_reason = reason
        request.stop_reason = stop_reason
        self._leave(request)
        return request

    # -- a step ---------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """The next step's work; None when nothing can run (idle, or all wait for KV or its blocks).

        Each decoding request's `draft` is used, shrunk or dropped, and cleared. The batch must come back
        through `update` or `abandon` before the next call.
        """
        if self._in_flight is not None:
            raise InvariantError("the last batch has not come back through update() or abandon()")
        self._admit()
        able = self._secure_next_tokens()
        decoding = [r for r in able if r.is_decoding]
        prefilling = [r for r in able if not r.is_decoding]
        budget = self.config.max_tokens_per_step - len(decoding)
        # Drafts are a bet, prompts are work: with both, drafts get at most half of what is left.
        draft_budget = budget // 2 if prefilling else budget
        sequences = []
        for request in decoding:
            draft = self._fit_draft(request, draft_budget)
            if draft is not None:
                draft_budget -= len(draft)
                budget -= len(draft)
            sequences.append(self._decode(request, draft))
        for request in prefilling:
            if (chunk := self._chunk(request, budget)) > 0:
                budget -= chunk
                sequences.append(self._prefill(request, chunk))
        for request in self._running:
            request.draft = None
        self._in_flight = Batch(tuple(sequences)) if sequences else None
        return self._in_flight

    def update(self, batch: Batch, verified: Sequence[VerifiedTokens]) -> list[Progress]:
        """Book a finished step. `verified` has one item per sampling sequence, in batch order; so has the
        result. A request that was aborted meanwhile has emitted nothing and is finished.

        The model runner has by now moved the accepted nodes' KV to [start, start + len(path)).
        """
        self._land(batch)
        sampling = [s for s in batch.sequences if s.samples]
        if len(verified) != len(sampling):
            raise InvariantError(f"{len(sampling)} sequences sample, but {len(verified)} were verified")
        for sequence in batch.sequences:
            if not sequence.samples and sequence.request.finish_reason is None:
                sequence.request.num_computed_tokens = sequence.start + sequence.num_new_tokens
                self.blocks.commit(sequence.request)
        progress = [self._book(s, v) for s, v in zip(sampling, verified, strict=True)]
        self._bury_doomed()
        return progress

    def abandon(self, batch: Batch) -> None:
        """Forget a step that failed: nothing of it counts as computed. Its requests may run again."""
        self._land(batch)
        for sequence in batch.sequences:
            if sequence.request.finish_reason is None:
                self.blocks.trim(sequence.request, sequence.request.num_tokens)
        self._bury_doomed()

    # -- books ----------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether schedule() is worth calling; requests that wait for KV are not work."""
        return bool(self._waiting or self._ready or self._running)

    def books(self) -> SchedulerBooks:
        return SchedulerBooks(
            waiting=len(self._waiting) + len(self._ready),
            running=len(self._running),
            waiting_for_kv=len(self._reserved),
        )

    def check(self) -> list[str]:
        """Audit queues and blocks; one sentence per fault, empty when the books balance."""
        queued = self._waiting + self._ready + self._running + list(self._reserved.values())
        owning = [*self._ready, *self._running, *self._reserved.values(), *self._doomed]
        faults = self.blocks.check()
        if sorted(r.request_id for r in queued) != sorted(self._requests):
            faults.append("the queues and the live requests differ")
        if self._requests.keys() != self._arrivals.keys():
            faults.append("the live requests and their order of arrival differ")
        if {r.request_id for r in owning} != self.blocks.owners():
            faults.append("block tables and the requests that should own one differ")
        if len(self._running) > self.config.max_batch:
            faults.append(f"{len(self._running)} requests run, more than {self.config.max_batch}")
        for queue in (self._waiting, self._ready, self._running):
            if [self._arrival(r) for r in queue] != sorted(self._arrival(r) for r in queue):
                faults.append("a queue is out of order")
        for request in queued:
            if not 0 <= request.num_computed_tokens < request.num_tokens:
                faults.append(f"request {request.request_id} has nothing left to compute")
        for status, requests in (
            (RequestStatus.WAITING, self._waiting + self._ready),
            (RequestStatus.RUNNING, self._running),
            (RequestStatus.WAITING_FOR_KV, list(self._reserved.values())),
            (RequestStatus.FINISHED, self._doomed),
        ):
            faults += [f"request {r.request_id} is {r.status}, not {status}"
                       for r in requests if r.status is not status]  # fmt: skip
        return faults

    # -- admission and memory -------------------------------------------------------------------------

    def _validate(self, request: Request) -> None:
        if request.request_id in self._requests or self.blocks.has_table(request.request_id):
            raise InvalidRequestError("request_id", f"{request.request_id!r} is in use; send a new one")
        max_model_len = self.config.max_model_len
        if request.num_prompt_tokens >= max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"has {request.num_prompt_tokens} tokens, but the context holds {max_model_len} including at "
                f"least one of output; shorten it to {max_model_len - 1} tokens or fewer",
            )
        # The last token's KV is never computed.
        longest = token_limit(request, max_model_len) - 1
        if self.blocks.blocks_for(longest) > self.blocks.num_blocks:
            raise CapacityError(
                f"the prompt and max_tokens need KV for {longest} tokens, but this pod holds "
                f"{self.blocks.num_blocks * self.blocks.block_size}: lower max_tokens or give the pod more blocks"
            )

    def _register(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._arrivals[request.request_id] = self._num_arrivals
        self._num_arrivals += 1

    def _arrival(self, request: Request) -> int:
        return self._arrivals[request.request_id]

    def _admit(self) -> None:
        """Fill the places in the batch from both queues, in order of arrival."""
        backlog = sum(r.num_uncomputed_tokens for r in self._running)
        may_wait = True  # whether the waiting queue is still to be considered in this step
        while len(self._running) < self.config.max_batch:
            # Blocks are not taken before there is a budget to compute something into them.
            waiting = self._waiting[0] if self._waiting and may_wait else None
            if waiting is not None and backlog >= self.config.max_tokens_per_step:
                waiting = None
            ready = self._ready[0] if self._ready else None
            if waiting is not None and (ready is None or self._arrival(waiting) < self._arrival(ready)):
                if not self._allocate_all(waiting):
                    self._short_of_blocks = waiting
                    may_wait = False
                    continue
                joining = self._waiting.pop(0)
                if joining is self._short_of_blocks:
                    self._short_of_blocks = None
            elif ready is not None:
                joining = self._ready.pop(0)
            else:
                break
            joining.status = RequestStatus.RUNNING
            insort(self._running, joining, key=self._arrival)
            backlog += joining.num_uncomputed_tokens

    def _allocate_all(self, request: Request) -> bool:
        """Adopt what is cached and allocate the rest of all known tokens; False changes nothing.

        One block per sequence that already runs must stay free, or admitting one would soon preempt it.
        """
        num_blocks = self.blocks.blocks_for(request.num_tokens)
        cached = self.blocks.match_prefix(request)
        num_missing = num_blocks - self.blocks.blocks_for(cached)
        spare = len(self._running) + len(self._ready)
        if num_missing + spare > self.blocks.num_free_blocks or not self.blocks.allocate(
            request, request.num_tokens
        ):
            self.blocks.free(request)
            return False
        request.num_computed_tokens = cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
        return True

    def _secure_next_tokens(self) -> list[Request]:
        """Give every running sequence, oldest first, blocks for all its known tokens; preempt if need be.

        Returns those that can run this step.
        """
        able = []
        for request in list(self._running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for an older one just now
            while not (secured := self.blocks.allocate(request, request.num_tokens)):
                victim = self._youngest_below(request)
                if victim is None:
                    break
                self._preempt(victim)
            if secured:
                able.append(request)
        return able

    def _youngest_below(self, request: Request) -> Request | None:
        """Whom to preempt for `request`: the latest arrival that runs and is younger, or is not running
        although it holds blocks."""
        candidates = self._ready + [r for r in self._running if self._arrival(r) > self._arrival(request)]
        return max(candidates, key=self._arrival, default=None)

    def _preempt(self, victim: Request) -> None:
        """Take a request's blocks; it keeps its tokens and goes ahead of all that arrived after it."""
        (self._running if victim.status is RequestStatus.RUNNING else self._ready).remove(victim)
        self.blocks.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.draft = None
        victim.status = RequestStatus.WAITING
        insort(self._waiting, victim, key=self._arrival)

    # -- what a sequence computes ---------------------------------------------------------------------

    def _fit_draft(self, request: Request, budget: int) -> DraftTree | None:
        """The part of the request's draft that budget, context and free blocks allow; takes its blocks."""
        draft = request.draft
        limit = token_limit(request, self.config.max_model_len)
        if draft is None or request.num_tokens + 1 >= limit:
            return None  # the next token is the last one: a guess cannot help
        size = min(
            len(draft),
            budget,
            self.config.max_model_len - request.num_tokens,
            self.blocks.num_allocatable_tokens(request.request_id) - request.num_tokens,
        )
        if size <= 0:
            return None
        if not self.blocks.allocate(request, request.num_tokens + size):
            raise InvariantError("blocks counted as free could not be allocated")
        return draft if size == len(draft) else draft.truncated(size)

    def _chunk(self, request: Request, budget: int) -> int:
        """Tokens of a prompt to compute now. A chunk that is not the last ends with a block if it can, so
        that all it computed can be shared and sent."""
        start, num_tokens = request.num_computed_tokens, request.num_tokens
        end = min(start + min(self.config.chunk_size, budget), num_tokens)
        aligned = end // self.blocks.block_size * self.blocks.block_size
        return (aligned if start < aligned and end < num_tokens else end) - start

    def _decode(self, request: Request, draft: DraftTree | None) -> ScheduledSequence:
        root = request.output_token_ids[-1]
        return ScheduledSequence(
            request=request,
            block_ids=self.blocks.block_ids(request.request_id),
            start=request.num_computed_tokens,
            token_ids=(root, *draft.token_ids) if draft is not None else (root,),
            draft=draft,
            samples=True,
        )

    def _prefill(self, request: Request, num_tokens: int) -> ScheduledSequence:
        start = request.num_computed_tokens
        return ScheduledSequence(
            request=request,
            block_ids=self.blocks.block_ids(request.request_id),
            start=start,
            token_ids=tuple(request.tokens(start, start + num_tokens)),
            draft=None,
            samples=start + num_tokens == request.num_tokens,
        )

    # -- after a step ---------------------------------------------------------------------------------

    def _book(self, sequence: ScheduledSequence, verified: VerifiedTokens) -> Progress:
        request = sequence.request
        if request.finish_reason is not None:
            return Progress(request, (), finished=True)
        _check_path(sequence, verified)
        progress = append_tokens(request, verified.token_ids, self.config.max_model_len)
        num_valid = sequence.num_new_tokens if sequence.draft is None else len(verified.path)
        # A text that ended inside the accepted path has KV beyond its end.
        request.num_computed_tokens = min(sequence.start + num_valid, request.num_tokens)
        self.blocks.commit(request)
        if progress.finished:
            self._leave(request)
        else:
            self.blocks.trim(request, request.num_tokens)
        return progress

    def _land(self, batch: Batch) -> None:
        if batch is not self._in_flight:
            raise InvariantError("this batch is not the one in flight")
        self._in_flight = None

    def _leave(self, request: Request) -> None:
        """Take a finished request out of its queue and give its blocks back, at once unless a step in
        flight may still write to them."""
        request_id = request.request_id
        del self._requests[request_id]
        for queue in (self._waiting, self._ready, self._running):
            if request in queue:
                queue.remove(request)
        self._reserved.pop(request_id, None)
        del self._arrivals[request_id]
        if request is self._short_of_blocks:
            self._short_of_blocks = None
        request.status = RequestStatus.FINISHED
        if self._in_flight is not None and any(s.request is request for s in self._in_flight.sequences):
            self._doomed.append(request)
        elif self.blocks.has_table(request_id):
            self.blocks.free(request)

    def _bury_doomed(self) -> None:
        for request in self._doomed:
            self.blocks.free(request)
        self._doomed.clear()


def _check_path(sequence: ScheduledSequence, verified: VerifiedTokens) -> None:
    """A wrong path would put KV of one text under the tokens of another, and the cache would share it."""
    path, token_ids = verified.path, verified.token_ids
    draft = sequence.draft
    good = len(path) == len(token_ids) and path[:1] == (0,) and (draft is not None or len(path) == 1)
    if good and draft is not None:
        good = all(
            0 < node <= len(draft)
            and draft.parents[node - 1] == parent
            and draft.token_ids[node - 1] == token
            for parent, node, token in zip(path, path[1:], token_ids, strict=False)
        )
    if not good:
        raise InvariantError(
            f"request {sequence.request.request_id}: tokens {token_ids} do not follow path {path} of the draft"
        )
