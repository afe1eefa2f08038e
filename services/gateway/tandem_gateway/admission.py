"""Admission: a bounded number in flight, a bounded queue before it, and refusal at once behind that.

    arrive -> a place is free and nobody waits    -> go
           -> the queue has room                  -> wait, earliest SLO deadline first
           -> the queue is full                   -> OverloadedError with a computed retry-after
    leave  -> the first waiter goes

Whoever is cancelled or runs out of time while waiting leaves the queue in that moment.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem_gateway.errors import DeadlineError, OverloadedError
from tandem_gateway.predictor import Predictor
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.slo import UNBOUND_TTFT_S

_MIN_RETRY_AFTER_S = 0.05
_MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Hands out places. Belongs to one event loop."""

    def __init__(self, *, max_in_flight: int, max_queue: int, predictor: Predictor) -> None:
        self._max_in_flight = max_in_flight
        self._max_queue = max_queue
        self._predictor = predictor
        self._in_flight = 0
        self._num_waiting = 0
        #: (SLO deadline, arrival order, future); a heap, since only the most urgent is ever taken.
        #: Futures of those who left stay behind as cancelled and are skipped.
        self._waiters: list[tuple[float, int, asyncio.Future[None]]] = []
        self._order = itertools.count()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_in_flight(self) -> int:
        return self._in_flight

    @asynccontextmanager
    async def place(self, request: TokenizedRequest) -> AsyncIterator[None]:
        """A place for the length of the block. Raises OverloadedError, or DeadlineError when the request's
        own deadline passes before its turn."""
        await self._enter(request)
        try:
            yield
        finally:
            self._in_flight -= 1
            self._admit_next()

    async def _enter(self, request: TokenizedRequest) -> None:
        loop = asyncio.get_running_loop()
        if request.deadline <= loop.time():
            raise DeadlineError("the deadline had passed before the request could start")
        if self._in_flight < self._max_in_flight and self._num_waiting == 0:
            self._in_flight += 1
            return
        if self._num_waiting >= self._max_queue:
            raise OverloadedError(
                f"the queue is full ({self._num_waiting} waiting, limit {self._max_queue}); try again later",
                self.retry_after_s(),
            )
        turn: asyncio.Future[None] = loop.create_future()
        urgency = request.arrived + (request.slo.ttft_s or UNBOUND_TTFT_S)
        heapq.heappush(self._waiters, (urgency, next(self._order), turn))
        self._num_waiting += 1
        try:
            async with asyncio.timeout_at(request.deadline):
                await turn
        except TimeoutError:
            self._give_up(turn)
            raise DeadlineError("the deadline passed while the request waited for its turn") from None
        except asyncio.CancelledError:
            self._give_up(turn)
            raise

    def _give_up(self, turn: asyncio.Future[None]) -> None:
        if turn.done() and not turn.cancelled():
            # The turn came in the same moment; pass the place on.
            self._in_flight -= 1
            self._admit_next()
        else:
            turn.cancel()
            self._num_waiting -= 1

    def _admit_next(self) -> None:
        while self._waiters and self._in_flight < self._max_in_flight:
            _, _, turn = heapq.heappop(self._waiters)
            if turn.done():
                continue
            self._num_waiting -= 1
            self._in_flight += 1
            turn.set_result(None)

    def retry_after_s(self) -> float:
        """When a newcomer would find a place: those ahead, at the rate at which requests leave."""
        ahead = self._num_waiting + 1
        wait_s = ahead * self._predictor.service_s / self._max_in_flight
        return min(max(wait_s, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)

    def predicted_ttft_s(self, num_prompt_tokens: int) -> float:
        """TTFT of a request that came now: its wait for a place plus its prefill."""
        is_free = self._in_flight < self._max_in_flight and self._num_waiting == 0
        ahead = 0 if is_free else self._num_waiting + 1
        wait_s = ahead * self._predictor.service_s / self._max_in_flight
        return wait_s + self._predictor.prefill_s(num_prompt_tokens)
