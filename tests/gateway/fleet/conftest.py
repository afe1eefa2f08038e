"""Pods without processes, and a clock that stands still."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import fields, replace

import pytest
from planned_pods import LOAD, MODEL
from still_clock import Clock
from tandem_core.pod_model import PodModel
from tandem_gateway.fleet import load
from tandem_gateway.fleet.pods import Pod, Role

_OF_MODEL = {field.name for field in fields(PodModel)}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of works and of calls on pods."""
    clock = Clock()
    monkeypatch.setattr(load, "time", clock)
    return clock


@pytest.fixture
async def make_pod(clock: Clock) -> AsyncIterator[Callable[..., Pod]]:
    """`make_pod(target, role, **fields)`: a healthy pod with these fields of its load, or of its costs."""
    made = []

    def make(target: str, role: Role = Role.DECODE, **given: object) -> Pod:
        pod = Pod(role, target)
        pod.healthy, pod.last_seen = True, time.monotonic()
        costs = {name: given.pop(name) for name in _OF_MODEL & given.keys()}
        pod.works.load = replace(LOAD, model=replace(MODEL, **costs), **given)
        made.append(pod)
        return pod

    yield make
    await asyncio.gather(*(pod.channel.close() for pod in made))
