"""Handoff of a prompt's KV from a prefill pod: reserve, ticket, transfer, adopt.

    BOOTSTRAPPING       blocks are reserved here; a ticket says where the KV may be written
    WAITING_FOR_INPUT   the prefill pod has the ticket and has sent nothing yet
    TRANSFERRING        frames arrive; the receiver checks and writes them
    SUCCESS             every wanted block arrived and the first token is known -> the sequence decodes
    FAILED              no prefill pod is left, or only the first token is missing: received blocks are kept,
                        the rest is computed here

While frames may arrive, the blocks have two owners: the request and the writer (a hold). The writer's hold is
released after the transfer was aborted, when no byte can be written any more. Thus blocks of a cancelled
request are never reused while a late frame may still be written.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog
from tandem_core import codec
from tandem_core.contracts import MAX_CRASHES
from tandem_core.errors import TransferError
from tandem_engine.block_manager import BlockHold
from tandem_engine.loop import EngineLoop
from tandem_engine.request import Request
from tandem_engine.scheduler import Reservation
from tandem_engine.transport.base import TransferState
from tandem_engine.transport.codec import ticket_to_proto
from tandem_engine.transport.incoming import IncomingTransfer, KVReceiver
from tandem_proto.v1 import common_pb2, decode_pb2, prefill_pb2
from tandem_service.tracing import current

from tandem_decode.prefill_client import PrefillClient
from tandem_decode.prefill_stream import FailureKind, PrefillFailedError, PrefillStream

log = structlog.get_logger(__name__)

#: Limit of prefill pods that one handoff tries; an unreachable one costs a second.
_MAX_ATTEMPTS = 3
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
    #: Times the prefill pod took the prompt's blocks for others.
    num_preemptions: int = 0


class Attempts:
    """Outcomes of a request's attempts at prefill pods.

    The caller learns of each failure. After a crash the request waits until the caller knows of it, in case
    this pod crashes next.
    """

    def __init__(self) -> None:
        self.failures: Counter[FailureKind] = Counter()
        self.num_crashed = 0
        #: Set while there is a failure to report to the caller.
        self.is_news = asyncio.Event()
        self._reported = asyncio.Event()

    @property
    def num_failed(self) -> int:
        return self.failures.total()

    async def failed(self, error: PrefillFailedError) -> None:
        """Notes a failure; waits until a crash is reported."""
        self.failures[error.kind] += 1
        self._reported.clear()
        self.is_news.set()
        if error.crashed:
            self.num_crashed += 1
            await self._reported.wait()

    def reported(self, num_failed: int) -> None:
        """Notes that `num_failed` failures were reported to the caller."""
        if num_failed == self.num_failed:
            self.is_news.clear()
            self._reported.set()


class Handoff:
    """Runs handoffs for one decode pod."""

    def __init__(
        self,
        loop: EngineLoop,
        receiver: KVReceiver,
        client: PrefillClient,
        peers: PrefillClient,
        *,
        vocab_size: int,
    ) -> None:
        self._loop = loop
        self._receiver = receiver
        self._client = client
        #: Calls decode pods, whose certificates have another role.
        self._peers = peers
        self._vocab_size = vocab_size
        self._ending: set[asyncio.Task[None]] = set()
        #: Requests that wait for blocks. A request's event is set when it becomes the first.
        self._reserving: dict[Request, asyncio.Event] = {}
        self._open: set[IncomingTransfer] = set()

    @property
    def num_reserving(self) -> int:
        """Requests that wait for blocks; the engine does not know them yet."""
        return len(self._reserving)

    def counts(self) -> dict[str, int]:
        """Number of requests by state of the module's diagram."""
        transfers = list(self._open)
        num_sending = sum(transfer.state is TransferState.TRANSFERRING for transfer in transfers)
        return {
            "bootstrapping": self.num_reserving,
            "waiting": len(transfers) - num_sending,
            "transferring": num_sending,
        }

    async def run(
        self, request: Request, message: decode_pb2.DecodeRequest, attempts: Attempts
    ) -> HandoffResult:
        """Gets the prompt's KV from the message's prefill targets and lets the request decode.

        Missing KV is computed here; a missing first token costs one token. When cancelled, aborts the
        transfer and releases the writer's hold; the caller releases the request's own blocks. Raises
        TransferError at the second pod that crashes with the request.
        """
        started = time.monotonic_ns()
        trace = current()
        trace.stage("reserve blocks", at_ns=started)
        incoming: IncomingTransfer | None = None
        first: prefill_pb2.PrefillFinished | None = None
        # A list, because a reservation that was cancelled here may still run on the engine's thread. The
        # release below is queued behind it and sees its hold.
        holds: list[BlockHold] = []
        try:
            reservation = await self._reserve(request, holds)
            result = HandoffResult(reserve_ns=time.monotonic_ns() - started)
            wanted = [{i: ids[i] for i in blocks} for ids, blocks in reservation.groups()]
            incoming = self._receiver.open(wanted)
            self._open.add(incoming)
            sources = [(self._client, target) for target in self._client.in_order(message.prefill_targets)]
            if message.kv_source:
                sources.insert(0, (self._peers, message.kv_source))
            for client, target in sources[:_MAX_ATTEMPTS]:
                if attempts.num_failed:
                    incoming.reopen()
                try:
                    first, result = await self._attempt(client, target, request, message, incoming, result)
                    client.succeeded(target)
                    break
                except PrefillFailedError as error:
                    trace.set_stage({"tandem.loss.message": str(error)})
                    trace.fail_stage(error.kind.value)
                    log.warning("prefill failed; continuing elsewhere", target=target, error=str(error))
                    client.failed(target)
                    await attempts.failed(error)
                if message.crashes + attempts.num_crashed >= MAX_CRASHES:
                    raise TransferError(
                        f"{MAX_CRASHES} pods crashed while they computed this request; it may be the cause, "
                        "and this pod does not compute it"
                    )
                if incoming.done.done():
                    break
        except BaseException:
            self._close(incoming)
            # Shielded: a cancelled request must still release the hold.
            await asyncio.shield(self._loop.call_async(lambda: self._release(holds)))
            raise
        trace.stage("adopt blocks")
        self._close(incoming)
        missing_blocks = incoming.progress().missing_blocks

        def adopt() -> int:
            # Runs both in one call, because each call waits for the end of a step.
            self._release(holds)
            self._adopt(request, missing_blocks, first)
            return time.monotonic_ns()

        adopted_ns = await asyncio.shield(self._loop.call_async(adopt))
        if first is None or request.search is not None:
            trace.stage("queue", at_ns=adopted_ns)
        return result

    async def _attempt(
        self,
        client: PrefillClient,
        target: str,
        request: Request,
        message: decode_pb2.DecodeRequest,
        incoming: IncomingTransfer,
        result: HandoffResult,
    ) -> tuple[prefill_pb2.PrefillFinished, HandoffResult]:
        """One attempt at a prefill pod. Raises PrefillFailedError."""
        started = time.monotonic_ns()
        trace = current()
        trace.call_stage("call prefill pod", target)
        call = client.prefill(
            target,
            prefill_pb2.PrefillRequest(
                request_id=message.request_id,
                tenant=message.tenant,
                cache_salt=message.cache_salt,
                prompt_token_ids=message.prompt_token_ids,
                output_token_ids=message.output_token_ids,
                due_seconds=request.due - time.monotonic(),
                sampling=_sampling_of_prompt(message.sampling),
                ticket=ticket_to_proto(incoming.ticket),
            ),
        )
        stream = PrefillStream(call, incoming)
        try:
            finished = await stream.result()
            if finished.first_token_id >= self._vocab_size:
                cause = f"first token {finished.first_token_id} is outside the vocabulary"
                raise PrefillFailedError(cause, FailureKind.REFUSED)
            now = time.monotonic_ns()
        except BaseException:
            stream.cancel()
            raise
        trace.stage("KV transfer", at_ns=stream.token_ns)
        ending = asyncio.create_task(stream.read_to_end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        result = replace(
            result,
            prefill_pod=finished.pod_id,
            remote_cached_tokens=finished.cached_tokens,
            queue_ns=finished.queue_ns,
            prefill_ns=stream.token_ns - started - finished.queue_ns,
            transfer_ns=now - stream.token_ns,
            transfer_bytes=incoming.progress().verified_bytes,
            num_preemptions=finished.preemptions,
        )
        trace.set_stage(
            {"tandem.kv.received_bytes": result.transfer_bytes, "tandem.prefill.pod": finished.pod_id}
        )
        return finished, result

    async def _reserve(self, request: Request, holds: list[BlockHold]) -> Reservation:
        # The request with the earliest deadline tries, so that small prompts cannot starve a large one.
        turn = self._reserving[request] = asyncio.Event()
        try:
            while True:
                if self._next_to_reserve() is not request:
                    turn.clear()
                    await turn.wait()
                    continue
                reservation = await self._loop.call_async(lambda: self._try_reserve(request, holds))
                if reservation is not None:
                    return reservation
                await asyncio.sleep(RESERVE_RETRY_S)
        finally:
            del self._reserving[request]
            if self._reserving:
                self._reserving[self._next_to_reserve()].set()

    def _close(self, incoming: IncomingTransfer | None) -> None:
        """Waits for a device's writes; after a failed write no block is complete."""
        if incoming is not None:
            self._open.discard(incoming)
            incoming.abort()

    def _next_to_reserve(self) -> Request:
        return min(self._reserving, key=lambda request: request.due)

    def _try_reserve(self, request: Request, holds: list[BlockHold]) -> Reservation | None:
        scheduler = self._loop.engine.scheduler
        reservation = scheduler.reserve(request)
        if reservation is not None:
            for group, (ids, blocks) in enumerate(reservation.groups()):
                holds.append(self._loop.engine.blocks.hold([ids[i] for i in blocks], group))
        return reservation

    def _release(self, holds: list[BlockHold]) -> None:
        for hold in holds:
            self._loop.engine.blocks.release(hold)

    def _adopt(
        self,
        request: Request,
        missing_blocks: Sequence[Sequence[int]],
        first: prefill_pb2.PrefillFinished | None,
    ) -> None:
        engine = self._loop.engine
        # A beam search needs the logits of the prompt's last token, which is computed again here.
        if first is None or request.search is not None:
            received = engine.scheduler.num_received(request, missing_blocks)
            engine.scheduler.adopt(request, received, None)
            return
        update = engine.scheduler.adopt(request, request.num_tokens, (first.first_token_id,))
        logprobs = (codec.logprobs_from_proto(first.logprobs),) if first.HasField("logprobs") else ()
        if update is not None:
            self._loop.publish(replace(engine.adopted(update), logprobs=logprobs))


def _sampling_of_prompt(sampling: common_pb2.SamplingParams) -> common_pb2.SamplingParams:
    """The sampling parameters for the prefill pod: without beams, since the token it chooses is not used."""
    if not sampling.HasField("beam_search"):
        return sampling
    plain = common_pb2.SamplingParams()
    plain.CopyFrom(sampling)
    plain.ClearField("beam_search")
    plain.ClearField("logprobs")
    return plain
