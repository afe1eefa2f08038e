"""A decode pod's stream to the lookahead service: accepted spans up, shared text down into the mirror.

    engine thread   push(request_id, offset, token_ids) -> bounded queue
    every ~50 ms    sends the queued spans, joined, under names that say nothing about the requests
    downwards       applies snapshots and deltas to the mirror, in a thread
    service gone    retries after 0.1 .. 2 s; spans wait in a bounded queue; resends what was sent in the last
                    seconds, which is harmless; a partly received snapshot continues where it stopped
    text purged     empties mirror and queues, then calls `on_purge`

It never raises into the pod. There is one client per namespace (tenant).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio
import structlog
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service.channels import open_channel
from tandem_service.tasks import end_tasks
from tandem_service.tls import PodTls, Role

from tandem_drafting.lookahead_protocol import (
    MAX_SPAN_TOKENS,
    spans_from_proto,
    spans_to_proto,
    split_span,
)
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan

_FLUSH_S = 0.05
_BACKOFF_S = 0.1
_BACKOFF_LIMIT_S = 2.0
#: Batches sent in this time may be lost when the stream breaks.
_RESEND_S = 2.0
_SPANS_PER_BATCH = 2048
_TRACES_PER_BATCH = 256
#: A batch with this many tokens gets no further span; a gRPC message holds 4 MiB.
_TOKENS_PER_BATCH = 100_000


@dataclass
class _PartialSnapshot:
    version: str = ""
    chunks: list[bytes] = field(default_factory=list)


class LookaheadClient:
    """Keeps one bidirectional stream open between `start` and `close`.

    `push`, `push_prompt`, `connected` and `dropped` are thread-safe; the rest belongs to the event loop.
    """

    def __init__(
        self,
        target: str,
        namespace: pb.Namespace,
        pod_id: str,
        mirror: GlobalMirror,
        *,
        on_purge: Callable[[], Awaitable[None]] | None = None,
        max_queued_spans: int = 20_000,
        tls: PodTls | None = None,
    ) -> None:
        self._tls = tls
        self._target = target
        self._namespace = namespace
        self._pod_id = pod_id
        self._mirror = mirror
        self._on_purge = on_purge
        self._max_queued_spans = max_queued_spans
        self._log = structlog.get_logger("tandem.lookahead.client").bind(target=target)
        #: Pushed by the engine's thread; a deque needs no lock for append and popleft.
        self._pushed: deque[AcceptedSpan] = deque()
        self._unsent: deque[AcceptedSpan] = deque()
        self._sent: deque[tuple[float, list[AcceptedSpan]]] = deque()
        #: Traces of requests that have ended, at most the number sent with one batch.
        self._traceparents: deque[str] = deque(maxlen=_TRACES_PER_BATCH)
        self._flushed = asyncio.Event()
        self._partial = _PartialSnapshot()
        self._wants_prompts = False
        self._connected = False
        self._dropped = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Whether the service has welcomed this stream."""
        return self._connected

    @property
    def wants_prompts(self) -> bool:
        """Whether the tenant shares its prompts."""
        return self._wants_prompts

    @property
    def dropped(self) -> int:
        """Spans dropped because a queue was full."""
        return self._dropped

    def push(self, request_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Reports accepted tokens; `offset` is the first one's index in the request's output."""
        self._push(AcceptedSpan(self._mirror.names.of(request_id), offset, tuple(token_ids)))

    def push_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Reports a request's prompt, if the tenant shares its prompts."""
        if self._wants_prompts:
            name = self._mirror.names.of(request_id)
            for span in split_span(AcceptedSpan(name, 0, tuple(token_ids), is_prompt=True)):
                self._push(span)

    def push_trace(self, traceparent: str) -> None:
        """Reports that a traced request has ended, after its last tokens. From the event loop only."""
        self._traceparents.append(traceparent)

    def start(self) -> None:
        """Starts to connect; returns at once."""
        self._tasks = [
            asyncio.create_task(self._flush_forever(), name="lookahead-flush"),
            asyncio.create_task(self._stay_connected(), name="lookahead-stream"),
        ]

    async def close(self) -> None:
        """Ends the stream; unsent spans are lost."""
        await end_tasks(self._tasks)
        self._tasks.clear()
        self._connected = False

    def _push(self, span: AcceptedSpan) -> None:
        if len(self._pushed) >= self._max_queued_spans:
            self._dropped += 1
        elif span.token_ids:
            self._pushed.append(span)

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            if not self._pushed and not self._traceparents:
                continue
            self._unsent.extend(joined([self._pushed.popleft() for _ in range(len(self._pushed))]))
            while len(self._unsent) > self._max_queued_spans:
                self._unsent.popleft()
                self._dropped += 1
            self._flushed.set()

    async def _stay_connected(self) -> None:
        backoff_s = _BACKOFF_S
        while True:
            channel = open_channel(self._target, self._tls, Role.LOOKAHEAD)
            try:
                await self._follow(channel)
                self._log.info("lookahead service ended the stream")
            except grpc.aio.AioRpcError as error:
                log = self._log.warning if self._connected else self._log.debug
                log("lookahead service lost; drafting continues without it", reason=error.details())
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # The library cancelled its own call, not this task.
                self._log.debug("lookahead stream was cancelled; reconnecting")
            except Exception:
                self._log.exception("lookahead stream failed; reconnecting")
            finally:
                await channel.close(None)
            if self._connected:
                backoff_s = _BACKOFF_S
            self._connected = False
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _BACKOFF_LIMIT_S)

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """One stream, from hello to its end."""
        stub = lookahead_pb2_grpc.LookaheadServiceStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Sync(self._requests())
        try:
            async for response in call:
                match response.WhichOneof("message"):
                    case "welcome":
                        self._wants_prompts = response.welcome.wants_prompts
                        self._connected = True
                    case "delta":
                        spans = spans_from_proto(response.delta.spans)
                        await asyncio.to_thread(self._mirror.apply_delta, spans, response.delta.position)
                    case "snapshot":
                        await self._collect(response.snapshot)
        finally:
            call.cancel()

    async def _requests(self) -> AsyncIterator[pb.SyncRequest]:
        yield pb.SyncRequest(
            hello=pb.SyncHello(
                namespace=self._namespace,
                pod_id=self._pod_id,
                have_position=self._mirror.position,
                snapshot_version=self._partial.version,
                snapshot_chunks=len(self._partial.chunks),
            )
        )
        again = [span for _, spans in self._sent for span in spans]
        self._sent.clear()
        self._unsent.extendleft(reversed(again))
        while True:
            while self._unsent or (self._traceparents and not self._pushed):
                spans = self._next_batch()
                traceparents = [] if self._unsent or self._pushed else list(self._traceparents)
                now = time.monotonic()
                self._sent.append((now, spans))
                while self._sent[0][0] < now - _RESEND_S:
                    self._sent.popleft()
                if traceparents:
                    self._traceparents.clear()
                batch = pb.SpanBatch(spans=spans_to_proto(spans), traceparents=traceparents)
                yield pb.SyncRequest(spans=batch)
            self._flushed.clear()
            await self._flushed.wait()

    def _next_batch(self) -> list[AcceptedSpan]:
        spans: list[AcceptedSpan] = []
        num_tokens = 0
        while self._unsent and len(spans) < _SPANS_PER_BATCH and num_tokens < _TOKENS_PER_BATCH:
            spans.append(self._unsent.popleft())
            num_tokens += len(spans[-1].token_ids)
        return spans

    async def _collect(self, chunk: pb.SnapshotChunk) -> None:
        """Keeps a chunk; applies the snapshot when it is complete."""
        if chunk.version != self._partial.version or chunk.index != len(self._partial.chunks):
            self._partial = _PartialSnapshot(chunk.version)
            if chunk.index > 0:
                raise ValueError(f"snapshot {chunk.version} starts with chunk {chunk.index}")
        chunks = self._partial.chunks
        chunks.append(chunk.payload)
        if len(chunks) < chunk.num_chunks:
            return
        self._partial = _PartialSnapshot()
        if chunk.is_purge:
            for queue in (self._pushed, self._unsent, self._sent):
                queue.clear()
            if self._on_purge is not None:
                await self._on_purge()
        try:
            await asyncio.to_thread(self._mirror.apply_snapshot, b"".join(chunks), chunk.position)
        except ValueError as error:
            self._log.warning("a damaged snapshot is ignored", error=str(error))


def joined(spans: Sequence[AcceptedSpan]) -> list[AcceptedSpan]:
    """Joins consecutive pieces of a sequence within the limit of a span."""
    whole: list[AcceptedSpan] = []
    last: dict[tuple[str, bool], int] = {}
    for span in spans:
        at = last.get((span.run, span.is_prompt))
        if at is not None:
            previous = whole[at]
            tokens = previous.token_ids + span.token_ids
            if previous.offset + len(previous.token_ids) == span.offset and len(tokens) <= MAX_SPAN_TOKENS:
                whole[at] = AcceptedSpan(span.run, previous.offset, tokens, span.is_prompt)
                continue
        last[span.run, span.is_prompt] = len(whole)
        whole.append(span)
    return whole
