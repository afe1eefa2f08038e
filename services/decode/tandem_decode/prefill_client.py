"""The channels to the prefill pods.

Pods come and go, under ever new addresses. A target has one channel, which is opened by its first call,
shared by all, and closed when it has had none for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import grpc
from tandem_proto.v1 import prefill_pb2, prefill_pb2_grpc

PrefillCall: TypeAlias = "grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]"

#: How long a channel is kept without a call on it.
IDLE_CHANNEL_S = 60.0


@dataclass
class _Link:
    """The channel to one prefill pod."""

    channel: grpc.aio.Channel
    num_calls: int = 0
    #: Closes the channel, when it has no call.
    idle: asyncio.TimerHandle | None = None


class PrefillClient:
    """Calls prefill pods. Belongs to one event loop."""

    def __init__(self, make_channel: Callable[[str], grpc.aio.Channel]) -> None:
        self._make_channel = make_channel
        self._links: dict[str, _Link] = {}
        self._closings: set[asyncio.Task[None]] = set()

    def prefill(self, target: str, message: prefill_pb2.PrefillRequest) -> PrefillCall:
        """Starts a call; the channel is in use until it ends, is cancelled or fails."""
        link = self._links.get(target)
        if link is None:
            link = self._links[target] = _Link(self._make_channel(target))
        if link.idle is not None:
            link.idle.cancel()
        stub = prefill_pb2_grpc.PrefillServiceStub(link.channel)  # type: ignore[no-untyped-call]
        call: PrefillCall = stub.Prefill(message, metadata=(("tandem-request-id", message.request_id),))
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
            link.idle = asyncio.get_running_loop().call_later(IDLE_CHANNEL_S, self._close_idle, target)

    def _close_idle(self, target: str) -> None:
        closing = asyncio.create_task(self._links.pop(target).channel.close(None))
        self._closings.add(closing)
        closing.add_done_callback(self._closings.discard)
