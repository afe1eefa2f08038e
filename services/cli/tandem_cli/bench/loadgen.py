"""Sends prompts on a schedule and collects the records.

open loop    requests leave at the times of a seeded Poisson process, however slow the answers are
closed loop  N requests are in flight at any time

At the deadline of the run, requests in flight are cancelled and recorded as TIMEOUT; the others are not sent.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import OK, TIMEOUT, Recorder, RequestRecord
from tandem_cli.bench.transports import SendError, Transport


@dataclass(frozen=True)
class OpenLoop:
    """Mean requests per second, > 0."""

    rate: float
    seed: int

    def departures_s(self, num_requests: int) -> list[float]:
        """Seconds after the start at which each request leaves; the first at 0."""
        generator = random.Random(self.seed)
        times, now = [], 0.0
        for _ in range(num_requests):
            times.append(now)
            now += generator.expovariate(self.rate)
        return times


@dataclass(frozen=True)
class ClosedLoop:
    concurrency: int


Schedule = OpenLoop | ClosedLoop


async def run_load(
    transport: Transport,
    prompts: Sequence[Prompt],
    schedule: Schedule,
    *,
    timeout_s: float,
    on_done: Callable[[RequestRecord], None],
) -> list[RequestRecord]:
    """Records of all requests that were sent, by index. Calls `on_done` with each as it ends."""
    run = _Run(transport, timeout_s, on_done)
    if isinstance(schedule, OpenLoop):
        await run.open_loop(prompts, schedule.departures_s(len(prompts)))
    else:
        await run.closed_loop(prompts, schedule.concurrency)
    return sorted(run.records, key=lambda record: record.index)


class _Run:
    def __init__(
        self, transport: Transport, timeout_s: float, on_done: Callable[[RequestRecord], None]
    ) -> None:
        self._transport = transport
        self._on_done = on_done
        self._started = time.perf_counter()
        self._timeout_s = timeout_s
        self.records: list[RequestRecord] = []

    def _left_s(self) -> float:
        return self._timeout_s - (time.perf_counter() - self._started)

    async def open_loop(self, prompts: Sequence[Prompt], departures_s: Sequence[float]) -> None:
        async with asyncio.TaskGroup() as group:
            for index, (prompt, departure_s) in enumerate(zip(prompts, departures_s, strict=True)):
                if departure_s >= self._timeout_s:
                    break
                await asyncio.sleep(departure_s - (time.perf_counter() - self._started))
                group.create_task(self._one(index, prompt))

    async def closed_loop(self, prompts: Sequence[Prompt], concurrency: int) -> None:
        waiting = iter(enumerate(prompts))

        async def worker() -> None:
            for index, prompt in waiting:
                if self._left_s() <= 0:
                    return
                await self._one(index, prompt)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(prompts))):
                group.create_task(worker())

    async def _one(self, index: int, prompt: Prompt) -> None:
        recorder = Recorder(index, prompt.dialogue_id, self._started)
        try:
            async with asyncio.timeout(max(0.0, self._left_s())):
                await self._transport.send(prompt, recorder)
            record = recorder.finish(OK)
        except TimeoutError:
            record = recorder.finish(TIMEOUT, f"not done when the run's {self._timeout_s:g} s were over")
        except SendError as error:
            record = recorder.finish(error.status, str(error))
        self.records.append(record)
        self._on_done(record)
