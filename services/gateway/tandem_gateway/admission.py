"""Admission control: limits the calls that are open, the requests in flight and the queue in front of them.

    call arrives     its tenant, and the gateway, has few
                     others open                            -> it is received and tokenized
    request arrives  a slot is free and the queue is empty  -> admitted
                     the queue has room                     -> waits, earliest SLO deadline first
                     the queue is full, or the tenant has
                     its places already                     -> OverloadedError with a computed retry-after
    request ends     the first request of the queue is admitted

A request that is cancelled or passes its deadline while it waits leaves the queue immediately.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from tandem_proto.v1 import common_pb2

from tandem_gateway.auth import Caller
from tandem_gateway.errors import DeadlineError, OverloadedError, RefusalReason
from tandem_gateway.request import NS_PER_S, TokenizedRequest
from tandem_gateway.settings import GatewaySettings

_OTHER_CALLS, _OTHER_CALLS_OF_TENANT = 64, 16
_CALLS_RETRY_S = 1.0
_MIN_RETRY_AFTER_S = 0.05
_MAX_RETRY_AFTER_S = 60.0
#: Queue order of a request without a TTFT objective: as if it had this one, so that it is not starved.
_DEFAULT_TTFT_S = 60.0
_S_PER_MINUTE = 60.0
#: Weight of the newest request in the exponentially weighted means; about the last twenty count.
_ALPHA = 0.1
#: Shorter uncached prompts measure overhead rather than prefill speed.
_MIN_TOKENS = 32


class OpenCalls:
    """Limits calls before anything of them but their key is read. Belongs to one event loop.

    A few more than requests have places: they may ask for a status, or are on their way to a refusal.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._of_tenant: Counter[str] = Counter()

    @contextmanager
    def hold(self, caller: Caller) -> Iterator[None]:
        """Held while the call is open. Raises OverloadedError."""
        tenant = caller.tenant
        places = self._settings.tenant_places(caller)
        if places is not None and self._of_tenant[tenant] >= places + _OTHER_CALLS_OF_TENANT:
            raise OverloadedError(
                f"tenant {tenant} has {self._of_tenant[tenant]} calls open here, limit "
                f"{places + _OTHER_CALLS_OF_TENANT}; send the next one when one has ended",
                _CALLS_RETRY_S,
                RefusalReason.TENANT_CALLS,
            )
        num_open, limit = self._of_tenant.total(), self._settings.num_places() + _OTHER_CALLS
        if num_open >= limit:
            raise OverloadedError(
                f"{num_open} calls are open here, limit {limit}; try again later",
                _CALLS_RETRY_S,
                RefusalReason.OPEN_CALLS,
            )
        self._of_tenant[tenant] += 1
        try:
            yield
        finally:
            self._of_tenant[tenant] -= 1


