"""Sends requests on a schedule and collects the records.

A refused request may be sent again when the server's retry-after has passed. At the deadline of the run,
requests in flight and those that wait to be sent again are cancelled and recorded as TIMEOUT; the others are
not sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from tandem_cli.bench.arrivals import ClosedLoop, Schedule
from tandem_cli.bench.record import OK, TIMEOUT, Recorder, RequestRecord
from tandem_cli.bench.requests import Request
from tandem_cli.bench.transports import SendError, Transport


async def run_load(
    transport: Transport,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    timeout_s: float,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
    max_retries: int = 0,
) -> list[RequestRecord]:
    """Sends the requests; returns their records by index. Calls `on_done` as each request ends.

    max_retries: how often a request is sent again if it fails with a retry-after before its first token.
    """
    run = _Run(transport, timeout_s, on_done, max_retries)
    if isinstance(schedule, ClosedLoop):
        await run.closed_loop(requests, schedule.concurrency)
    else:
        await run.open_loop(requests, schedule.departures_s(len(requests)))
    return sorted(run.records, key=lambda record: record.index)


class _Run:
    def __init__(
        self,
        transport: Transport,
        timeout_s: float,
        on_done: Callable[[RequestRecord], None],
        max_retries: int,
    ) -> None:
        self._transport = transport
        self._on_done = on_done
        self._max_retries = max_retries
        self._started = time.perf_counter()
        self._timeout_s = timeout_s
        self.records: list[RequestRecord] = []

    def _left_s(self) -> float:
        return self._timeout_s - (time.perf_counter() - self._started)

    async def open_loop(self, requests: Sequence[Request], departures_s: Sequence[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for request, departure_s in zip(requests, departures_s, strict=True):
                if departure_s >= self._timeout_s:
                    break
                await asyncio.sleep(departure_s - (time.perf_counter() - self._started))
                group.create_task(self._one(request, departure_s))

    async def closed_loop(self, requests: Sequence[Request], concurrency: int) -> None:
        waiting = iter(requests)

        async def worker() -> None:
            for request in waiting:
                if self._left_s() <= 0:
                    return
                await self._one(request)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(requests))):
                group.create_task(worker())

    async def _one(self, request: Request, planned_s: float | None = None) -> None:
        recorder = Recorder(request, self._started, planned_s)
        try:
            async with asyncio.timeout(max(0.0, self._left_s())):
                await self._send(request, recorder)
            record = recorder.finish(OK)
        except TimeoutError:
            record = recorder.finish(TIMEOUT, f"not done when the run's {self._timeout_s:g} s were over")
        except SendError as error:
            record = recorder.finish(error.status, str(error), error.retry_after_s)
        self.records.append(record)
        self._on_done(record)

    async def _send(self, request: Request, recorder: Recorder) -> None:
        """Sends a request, again after refusals. Raises SendError of the last attempt."""
        for _ in range(self._max_retries):
            try:
                return await self._transport.send(request, recorder)
            except SendError as error:
                if error.retry_after_s is None or recorder.has_tokens:
                    raise
                recorder.failed(error.status, error.retry_after_s)
                await asyncio.sleep(error.retry_after_s)
                recorder.sent_again()
        return await self._transport.send(request, recorder)
