"""Channels to prefill pods, with a circuit breaker.

Prefill pods are replaced, and new ones have new addresses. Each target has one channel: its first call
opens it, all calls share it, and it is closed after a while without calls.

A failed pod comes last in the order for a second, and for twice as long after each further failure. After
that time one request tries it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from tandem_proto.v1 import prefill_pb2, prefill_pb2_grpc
from tandem_service.interceptors import REQUEST_ID_KEY
from tandem_service.tracing import current

PrefillCall: TypeAlias = "grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]"

#: How long a channel without calls is kept.
IDLE_CHANNEL_S = 60.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


@dataclass
class _Breaker:
    """A pod whose last call failed; it comes last until `closed_at`, in monotonic seconds."""

    pause_s: float
    closed_at: float


@dataclass
class _Link:
    """The channel to one prefill pod."""

    channel: grpc.aio.Channel
    num_calls: int = 0
    #: Closes the channel; set while it has no call.
    idle: asyncio.TimerHandle | None = None


class PrefillClient:
    """Calls prefill pods. Use it from one event loop only."""

    def __init__(
        self, make_channel: Callable[[str], grpc.aio.Channel], idle_channel_s: float = IDLE_CHANNEL_S
    ) -> None:
        self._make_channel = make_channel
        self._idle_channel_s = idle_channel_s
        self._links: dict[str, _Link] = {}
        self._breakers: dict[str, _Breaker] = {}
        self._closings: set[asyncio.Task[None]] = set()

    def in_order(self, targets: Sequence[str]) -> list[str]:
        """The targets in the order of attempts: those that failed recently come last."""
        now = time.monotonic()
        first: list[str] = []
        last: list[str] = []
        for target in targets:
            breaker = self._breakers.get(target)
            if breaker is None or (now >= breaker.closed_at and not first):
                first.append(target)
            else:
                last.append(target)
        if first and (tried := self._breakers.get(first[0])) is not None:
            tried.closed_at = now + tried.pause_s  # other requests wait for the outcome
        return first + last

    def failed(self, target: str) -> None:
        old = self._breakers.get(target)
        pause_s = min(old.pause_s * 2, _LONGEST_PAUSE_S) if old is not None else _FIRST_PAUSE_S
        self._breakers[target] = _Breaker(pause_s, time.monotonic() + pause_s)
        # Forgets targets that are no longer listed, because replaced pods have new addresses.
        limit = time.monotonic() - 10 * _LONGEST_PAUSE_S
        for name in [name for name, breaker in self._breakers.items() if breaker.closed_at < limit]:
            del self._breakers[name]

    def succeeded(self, target: str) -> None:
        self._breakers.pop(target, None)

    def prefill(self, target: str, message: prefill_pb2.PrefillRequest) -> PrefillCall:
        """Starts a call; the channel is in use until it ends, is cancelled or fails."""
        link = self._links.get(target)
        if link is None:
            link = self._links[target] = _Link(self._make_channel(target))
        if link.idle is not None:
            link.idle.cancel()
        stub = prefill_pb2_grpc.PrefillServiceStub(link.channel)  # type: ignore[no-untyped-call]
        metadata = ((REQUEST_ID_KEY, message.request_id), *current().metadata)
        call: PrefillCall = stub.Prefill(message, metadata=metadata)
        link.num_calls += 1
        call.add_done_callback(lambda _: self._ended(target, link))
        return call

    async def close(self) -> None:
        links, self._links = self._links, {}
        for link in links.values():
            if link.idle is not None:
                link.idle.cancel()
            await link.channel.close(None)
        await asyncio.gather(*self._closings)

    def _ended(self, target: str, link: _Link) -> None:
        link.num_calls -= 1
        if link.num_calls == 0 and self._links.get(target) is link:
            link.idle = asyncio.get_running_loop().call_later(self._idle_channel_s, self._close_idle, target)

    def _close_idle(self, target: str) -> None:
        closing = asyncio.create_task(self._links.pop(target).channel.close(None))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
