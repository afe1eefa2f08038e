"""Getting a prompt's KV from a prefill pod: reserve, ticket, transfer, adopt.

    BOOTSTRAPPING       blocks are reserved here; a ticket says where the KV may be written
    WAITING_FOR_INPUT   the prefill pod has the ticket and has sent nothing yet
    TRANSFERRING        frames arrive; the receiver checks and writes them
    SUCCESS             every wanted block arrived and the first token is known -> the sequence decodes
    FAILED              no prefill pod is left: received blocks are kept, the rest is computed here

While frames may arrive, the blocks have two owners: the request and the writer (a hold). The writer's hold is
released after the transfer was aborted, when no byte can be written any more. So blocks of a cancelled
request are never reused while a late frame may still be written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, replace

import grpc
import structlog
from tandem_core import codec
from tandem_core.errors import TransferError
from tandem_engine.block_manager import BlockHold
from tandem_engine.loop import EngineLoop, wait_for_future
from tandem_engine.request import Request
from tandem_engine.scheduler import Reservation
from tandem_engine.transport.codec import ticket_to_proto
from tandem_engine.transport.incoming import IncomingTransfer, KVReceiver
from tandem_proto.v1 import decode_pb2, prefill_pb2

from tandem_decode.prefill_client import PrefillCall, PrefillClient

log = structlog.get_logger(__name__)

#: A prefill pod sends a heartbeat every 0.25 s; without any for this long it counts as dead.
HEARTBEAT_TIMEOUT_S = 1.5
#: A prefill pod whose engine computes no layer of any request for this long counts as hung, even with
#: heartbeats. A layer of a prompt chunk takes well under a second on a slow CPU; the first layer after a
#: start takes longer, as it may compile kernels and read weights from disk.
ENGINE_STALL_TIMEOUT_S = 10.0
#: How long after the first token the last frame may arrive, if frames keep arriving.
TRAILING_FRAMES_TIMEOUT_S = 10.0
#: How often a request that found no free blocks retries.
RESERVE_RETRY_S = 0.02


@dataclass(frozen=True)
class HandoffResult:
    """How the prompt was computed; part of the receipt."""

    #: The prefill pod that computed it; empty when it was computed here.
    prefill_pod: str = ""
    #: Prompt tokens the prefill pod found in its own cache.
    remote_cached_tokens: int = 0
    reserve_ns: int = 0
    queue_ns: int = 0
    prefill_ns: int = 0
    #: From the first token's arrival to the last frame's.
    transfer_ns: int = 0
    transfer_bytes: int = 0
    retries: int = 0


class Handoff:
    """Runs handoffs for one decode pod."""

    def __init__(
        self,
        loop: EngineLoop,
        receiver: KVReceiver,
        client: PrefillClient,
        *,
        block_bytes: int,
        vocab_size: int,
    ) -> None:
        self._loop = loop
        self._receiver = receiver
        self._client = client
        #: Payload bytes of one block in one layer.
        self._block_bytes = block_bytes
        self._vocab_size = vocab_size
        self._reading_to_end: set[asyncio.Task[None]] = set()
        self._reserving = asyncio.Lock()

    async def run(self, request: Request, message: decode_pb2.DecodeRequest) -> HandoffResult:
        """Gets the prompt's KV from the message's prefill targets and lets the request decode.

        Never fails because of a prefill pod: what no pod delivers is computed here. When cancelled, it aborts
        the transfer and releases the writer's hold; the caller releases the request's own blocks.
        """
        started = time.monotonic_ns()
        incoming: IncomingTransfer | None = None
        first: prefill_pb2.PrefillFinished | None = None
        # A list, because a reservation that was cancelled here may still run on the engine's thread. The
        # release below is queued behind it and sees its hold.
        holds: list[BlockHold] = []
        complete_blocks = 0
        try:
            reservation = await self._reserve(request, holds)
            result = HandoffResult(reserve_ns=time.monotonic_ns() - started)
            wanted = {i: reservation.block_ids[i] for i in reservation.wanted_blocks}
            incoming = self._receiver.open(wanted)
            for attempt, target in enumerate(message.prefill_targets):
                try:
                    if attempt:
                        incoming.reopen()
                        result = replace(result, retries=result.retries + 1)
                    first, result = await self._attempt(target, message, incoming, result)
                    break
                except (grpc.aio.AioRpcError, TransferError, TimeoutError) as error:
                    log.warning("prefill failed; trying elsewhere", target=target, error=_describe(error))
        finally:
            if incoming is not None:
                # Waits for a device's writes; one that failed leaves no block complete.
                incoming.abort()
                complete_blocks = _num_leading_valid(incoming.progress().complete_blocks, reservation)
            # Shielded: a cancelled request must still release the hold.
            await asyncio.shield(self._loop.call_async(lambda: self._release(holds)))
        await self._loop.call_async(lambda: self._adopt(request, reservation, complete_blocks, first))
        return result

    async def _attempt(
        self,
        target: str,
        message: decode_pb2.DecodeRequest,
        incoming: IncomingTransfer,
        result: HandoffResult,
    ) -> tuple[prefill_pb2.PrefillFinished, HandoffResult]:
        call = self._client.prefill(
            target,
            prefill_pb2.PrefillRequest(
                request_id=message.request_id,
                tenant=message.tenant,
                prompt_token_ids=message.prompt_token_ids,
                output_token_ids=message.output_token_ids,
                sampling=message.sampling,
                ticket=ticket_to_proto(incoming.ticket),
            ),
        )
        try:
            started = time.monotonic_ns()
            finished = await wait_for_first_token(call)
            if finished.first_token_id >= self._vocab_size:
                raise TransferError(f"first token {finished.first_token_id} is outside the vocabulary")
            token_known = time.monotonic_ns()
            await self._last_frame(incoming)
            now = time.monotonic_ns()
        except BaseException:
            call.cancel()
            raise
        # The pod ends the stream when its last frame is credited. Dropping the call now would cancel it.
        reading = asyncio.create_task(_read_to_end(call))
        self._reading_to_end.add(reading)
        reading.add_done_callback(self._reading_to_end.discard)
        return finished, replace(
            result,
            prefill_pod=finished.pod_id,
            remote_cached_tokens=finished.cached_tokens,
            queue_ns=finished.queue_ns,
            prefill_ns=token_known - started - finished.queue_ns,
            transfer_ns=now - token_known,
            transfer_bytes=incoming.progress().verified_pairs * self._block_bytes,
        )

    async def _last_frame(self, incoming: IncomingTransfer) -> None:
        """Waits until every wanted block is here. Raises TransferError when no frame arrives for the
        heartbeat time."""
        deadline = time.monotonic() + TRAILING_FRAMES_TIMEOUT_S
        seen = -1
        while not await wait_for_future(incoming.done, HEARTBEAT_TIMEOUT_S):
            verified = incoming.progress().verified_pairs
            if verified == seen or time.monotonic() > deadline:
                raise TransferError("no more KV frames arrived before the last block")
            seen = verified
        incoming.done.result()

    async def _reserve(self, request: Request, holds: list[BlockHold]) -> Reservation:
        # One request tries at a time, in order of arrival: small prompts cannot starve a large one.
        async with self._reserving:
            while True:
                reservation = await self._loop.call_async(lambda: self._try_reserve(request, holds))
                if reservation is not None:
                    return reservation
                await asyncio.sleep(RESERVE_RETRY_S)

    def _try_reserve(self, request: Request, holds: list[BlockHold]) -> Reservation | None:
        scheduler = self._loop.engine.scheduler
        reservation = scheduler.reserve(request)
        if reservation is not None:
            writable = [reservation.block_ids[i] for i in reservation.wanted_blocks]
            holds.append(self._loop.engine.blocks.hold(writable))
        return reservation

    def _release(self, holds: list[BlockHold]) -> None:
        for hold in holds:
            self._loop.engine.blocks.release(hold)

    def _adopt(
        self,
        request: Request,
        reservation: Reservation,
        complete_blocks: int,
        first: prefill_pb2.PrefillFinished | None,
    ) -> None:
        engine = self._loop.engine
        if first is None:
            block_size = engine.blocks.block_size
            computed = min(complete_blocks * block_size, request.num_tokens - 1)
            engine.scheduler.adopt(request, max(computed, reservation.num_cached_tokens), None)
            return
        update = engine.scheduler.adopt(request, request.num_tokens, (first.first_token_id,))
        logprobs = (codec.logprobs_from_proto(first.logprobs),) if first.HasField("logprobs") else ()
        if update is not None:
            self._loop.publish(replace(engine.adopted(update), logprobs=logprobs))


async def wait_for_first_token(
    responses: AsyncIterable[prefill_pb2.PrefillResponse],
    *,
    heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    stall_timeout_s: float = ENGINE_STALL_TIMEOUT_S,
) -> prefill_pb2.PrefillFinished:
    """Waits while heartbeats arrive and show that the pod's engine computes layers.

    Raises TransferError, or TimeoutError without heartbeats.
    """
    stream = aiter(responses)
    computed_layers, last_layer_at = 0, time.monotonic()
    while True:
        try:
            # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that coincides with the
            # result.
            async with asyncio.timeout(heartbeat_timeout_s):
                response = await anext(stream)
        except StopAsyncIteration:
            raise TransferError("the prefill pod ended its stream without a first token") from None
        if response.HasField("finished"):
            return response.finished
        now = time.monotonic()
        if response.progress.computed_layers != computed_layers:
            computed_layers, last_layer_at = response.progress.computed_layers, now
        elif now - last_layer_at > stall_timeout_s:
            raise TransferError(
                f"the prefill pod's engine computed no layer for {stall_timeout_s:g} s; it hangs"
            )


async def _read_to_end(call: PrefillCall) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
        async with asyncio.timeout(HEARTBEAT_TIMEOUT_S):
            async for _ in call:
                pass


def _num_leading_valid(complete: Sequence[int], reservation: Reservation) -> int:
    """Number of leading blocks of the prompt that are cached here or were received."""
    done = set(complete)
    wanted = set(reservation.wanted_blocks)
    count = 0
    while count < len(reservation.block_ids) and (count not in wanted or count in done):
        count += 1
    return count


def _describe(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
