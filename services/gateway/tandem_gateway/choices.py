"""Runs the choices of one call beside each other, so that a prompt is computed once.

    choice 0 of a prompt  |-- prompt --|t t t t t t
    choice 1                            |t t t t t t     begins when the first one has its first token: then
    choice 2                            |t t t t t t     the prompt's full blocks are in a decode pod's prefix
                                                         cache, and the router sends them where the cache is

Each choice is a request of its own to the pods. So each is continued on another pod when its pod is lost, and
its tokens are those of a separate request with its seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tandem_proto.v1 import decode_pb2
from tandem_service import tracing
from tandem_service.tasks import end_tasks

from tandem_gateway.admission import Admitted
from tandem_gateway.metrics import RequestMetrics
from tandem_gateway.relay import Relay
from tandem_gateway.request import Event, TokenizedRequest


@dataclass(eq=False)
class Running:
    """One choice while it runs."""

    request: TokenizedRequest
    metrics: RequestMetrics
    num_tokens: int = 0
    #: Monotonic seconds; 0: no token yet.
    first_at: float = 0.0
    end: decode_pb2.DecodeFinished | None = None

    def admitted(self, admitted: Admitted) -> None:
        """Takes over what admission decided for the call."""
        judged = admitted.request
        self.request = replace(self.request, slo=judged.slo, due_s=judged.due_s)
        self.metrics.admitted(admitted.queued_s)

    def relayed(self, num_tokens: int) -> bool:
        """Counts tokens on their way to the caller; False: there are none."""
        if not num_tokens:
            return False
        now = self.metrics.relayed(num_tokens)
        self.num_tokens += num_tokens
        self.first_at = self.first_at or now
        return True


async def relay_choices(
    relay: Relay, running: Sequence[Running]
) -> AsyncGenerator[tuple[Running, Event], None]:
    """The events of all choices as they come. Raises what the first one that fails raises."""
    if len(running) == 1:
        async with aclosing(relay.stream(running[0].request)) as events:
            async for event in events:
                yield running[0], event
        return
    arrived: asyncio.Queue[tuple[Running, Event] | Exception] = asyncio.Queue()
    is_computed = {choice.request.prompt_token_ids: asyncio.Event() for choice in running}
    leaders = {choice.request.prompt_token_ids: choice for choice in reversed(running)}

    async def run(choice: Running) -> None:
        prompt = choice.request.prompt_token_ids
        if choice is not running[0]:
            # The trace's stages are those of the first choice.
            tracing.set_current(tracing.RequestTrace(tracing.current().metadata))
        try:
            if choice is not leaders[prompt]:
                await is_computed[prompt].wait()
            async with aclosing(relay.stream(choice.request)) as events:
                async for event in events:
                    arrived.put_nowait((choice, event))
                    is_computed[prompt].set()
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(run(choice)) for choice in running]
    try:
        num_left = len(running)
        while num_left:
            item = await arrived.get()
            if isinstance(item, Exception):
                raise item
            yield item
            num_left -= isinstance(item[1], decode_pb2.DecodeFinished)
    finally:
        await end_tasks(tasks)
