"""A decode pod's link to the lookahead service: accepted spans up, snapshots and deltas into the mirror.

    engine thread   push(request_id, offset, token_ids) -> bounded queue
    every ~50 ms    own spans enter the mirror at once (they need no service), then go up the stream
    downwards       snapshots and deltas enter the mirror, in a thread
    service gone    backoff 0.1 .. 2 s; spans wait in a bounded queue; what was sent in the last seconds is
                    sent again, which is harmless; drafting goes on with the mirror as it is

Nothing here ever raises into the pod. One client per namespace (tenant).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

import grpc.aio
import structlog
from tandem_engine.drafts.mirror import GlobalMirror
from tandem_engine.drafts.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service.channels import open_channel

_FLUSH_S = 0.05
_BACKOFF_S = 0.1
_BACKOFF_LIMIT_S = 2.0
#: Batches sent this recently may not have arrived when the stream broke.
_RESEND_S = 2.0
_SPANS_PER_BATCH = 2048


class LookaheadClient:
    """Keeps one bidirectional stream alive between `start` and `close`.

    `push`, `connected` and `dropped` may be used from any thread, the rest from the event loop.
    """

    def __init__(
        self,
        target: str,
        namespace: pb.Namespace,
        pod_id: str,
        mirror: GlobalMirror,
        *,
        max_queued_spans: int = 20_000,
    ) -> None:
        self._target = target
        self._namespace = namespace
        self._pod_id = pod_id
        self._mirror = mirror
        self._max_queued_spans = max_queued_spans
        self._log = structlog.get_logger("tandem.decode.lookahead").bind(target=target)
        #: Pushed by the engine's thread; a deque needs no lock for append and popleft.
        self._pushed: deque[AcceptedSpan] = deque()
        #: In the mirror, not yet sent.
        self._unsent: deque[AcceptedSpan] = deque()
        self._sent: deque[tuple[float, list[AcceptedSpan]]] = deque()
        self._flushed = asyncio.Event()
        self._connected = False
        self._dropped = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Whether the service has taken the stream."""
        return self._connected

    @property
    def dropped(self) -> int:
        """Spans given up because a queue was full."""
        return self._dropped

    def push(self, request_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Reports accepted tokens; `offset` is the first one's index in the request's output."""
        if len(self._pushed) >= self._max_queued_spans:
            self._dropped += 1
        elif token_ids:
            self._pushed.append(AcceptedSpan(request_id, offset, tuple(token_ids)))

    def start(self) -> None:
        """Begins to connect; returns at once."""
        self._tasks = [
            asyncio.create_task(self._flush_forever(), name="lookahead-flush"),
            asyncio.create_task(self._stay_connected(), name="lookahead-stream"),
        ]

    async def close(self) -> None:
        """Ends the stream; spans not yet sent are lost."""
        # Again and again: a cancellation can get lost in a library's clean-up.
        while pending := [task for task in self._tasks if not task.done()]:
            for task in pending:
                task.cancel()
            await asyncio.wait(pending, timeout=0.2)
        self._tasks.clear()
        self._connected = False

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            if not self._pushed:
                continue
            spans = joined([self._pushed.popleft() for _ in range(len(self._pushed))])
            try:
                await asyncio.to_thread(self._mirror.learn, spans)
            except Exception:
                self._log.exception("the mirror did not learn a batch of spans; going on with the next")
            self._unsent.extend(spans)
            while len(self._unsent) > self._max_queued_spans:
                self._unsent.popleft()
                self._dropped += 1
            self._flushed.set()

    async def _stay_connected(self) -> None:
        backoff_s = _BACKOFF_S
        while True:
            channel = open_channel(self._target)
            try:
                await self._follow(channel)
                self._log.info("lookahead service ended the stream")
            except grpc.aio.AioRpcError as error:
                log = self._log.warning if self._connected else self._log.debug
                log("lookahead service lost; drafting goes on without it", reason=error.details())
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is None or task.cancelling():
                    raise
                # Not meant for us: the library cancelled its own call.
                self._log.debug("lookahead stream was cancelled; connecting anew")
            except Exception:
                self._log.exception("lookahead stream failed; connecting anew")
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
            await call.wait_for_connection()
            self._connected = True
            chunks: list[bytes] = []
            async for response in call:
                if response.WhichOneof("message") == "delta":
                    await self._apply_delta(response.delta)
                elif response.WhichOneof("message") == "snapshot":
                    chunks = await self._collect(chunks, response.snapshot)
        finally:
            call.cancel()

    async def _requests(self) -> AsyncIterator[pb.SyncRequest]:
        yield pb.SyncRequest(
            hello=pb.SyncHello(
                namespace=self._namespace,
                pod_id=self._pod_id,
                have_position=self._mirror.position,
            )
        )
        again = [span for _, spans in self._sent for span in spans]
        self._sent.clear()
        self._unsent.extendleft(reversed(again))
        while True:
            while self._unsent:
                spans = [self._unsent.popleft() for _ in range(min(len(self._unsent), _SPANS_PER_BATCH))]
                now = time.monotonic()
                self._sent.append((now, spans))
                while self._sent[0][0] < now - _RESEND_S:
                    self._sent.popleft()
                yield pb.SyncRequest(
                    spans=pb.SpanBatch(
                        spans=[
                            pb.Span(request_id=s.request_id, offset=s.offset, token_ids=s.token_ids)
                            for s in spans
                        ]
                    )
                )
            self._flushed.clear()
            await self._flushed.wait()

    async def _apply_delta(self, delta: pb.Delta) -> None:
        spans = [AcceptedSpan(s.request_id, s.offset, tuple(s.token_ids)) for s in delta.spans]
        await asyncio.to_thread(self._mirror.apply_delta, spans, delta.position)

    async def _collect(self, chunks: list[bytes], chunk: pb.SnapshotChunk) -> list[bytes]:
        """The chunks so far; a whole snapshot goes into the mirror."""
        if chunk.index == 0:
            chunks = []
        chunks.append(chunk.payload)
        if len(chunks) < chunk.num_chunks:
            return chunks
        try:
            await asyncio.to_thread(self._mirror.apply_snapshot, b"".join(chunks), chunk.position)
        except ValueError as error:
            self._log.warning("a damaged snapshot is ignored", error=str(error))
        return []


def joined(spans: Sequence[AcceptedSpan]) -> list[AcceptedSpan]:
    """The same tokens in fewer spans: consecutive pieces of one request become one."""
    whole: list[AcceptedSpan] = []
    last: dict[str, int] = {}
    for span in spans:
        at = last.get(span.request_id)
        if at is not None and whole[at].offset + len(whole[at].token_ids) == span.offset:
            previous = whole[at]
            whole[at] = AcceptedSpan(span.request_id, previous.offset, previous.token_ids + span.token_ids)
        else:
            last[span.request_id] = len(whole)
            whole.append(span)
    return whole