class Predictor:
    """Predicts times from receipts, as exponentially weighted means."""

    def __init__(self) -> None:
        #: Mean seconds from admission to the end of a request; 1 before the first receipt.
        self.service_s = 1.0
        self._s_per_token = 0.001

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds from admission to the first token for a prompt of so many uncached tokens."""
        return self._s_per_token * num_tokens

    def observe(self, receipt: common_pb2.Receipt, *, queued_s: float) -> None:
        """Updates the means. `queued_s`, the wait at the gateway, counts in neither."""
        self.service_s += _ALPHA * (receipt.e2e_ns / NS_PER_S - queued_s - self.service_s)
        uncached = receipt.prompt_tokens - receipt.cached_tokens
        if uncached >= _MIN_TOKENS:
            seconds = max(0.0, receipt.ttft_ns / NS_PER_S - queued_s)
            self._s_per_token += _ALPHA * (seconds / uncached - self._s_per_token)


class TokenRates:
    """Token buckets of tenants: at most a minute's tokens, refilled steadily. Belongs to one event loop.

    A request may begin while there is a token, and then uses what it needs: a bucket may become negative.
    """

    def __init__(self) -> None:
        #: Tokens left, and when that was.
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, tenant: str, per_minute: int | None, num_tokens: int) -> None:
        """For a request that begins. `per_minute` None: no limit. Raises OverloadedError."""
        if per_minute is None:
            return
        left = self._refilled(tenant, per_minute)
        if left < 1:
            raise OverloadedError(
                f"tenant {tenant} has used its {per_minute} tokens per minute; try again later",
                (1 - left) * _S_PER_MINUTE / per_minute,
                RefusalReason.TENANT_TOKENS,
            )
        self.charge(tenant, per_minute, num_tokens)

    def charge(self, tenant: str, per_minute: int | None, num_tokens: int) -> None:
        """For tokens that were computed; negative for those taken and not used."""
        if per_minute is not None:
            self._left[tenant] = self._refilled(tenant, per_minute) - num_tokens, time.monotonic()

    def _refilled(self, tenant: str, per_minute: int) -> float:
        now = time.monotonic()
        left, since = self._left.get(tenant, (float(per_minute), now))
        return min(float(per_minute), left + (now - since) * per_minute / _S_PER_MINUTE)


class Admission:
    """Assigns slots to requests. Belongs to one event loop."""

    def __init__(self, *, max_in_flight: int, max_queue: int) -> None:
        self.predictor = Predictor()
        self.num_waiting = 0
        self.num_in_flight = 0
        self.max_in_flight = max_in_flight
        self._max_queue = max_queue
        #: Requests by tenant, in flight and waiting.
        self._of_tenant: Counter[str] = Counter()
        #: Heap of (SLO deadline, arrival order, future). Cancelled futures stay in it and are skipped.
        self._waiters: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @asynccontextmanager
    async def slot(self, request: TokenizedRequest) -> AsyncIterator[None]:
        """Holds a slot for the length of the block. Raises OverloadedError, or DeadlineError when the
        request's deadline passes before it is admitted."""
        tenant, places = request.tenant, request.tenant_places
        if places is not None and self._of_tenant[tenant] >= places:
            raise OverloadedError(
                f"tenant {tenant} has {self._of_tenant[tenant]} requests here already, limit {places}; send "
                "the next one when one has ended",
                self.retry_after_s(),
                RefusalReason.TENANT_REQUESTS,
            )
        self._of_tenant[tenant] += 1
        try:
            await self._enter(request)
            try:
                yield
            finally:
                self._leave()
        finally:
            self._of_tenant[tenant] -= 1
            if not self._of_tenant[tenant]:
                del self._of_tenant[tenant]

    async def _enter(self, request: TokenizedRequest) -> None:
        loop = asyncio.get_running_loop()
        if request.deadline <= loop.time():
            raise DeadlineError("the deadline had passed before the request could start")
        if self._has_free_slot:
            self.num_in_flight += 1
            return
        if self.num_waiting >= self._max_queue:
            raise OverloadedError(
                f"the queue is full ({self.num_waiting} waiting, limit {self._max_queue}); try again later",
                self.retry_after_s(),
                RefusalReason.QUEUE_FULL,
            )
        admitted: asyncio.Future[None] = loop.create_future()
        urgency = request.arrived + (request.slo.ttft_s or _DEFAULT_TTFT_S)
        heapq.heappush(self._waiters, (urgency, next(self._order), admitted))
        self.num_waiting += 1
        try:
            async with asyncio.timeout_at(request.deadline):
                await admitted
        except BaseException as error:
            if admitted.done() and not admitted.cancelled():
                self._leave()  # admitted at the same moment: give the slot to the next request
            else:
                admitted.cancel()
                self.num_waiting -= 1
            if isinstance(error, TimeoutError):
                raise DeadlineError("the deadline passed while the request waited for its turn") from None
            raise

    def _leave(self) -> None:
        self.num_in_flight -= 1
        while self._waiters and self.num_in_flight < self.max_in_flight:
            _, _, admitted = heapq.heappop(self._waiters)
            if not admitted.done():
                self.num_waiting -= 1
                self.num_in_flight += 1
                admitted.set_result(None)

    @property
    def _has_free_slot(self) -> bool:
        return self.num_in_flight < self.max_in_flight and self.num_waiting == 0

    def _wait_s(self) -> float:
        """Predicted wait of a new request behind the queue."""
        return (self.num_waiting + 1) * self.predictor.service_s / self.max_in_flight

    def retry_after_s(self) -> float:
        return min(max(self._wait_s(), _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)

    def predicted_ttft_s(self, num_prompt_tokens: int) -> float:
        """Predicted TTFT of a new request: its wait for a slot plus its prefill."""
        wait_s = 0.0 if self._has_free_slot else self._wait_s()
        return wait_s + self.predictor.prefill_s(num_prompt_tokens)
