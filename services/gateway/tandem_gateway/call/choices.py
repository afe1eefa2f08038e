"""Runs the choices of one call concurrently and computes each prompt once.

    choice 0 of a prompt  |-- prompt --|t t t t t t
    choice 1                            |t t t t t t     starts after the first token of choice 0, when a
    choice 2                            |t t t t t t     decode pod's prefix cache has the prompt's full
                                                         blocks; the router prefers that pod

Each choice is a separate request to the pods. If its pod is lost, another pod continues it. Its tokens equal
those of a separate call with its seed. The choices of a beam search are the best texts of one request; all
their events come at its end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from tandem_core.slo import NO_OBJECTIVES, SloTarget
from tandem_proto.v1 import decode_pb2
from tandem_service import tracing
from tandem_service.tasks import end_tasks

from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.call.relay import Relay
from tandem_gateway.errors import UpstreamError
from tandem_gateway.fleet.load import Placed
from tandem_gateway.metrics import RequestMetrics
from tandem_gateway.request import Event, TokenizedRequest


@dataclass(eq=False)
class Running:
    """One choice while it runs."""

    request: TokenizedRequest
    metrics: RequestMetrics
    #: The call's place on its pods; None before it is admitted.
    placed: Placed | None = None
    #: The objectives before admission widened them.
    asked: SloTarget = NO_OBJECTIVES
    is_admitted: bool = False
    num_tokens: int = 0
    #: Time spent waiting for the choice that computes the same prompt.
    waited_ns: int = 0
    #: Monotonic seconds of the first token; 0 before it.
    first_at: float = 0.0
    end: decode_pb2.DecodeFinished | None = None

    def admitted(self, admitted: Admitted) -> None:
        """Applies what admission decided for the call."""
        judged, self.asked = admitted.request, self.request.slo
        self.is_admitted, self.placed = True, admitted.placed
        self.request = replace(self.request, slo=judged.slo, is_late=judged.is_late, due_s=judged.due_s)
        self.metrics.admitted(judged.slo, admitted.queued_s)

    def relayed(self, num_tokens: int) -> bool:
        """Counts tokens on their way to the caller; returns whether there are any."""
        if not num_tokens:
            return False
        now = self.metrics.relayed(num_tokens)
        self.num_tokens += num_tokens
        self.first_at = self.first_at or now
        return True


async def relay_choices(
    relay: Relay, running: Sequence[Running], num_at_once: int
) -> AsyncGenerator[tuple[Running, Event], None]:
    """Yields the events of all choices in order of arrival; `num_at_once` sequences run at a time. Raises the
    error of the first choice that fails."""
    searches: dict[int, list[Running]] = {}
    for choice in running:
        if choice.request.sampling.beam_search is not None:
            searches.setdefault(choice.request.choice - choice.request.rank, []).append(choice)
    groups = list(searches.values()) or [[choice] for choice in running]
    if len(groups) == 1:
        async with aclosing(_relay_group(relay, groups[0])) as pairs:
            async for pair in pairs:
                yield pair
        return
    arrived: asyncio.Queue[tuple[Running, Event] | Exception] = asyncio.Queue()
    places = asyncio.Semaphore(max(num_at_once // _width(groups[0][0].request), 1))
    is_computed = {choice.request.prompt_token_ids: asyncio.Event() for choice in running}
    leaders = {choice.request.prompt_token_ids: choice for choice in reversed(running)}

    async def run(group: list[Running]) -> None:
        choice = group[0]
        prompt = choice.request.prompt_token_ids
        if choice is not running[0]:
            # Only the first choice records stages in the trace.
            tracing.set_current(tracing.RequestTrace(tracing.current().metadata))
        try:
            began_ns = time.monotonic_ns()
            async with places:
                if choice is not leaders[prompt]:
                    await is_computed[prompt].wait()
                choice.waited_ns = time.monotonic_ns() - began_ns
                async with aclosing(_relay_group(relay, group)) as pairs:
                    async for pair in pairs:
                        arrived.put_nowait(pair)
                        is_computed[prompt].set()
        except Exception as error:
            arrived.put_nowait(error)

    # The first of each prompt comes first, so that none waits for one without a place.
    groups.sort(key=lambda group: group[0] is not leaders[group[0].request.prompt_token_ids])
    tasks = [asyncio.create_task(run(group)) for group in groups]
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


def num_places(requests: Sequence[TokenizedRequest], max_in_flight: int) -> int:
    """Number of sequences that the pods compute at once for these choices: at most four or a quarter of all
    places, because other calls wait until this one has them. A beam search needs its width."""
    width, most = _width(requests[0]), max(max_in_flight // 4, 4)
    return width * min(num_sequences(requests) // width, max(most // width, 1))


def num_sequences(requests: Sequence[TokenizedRequest]) -> int:
    """Number of sequences that the pods compute for these choices; a beam search has more than it shows."""
    if requests[0].sampling.beam_search is None:
        return len(requests)
    return _width(requests[0]) * len({request.choice - request.rank for request in requests})


def _width(request: TokenizedRequest) -> int:
    """Sequences of one request to the pods."""
    beams = request.sampling.beam_search
    return 1 if beams is None else beams.width


async def _relay_group(relay: Relay, group: Sequence[Running]) -> AsyncGenerator[tuple[Running, Event], None]:
    """Yields the events of one request to the pods: one choice, or all choices of a beam search."""
    request = group[0].request
    if request.sampling.beam_search is not None:
        request = replace(request, output_token_ids=())
    placed = group[0].placed
    assert placed is not None
    async with aclosing(relay.stream(request, placed)) as events:
        async for event in events:
            if not isinstance(event, decode_pb2.DecodeBeams):
                yield group[0], event
                continue
            for choice in group:
                for part in _beam_events(event, choice.request, is_first=choice is group[0]):
                    yield choice, part


def _beam_events(found: decode_pb2.DecodeBeams, request: TokenizedRequest, *, is_first: bool) -> list[Event]:
    """The events of one choice: its text, unless the answer is resumed and has it already, and its end."""
    if request.rank >= len(found.beams):
        raise UpstreamError(f"the decode pod found {len(found.beams)} texts, not {request.rank + 1}")
    beam = found.beams[request.rank]
    end = decode_pb2.DecodeFinished(
        reason=beam.reason,
        stop_reason=beam.stop_reason,
        stop_token_id=beam.stop_token_id if beam.HasField("stop_token_id") else None,
        receipt=found.receipt,
    )
    end.receipt.output_tokens = len(beam.token_ids)
    if not is_first:  # shared work counts once
        end.receipt.transfer_bytes = end.receipt.decode_steps = 0
    if request.output_token_ids:
        return [end]
    chunk = decode_pb2.DecodeChunk(text=beam.text, token_ids=beam.token_ids, logprobs=beam.logprobs)
    return [chunk, end]
