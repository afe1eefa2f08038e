"""The queues of requests, admission to the batch, and preemption.

    waiting    no blocks                 in order of arrival
    ready      blocks, KV adopted        in order of arrival, joins before younger waiting requests
    reserved   blocks, KV in transfer    leaves by adopt or remove only
    running    blocks for all its tokens in order of arrival, at most max_batch

No starvation or deadlock: the oldest running request may preempt all others that hold blocks, except the
reserved ones, whose transfers end by themselves. A waiting head that lacks blocks stops new reservations;
only requests that already hold blocks may pass it.
"""

from __future__ import annotations

from bisect import insort

from tandem_engine.block_manager import BlockManager
from tandem_engine.request import Request, RequestStatus
from tandem_engine.scheduler.config import RequestCounts, SchedulerConfig


class RequestQueues:
    """Every live request is in exactly one queue, as its status says."""

    def __init__(self, blocks: BlockManager, config: SchedulerConfig) -> None:
        self._blocks = blocks
        self._config = config
        self._requests: dict[str, Request] = {}
        #: Each live request's place in the order of arrival.
        self._arrivals: dict[str, int] = {}
        self._num_arrivals = 0
        self._waiting: list[Request] = []
        self._ready: list[Request] = []
        self._running: list[Request] = []
        self._reserved: dict[str, Request] = {}
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
        insort(self._waiting, request, key=self._arrival)

    def reserve(self, request: Request) -> bool:
        """A new request gets all its blocks and waits for its KV; False, and no change, without blocks."""
        if self._short_of_blocks is not None or not self._allocate_all(request):
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
        insort(self._ready, request, key=self._arrival)

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
        del self._arrivals[request.request_id]
        request.status = RequestStatus.FINISHED

    # -- admission ------------------------------------------------------------------------------------

    def admit(self) -> None:
        """Fill the batch, oldest first; a request that lacks blocks is passed by those that have them."""
        # Blocks are allocated only when the budget allows computing into them.
        budget = self._config.max_tokens_per_step - sum(r.num_uncomputed_tokens for r in self._running)
        head_fits = True
        while len(self._running) < self._config.max_batch:
            head = self._waiting[0] if self._waiting and head_fits and budget > 0 else None
            ready = self._ready[0] if self._ready else None
            if head is not None and (ready is None or self._arrival(head) < self._arrival(ready)):
                head_fits = self._allocate_all(head)
                if not head_fits:
                    self._short_of_blocks = head
                    continue
                joining = self._waiting.pop(0)
                if joining is self._short_of_blocks:
                    self._short_of_blocks = None
            elif ready is not None:
                joining = self._ready.pop(0)
            else:
                return
            joining.status = RequestStatus.RUNNING
            insort(self._running, joining, key=self._arrival)
            budget -= joining.num_uncomputed_tokens

    def _allocate_all(self, request: Request) -> bool:
        """Adopt what is cached and allocate the rest of all known tokens; False changes nothing.

        One block per sequence that runs or soon will must stay free, or admitting one more would soon
        preempt it again.
        """
        cached = self._blocks.match_prefix(request)
        missing = self._blocks.blocks_for(request.num_tokens) - self._blocks.blocks_for(cached)
        spare = len(self._running) + len(self._ready)
        if missing + spare > self._blocks.num_free_blocks:
            self._blocks.free(request)
            return False
        self._blocks.allocate(request, request.num_tokens)
        request.num_computed_tokens = cached
        if request.num_preemptions == 0:
            request.num_cached_tokens = cached
        return True

    # -- preemption -----------------------------------------------------------------------------------

    def secure_next_tokens(self) -> list[Request]:
        """Give every running sequence, oldest first, blocks for all its known tokens; preempt if need be.

        Returns those that can run this step. A sequence with nobody to preempt keeps its KV and waits.
        """
        able = []
        for request in self.running:
            if request.status is not RequestStatus.RUNNING:
                continue  # just preempted for an older one
            while not (secured := self._blocks.allocate(request, request.num_tokens)):
                victim = self._victim(request)
                if victim is None:
                    break
                self._preempt(victim)
            if secured:
                able.append(request)
        return able

    def _victim(self, request: Request) -> Request | None:
        """The latest arrival among the younger running ones and those that hold blocks but do not run."""
        younger = [r for r in self._running if self._arrival(r) > self._arrival(request)]
        return max(younger + self._ready, key=self._arrival, default=None)

    def _preempt(self, victim: Request) -> None:
        """Free a request's blocks; it keeps its tokens and waits ahead of later arrivals."""
        (self._running if victim.status is RequestStatus.RUNNING else self._ready).remove(victim)
        self._blocks.free(victim)
        victim.num_computed_tokens = 0
        victim.num_preemptions += 1
        victim.draft = None
        victim.status = RequestStatus.WAITING
        insort(self._waiting, victim, key=self._arrival)

    # -- accounting -----------------------------------------------------------------------------------

    def counts(self) -> RequestCounts:
        return RequestCounts(
            waiting=len(self._waiting) + len(self._ready),
            running=len(self._running),
            waiting_for_kv=len(self._reserved),
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
        if self._requests.keys() != self._arrivals.keys():
            faults.append("the live requests and their order of arrival differ")
        if len(self._running) > self._config.max_batch:
            faults.append(f"{len(self._running)} requests run, more than {self._config.max_batch}")
        for status, queue in (
            (RequestStatus.WAITING, self._waiting),
            (RequestStatus.WAITING, self._ready),
            (RequestStatus.RUNNING, self._running),
            (RequestStatus.WAITING_FOR_KV, reserved),
        ):
            faults += [f"{r.request_id} is {r.status}, not {status}" for r in queue if r.status is not status]
            arrivals = [self._arrival(r) for r in queue]
            if arrivals != sorted(arrivals):
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
        self._arrivals[request.request_id] = self._num_arrivals
        self._num_arrivals += 1

    def _arrival(self, request: Request) -> int:
        return self._arrivals[request.request_id]
