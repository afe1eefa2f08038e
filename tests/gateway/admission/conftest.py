"""A clock that stands still, and admission in front of pods whose reports a test writes."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest
from reported_pods import ReportedSystem
from still_clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the process's monotonic time, also for the event loop."""
    clock = Clock()
    monkeypatch.setattr("time.monotonic", clock.monotonic)
    return clock


@pytest.fixture
async def make_system(clock: Clock) -> AsyncIterator[Callable[..., ReportedSystem]]:
    """Makes systems with the given arguments of ReportedSystem."""
    async with AsyncExitStack() as made:

        def make(**given: object) -> ReportedSystem:
            system = ReportedSystem(clock, **given)
            made.push_async_exit(system)
            return system

        yield make


@pytest.fixture
async def system(make_system: Callable[..., ReportedSystem]) -> ReportedSystem:
    return make_system()
