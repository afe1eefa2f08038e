"""The queues of requests, admission to the batch, and preemption.

    waiting    no blocks
    ready      blocks and KV; needs a place in the batch
    reserved   blocks, KV in transfer; leaves by adopt or remove only
    running    blocks for all its tokens; they take at most max_batch places, a beam search one for each beam

The order everywhere is earliest deadline first (`Request.due`), then arrival. The batch has the first of
those that hold blocks: with a full batch, a later one that runs is paused and keeps its KV. Only for a
request that is due much earlier are blocks taken away, because that KV must be computed again.

Late answers give way. An answer without an objective that it can still meet (`Request.late_at`) is put off:
its deadline moves a minute ahead, so it runs while no request in time needs its place. When the new deadline
comes, it is the first of those that wait, and has a turn of at least a second before it is put off again.
Those that become late together are put off by different parts of the minute, and all these deadlines are at
least a second apart. So few late answers at a time compete with requests in time, and n of them have a turn
every max(60, n) seconds.

No starvation or deadlock: a deadline lies at most a bounded time behind the arrival, or behind the last turn
of a late answer. So every request becomes the first, which may preempt all others that hold blocks, except
the reserved ones, whose transfers end by themselves. A waiting head that lacks blocks stops reservations for
later ones; of these only requests that already hold blocks may pass it.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tandem_core.contracts import DEFAULT_DUE_S

from tandem_engine.block_manager import BlockManager
from tandem_engine.request import Request, RequestStatus
from tandem_engine.scheduler.config import PromptWork, RequestCounts, SchedulerConfig

#: A request's blocks are taken for a waiting one whose deadline is this much earlier.
_MUCH_EARLIER_S = 10.0
#: Least seconds that a late answer runs at its turn, and between two deadlines of late answers. An answer
#: that ends within this time after its objective is not put off.
_TURN_S = 1.0
#: Interval of the search for late answers.
_LOOK_EVERY_S = 0.25

_Order: TypeAlias = tuple[float, int]
#: Allocates the rest of a request's blocks while so many of each group stay free.
_Allocate: TypeAlias = Callable[[Request, Sequence[int]], bool]


def _num_places(requests: list[Request]) -> int:
    return sum([r.num_places for r in requests])


class RequestQueues:
    """Every live request is in exactly one queue, as its status says."""

    def __init__(self, blocks: BlockManager, config: SchedulerConfig) -> None:
        self._blocks = blocks
        self._config = config
        self._requests: dict[str, Request] = {}
        #: Deadline and number of arrival of each live request.
        self._orders: dict[str, _Order] = {}
        self._num_arrivals = 0
        self._waiting: list[Request] = []
        self._ready: list[Request] = []
        self._running: list[Request] = []
        self._reserved: dict[str, Request] = {}
        #: When the turn of each late answer ends.
        self._turn_ends: dict[str, float] = {}
        #: The last deadline to which an answer was put off.
        self._put_off_to = -math.inf
        self._looked_at = -math.inf
        #: Waits for blocks rather than for a place in the batch.
        self._short_of_blocks: Request | None = None

    def get(self, request_id: str) -> Request | None:
        return self._requests.get(request_id)

    @property
    def running(self) -> tuple[Request, ...]:
        return tuple(self._running)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._ready or self._running)

    # -- moves that others ask for --------------------------------------------------------------------

    def enter(self, request: Request) -> None:
        """A new request waits."""
        self._register(request)
        if request.prompt_scores is None:
            # Until it is scheduled, reports of the work that waits count on it.
            request.num_cached_tokens = self._blocks.count_cached(
                request.prompt_token_ids, request.cache_salt
            )
        insort(self._waiting, request, key=self._order)

    def reserve(self, request: Request, *, may_preempt: bool) -> bool:
        """A new request gets all its blocks and waits for its KV; False without blocks."""
        short = self._short_of_blocks
        if short is not None and self._order(short) < (request.due, self._num_arrivals):
            return False
        room = self._make_room if may_preempt else self._allocate_all
        if not room(request, self._blocks.allocate_transfer):
            return False
        self._register(request)
        request.status = RequestStatus.WAITING_FOR_KV
        self._reserved[request.request_id] = request
        return True

    def is_reserved(self, request: Request) -> bool:
        return self._reserved.get(request.request_id) is request

    def make_ready(self, request: Request) -> None:
        """A reserved request's transfer is over."""
        del self._reserved[request.request_id]
        request.status = RequestStatus.WAITING
        insort(self._ready, request, key=self._order)

    def remove(self, request: Request) -> None:
        """Remove a finished request; the caller frees its blocks."""
        match request.status:
            case RequestStatus.WAITING_FOR_KV:
                del self._reserved[request.request_id]
            case RequestStatus.RUNNING:
                self._running.remove(request)
            case _:
                (self._waiting if request in self._waiting else self._ready).remove(request)
        if request is self._short_of_blocks:
            self._short_of_blocks = None
        del self._requests[request.request_id]
        del self._orders[request.request_id]
        self._turn_ends.pop(request.request_id, None)
        request.status = RequestStatus.FINISHED

    # -- admission ------------------------------------------------------------------------------------

    def admit(self, now: float) -> None:
        """Fill the batch in order; a request that lacks blocks is passed by those that have them. `now`:
        monotonic seconds."""
        self._put_off_late(now)
        head_fits = True
        while self._waiting or self._ready:
            head = self._waiting[0] if self._waiting and head_fits else None
            if head is not None and not self._can_compute(head):
                head = None
            ready = self._ready[0] if self._ready else None
            if head is None or (ready is not None and self._order(ready) < self._order(head)):
                joining = ready
            else:
                joining = head
            if joining is None or not self._has_place(joining):
                return
            if joining is ready:
                self._ready.pop(0)
            else:
                head_fits = self._make_room(joining, self._blocks.allocate_known)
                if not head_fits:
                    self._short_of_blocks = joining
                    continue
                self._waiting.pop(0)
                if joining is self._short_of_blocks:
                    self._short_of_blocks = None
            while _num_places(self._running) + joining.num_places > self._config.max_batch:
                self._pause(self._running[-1])
            joining.status = RequestStatus.RUNNING
            insort(self._running, joining, key=self._order)
            if joining.request_id in self._turn_ends:
                self._turn_ends[joining.request_id] = now + _TURN_S

    def _put_off_late(self, now: float) -> None:
        """Puts off the answers that give way, at most once per _LOOK_EVERY_S."""
        if now < self._looked_at + _LOOK_EVERY_S:
            return
        self._looked_at = now
        late = sorted([r for r in self._requests.values() if self._gives_way(r, now)], key=self._order)
        num_new, number = len(late) - len(self._turn_ends.keys() & {r.request_id for r in late}), 0
        for request in late:
            wait_s = DEFAULT_DUE_S
            if request.request_id not in self._turn_ends:
                number += 1
                wait_s *= number / num_new
            request.due = self._put_off_to = max(now + wait_s, self._put_off_to + _TURN_S)
            self._orders[request.request_id] = (request.due, self._order(request)[1])
            self._turn_ends[request.request_id] = now
        if late:
            for queue in (self._waiting, self._ready, self._running):
                queue.sort(key=self._order)

    def _gives_way(self, request: Request, now: float) -> bool:
        """Whether the request is a late answer that has not been put off yet or has had its turn."""
        turn_end = self._turn_ends.get(request.request_id)
        if turn_end is None:
            return bool(request.output_token_ids) and request.late_at + _TURN_S <= now
        return request.status is RequestStatus.RUNNING and max(request.due, turn_end) <= now

    def _can_compute(self, request: Request) -> bool:
        """Whether the next step has room for its prompt behind what comes first: blocks are allocated only
        when they will be computed into."""
        order = self._order(request)
        earlier = sum([r.num_uncomputed_tokens for r in self._running if self._order(r) < order])
        return earlier < self._config.max_tokens_per_step

    def _has_place(self, request: Request) -> bool:
        """Whether the batch has one, or would with those paused that are due later."""
        staying = [r for r in self._running if r.due <= request.due]
        return _num_places(staying) + request.num_places <= self._config.max_batch

    def _pause(self, request: Request) -> None:
        """Out of the batch; it keeps its KV."""
        self._running.remove(request)
        request.draft = None
        request.status = RequestStatus.WAITING
        insort(self._ready, request, key=self._order)

    def _make_room(self, request: Request, allocate: _Allocate) -> bool:
        """Allocates all blocks, if need be those of requests that are due much later. False takes none."""
        if self._allocate_all(request, allocate):
            return True
        holders = [r for r in self._running + self._ready if r.due > request.due + _MUCH_EARLIER_S]
        # An upper bound, without what is cached: nothing is preempted for a request that still may not fit.
        demand, growth = self._blocks.demand(request), self._blocks.growth(self._running + self._ready)
        could_free = self._blocks.could_free(holders)
        if any(d + g > free for d, g, free in zip(demand, growth, could_free, strict=True)):
            return False
        holders.sort(key=self._order)
        while holders:
            self._preempt(holders.pop())
            if self._allocate_all(request, allocate):
                return True
        return False  # their blocks are shared with others

    def _allocate_all(self, request: Request, allocate: _Allocate) -> bool:
        """Adopt what is cached and allocate the rest of all known tokens; False changes nothing.

        What the sequences that run or soon will need next must stay free, or admitting one more would soon
        preempt it again.
        """
        keep_free = self._blocks.growth(self._running + self._ready)
        cached = request.num_computed_tokens = self._blocks.match_prefix(request)
        if not allocate(request, keep_free):
            self._blocks.free(request)
            request.num_computed_tokens = 0
            return False
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
        return True

    # -- preemption -----------------------------------------------------------------------------------

    def secure_next_tokens(self) -> list[Request]:
        """Give every running sequence, in order, blocks for all its known tokens; preempt if need be.

        Returns those that can run this step. A sequence that can preempt no other keeps its KV and waits.
        """
        able = []
        for request in self.running:
            if request.status is not RequestStatus.RUNNING:
                continue  # just preempted for an earlier one
            while not (secured := self._fork(request) and self._blocks.allocate(request, request.num_tokens)):
                victim = self._victim(request)
                if victim is None:
                    break
                self._preempt(victim)
            if secured:
                able.append(request)
        return able

    def _fork(self, request: Request) -> bool:
        """Gives the beams of a search their blocks; False without blocks."""
        if request.fork is not None:
            if not self._blocks.fork(request, request.fork):
                return False
            request.fork = None
        return True

    def _victim(self, request: Request) -> Request | None:
        """The last in order among the later running ones and those that hold blocks but do not run."""
        later = [r for r in self._running if self._order(r) > self._order(request)]
        return max(later + self._ready, key=self._order, default=None)

    def _preempt(self, victim: Request) -> None:
        """Free a request's blocks; it keeps its place in the order and its tokens, but a beam search has none
        to keep."""
        (self._running if victim.status is RequestStatus.RUNNING else self._ready).remove(victim)
        self._blocks.free(victim)
        victim.num_computed_tokens = 0
        if victim.sampling.beam_search is not None:
            victim.begin_search(victim.sampling.beam_search)
        victim.num_preemptions += 1
        victim.draft = None
        victim.status = RequestStatus.WAITING
        insort(self._waiting, victim, key=self._order)

    # -- accounting -----------------------------------------------------------------------------------

    def counts(self) -> RequestCounts:
        return RequestCounts(
            waiting=len(self._waiting) + len(self._ready),
            running=_num_places(self._running),
            waiting_for_kv=len(self._reserved),
        )

    def prompt_work(self) -> tuple[PromptWork, ...]:
        """Work of every request that still computes its prompt here, the earliest deadline first."""
        prompts = [r for r in (*self._waiting, *self._ready, *self._running) if not r.is_decoding]
        prompts.sort(key=self._order)
        return tuple(
            [
                PromptWork(r.request_id, r.due, r.num_computed_tokens or r.num_cached_tokens, r.num_tokens)
                for r in prompts
            ]
        )

    def block_owners(self) -> frozenset[str]:
        """Ids of the requests that own blocks by the queue they are in."""
        return frozenset(r.request_id for r in [*self._ready, *self._running, *self._reserved.values()])

    def check(self) -> list[str]:
        """Faults found; empty when all is well."""
        reserved = list(self._reserved.values())
        queued = self._waiting + self._ready + self._running + reserved
        faults = []
        if sorted(r.request_id for r in queued) != sorted(self._requests):
            faults.append("the queues and the live requests differ")
        if self._requests.keys() != self._orders.keys():
            faults.append("the live requests and their order differ")
        if (num_places := _num_places(self._running)) > self._config.max_batch:
            faults.append(f"{num_places} sequences run, more than {self._config.max_batch}")
        for status, queue in (
            (RequestStatus.WAITING, self._waiting),
            (RequestStatus.WAITING, self._ready),
            (RequestStatus.RUNNING, self._running),
            (RequestStatus.WAITING_FOR_KV, reserved),
        ):
            faults += [f"{r.request_id} is {r.status}, not {status}" for r in queue if r.status is not status]
            orders = [self._order(r) for r in queue]
            if orders != sorted(orders) and queue is not reserved:
                faults.append(f"a queue of {status} requests is out of order")
        faults += [
            f"{r.request_id}: {r.num_computed_tokens} of {r.num_tokens} tokens are computed, yet it lives"
            for r in queued
            if not 0 <= r.num_computed_tokens < r.num_tokens
        ]
        if self._short_of_blocks is not None and self._short_of_blocks not in self._waiting:
            faults.append("reservations hold back for a request that does not wait")
        return faults

    def _register(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._orders[request.request_id] = (request.due, self._num_arrivals)
        self._num_arrivals += 1

    def _order(self, request: Request) -> _Order:
        return self._orders[request.request_id]
