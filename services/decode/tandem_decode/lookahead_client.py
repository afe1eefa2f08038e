"""A decode pod's link to the lookahead service: accepted spans up, shared text into the mirror.

    engine thread   push(request_id, offset, token_ids) -> bounded queue
    every ~50 ms    the queue's spans, joined, go up the stream under names that tell nothing of the requests
    downwards       snapshots and deltas enter the mirror, in a thread; learnt tables go to the drafter
    every ~30 s     learnt tables go up, when more has been learnt
    service gone    backoff 0.1 .. 2 s; spans wait in a bounded queue; what was sent in the last seconds is
                    sent again, which is harmless; drafting goes on with the mirror as it is; a snapshot
                    of which a part has arrived goes on behind it
    text purged     the mirror is emptied, and so are the queues and what was learnt

Nothing here ever raises into the pod. One client per namespace (tenant).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc.aio
import structlog
import xxhash
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.padding import num_padding_bytes
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service.channels import open_channel

_FLUSH_S = 0.05
_TABLES_S = 30.0
_BACKOFF_S = 0.1
_BACKOFF_LIMIT_S = 2.0
#: Batches sent this recently may not have arrived when the stream broke.
_RESEND_S = 2.0
_SPANS_PER_BATCH = 2048
#: A batch that has this many tokens gets no more; gRPC takes 4 MiB.
_TOKENS_PER_BATCH = 100_000
#: The service takes no longer ones.
_TOKENS_PER_SPAN = 65_536


class LearntTables(Protocol):
    """What the drafter has learnt of the tenant's text, as bytes."""

    @property
    def format(self) -> str:
        """Equal formats can read each other's bytes."""

    async def read(self) -> tuple[int, bytes]:
        """The number of observations, and the bytes."""

    async def load(self, payload: bytes) -> None:
        """Replaces what was learnt here. Raises ValueError, with nothing changed, when it cannot be read."""

    async def forget(self) -> None:
        """Drops everything that is kept of the tenant."""


@dataclass
class _PartialSnapshot:
    version: str = ""
    chunks: list[bytes] = field(default_factory=list)


class LookaheadClient:
    """Keeps one bidirectional stream alive between `start` and `close`.

    `push`, `push_prompt`, `connected` and `dropped` may be used from any thread, the rest from the event
    loop.
    """

    def __init__(
        self,
        target: str,
        namespace: pb.Namespace,
        pod_id: str,
        mirror: GlobalMirror,
        *,
        tables: LearntTables | None = None,
        max_queued_spans: int = 20_000,
        tables_interval_s: float = _TABLES_S,
    ) -> None:
        self._target = target
        self._namespace = namespace
        self._pod_id = pod_id
        self._mirror = mirror
        self._tables = tables
        self._tables_interval_s = tables_interval_s
        self._max_queued_spans = max_queued_spans
        self._log = structlog.get_logger("tandem.decode.lookahead").bind(target=target)
        #: Pushed by the engine's thread; a deque needs no lock for append and popleft.
        self._pushed: deque[AcceptedSpan] = deque()
        self._unsent: deque[AcceptedSpan] = deque()
        self._sent: deque[tuple[float, list[AcceptedSpan]]] = deque()
        self._learnt: pb.LearntTables | None = None
        #: Observations behind the tables sent or received last.
        self._num_observations = 0
        self._flushed = asyncio.Event()
        self._partial = _PartialSnapshot()
        self._wants_prompts = False
        self._connected = False
        self._dropped = 0
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def connected(self) -> bool:
        """Whether the service has taken the stream."""
        return self._connected

    @property
    def wants_prompts(self) -> bool:
        """Whether the service has said that the tenant shares its prompts."""
        return self._wants_prompts

    @property
    def dropped(self) -> int:
        """Spans given up because a queue was full."""
        return self._dropped

    def push(self, request_id: str, offset: int, token_ids: Sequence[int]) -> None:
        """Reports accepted tokens; `offset` is the first one's index in the request's output."""
        self._push(AcceptedSpan(self._mirror.names.of(request_id), offset, tuple(token_ids)))

    def push_prompt(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Offers a request's prompt; it leaves the pod only if the tenant wants its prompts shared."""
        if not self._wants_prompts:
            return
        name = self._mirror.names.of(request_id)
        for at in range(0, len(token_ids), _TOKENS_PER_SPAN):
            tokens = tuple(token_ids[at : at + _TOKENS_PER_SPAN])
            self._push(AcceptedSpan(name, at, tokens, is_prompt=True))

    def start(self) -> None:
        """Begins to connect; returns at once."""
        self._tasks = [
            asyncio.create_task(self._flush_forever(), name="lookahead-flush"),
            asyncio.create_task(self._stay_connected(), name="lookahead-stream"),
            asyncio.create_task(self._offer_tables(), name="lookahead-tables"),
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

    def _push(self, span: AcceptedSpan) -> None:
        if len(self._pushed) >= self._max_queued_spans:
            self._dropped += 1
        elif span.token_ids:
            self._pushed.append(span)

    async def _flush_forever(self) -> None:
        while True:
            await asyncio.sleep(_FLUSH_S)
            if not self._pushed:
                continue
            self._unsent.extend(joined([self._pushed.popleft() for _ in range(len(self._pushed))]))
            while len(self._unsent) > self._max_queued_spans:
                self._unsent.popleft()
                self._dropped += 1
            self._flushed.set()

    async def _offer_tables(self) -> None:
        """Sends the learnt tables when they have been taught more than the service knows of."""
        if self._tables is None:
            return
        while True:
            await asyncio.sleep(self._tables_interval_s)
            if not self._connected:
                continue
            try:
                num_observations, payload = await self._tables.read()
            except Exception:
                self._log.exception("the learnt tables could not be read; trying again later")
                continue
            if num_observations > self._num_observations:
                self._num_observations = num_observations
                self._learnt = pb.LearntTables(
                    format=self._tables.format,
                    num_observations=num_observations,
                    payload=payload,
                    digest=xxhash.xxh3_128_digest(payload),
                )
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
            async for response in call:
                match response.WhichOneof("message"):
                    case "delta":
                        await self._apply_delta(response.delta)
                    case "snapshot":
                        await self._collect(response.snapshot)
                    case "tables":
                        await self._load_tables(response.tables)
                    case "welcome":
                        self._wants_prompts = response.welcome.wants_prompts
        finally:
            call.cancel()

    async def _requests(self) -> AsyncIterator[pb.SyncRequest]:
        yield _padded(
            pb.SyncRequest(
                hello=pb.SyncHello(
                    namespace=self._namespace,
                    pod_id=self._pod_id,
                    have_position=self._mirror.position,
                    snapshot_version=self._partial.version,
                    snapshot_chunks=len(self._partial.chunks),
                    tables_format=self._tables.format if self._tables is not None else "",
                )
            )
        )
        again = [span for _, spans in self._sent for span in spans]
        self._sent.clear()
        self._unsent.extendleft(reversed(again))
        while True:
            while self._unsent:
                spans = self._next_batch()
                now = time.monotonic()
                self._sent.append((now, spans))
                while self._sent[0][0] < now - _RESEND_S:
                    self._sent.popleft()
                yield _padded(pb.SyncRequest(spans=pb.SpanBatch(spans=[_pb_span(span) for span in spans])))
            if self._learnt is not None:
                learnt, self._learnt = self._learnt, None
                yield _padded(pb.SyncRequest(tables=learnt))
            self._flushed.clear()
            await self._flushed.wait()

    def _next_batch(self) -> list[AcceptedSpan]:
        spans: list[AcceptedSpan] = []
        num_tokens = 0
        while self._unsent and len(spans) < _SPANS_PER_BATCH and num_tokens < _TOKENS_PER_BATCH:
            spans.append(self._unsent.popleft())
            num_tokens += len(spans[-1].token_ids)
        return spans

    async def _apply_delta(self, delta: pb.Delta) -> None:
        spans = [AcceptedSpan(s.run, s.offset, tuple(s.token_ids)) for s in delta.spans]
        await asyncio.to_thread(self._mirror.apply_delta, spans, delta.position)

    async def _collect(self, chunk: pb.SnapshotChunk) -> None:
        """Keeps a chunk; a whole snapshot goes into the mirror."""
        if chunk.version != self._partial.version or chunk.index != len(self._partial.chunks):
            self._partial = _PartialSnapshot(chunk.version)
            if chunk.index > 0:
                raise ValueError(f"snapshot {chunk.version} begins with chunk {chunk.index}")
        chunks = self._partial.chunks
        chunks.append(chunk.payload)
        if len(chunks) < chunk.num_chunks:
            return
        self._partial = _PartialSnapshot()
        if chunk.is_purge:
            for queue in (self._pushed, self._unsent, self._sent):
                queue.clear()
            self._learnt = None
            self._num_observations = 0
            if self._tables is not None:
                await self._tables.forget()
        try:
            await asyncio.to_thread(self._mirror.apply_snapshot, b"".join(chunks), chunk.position)
        except ValueError as error:
            self._log.warning("a damaged snapshot is ignored", error=str(error))

    async def _load_tables(self, tables: pb.LearntTables) -> None:
        if self._tables is None:
            return
        try:
            if tables.num_observations <= (await self._tables.read())[0]:
                return  # this pod has learnt more
            if xxhash.xxh3_128_digest(tables.payload) != tables.digest:
                raise ValueError("their digest does not match")
            await self._tables.load(tables.payload)
        except ValueError as error:
            self._log.warning("learnt tables are ignored", error=str(error))
            return
        self._num_observations = tables.num_observations


def joined(spans: Sequence[AcceptedSpan]) -> list[AcceptedSpan]:
    """The same tokens in fewer spans: consecutive pieces of one run become one, as long as it may be."""
    whole: list[AcceptedSpan] = []
    last: dict[tuple[str, bool], int] = {}
    for span in spans:
        at = last.get((span.run, span.is_prompt))
        if at is not None:
            previous = whole[at]
            tokens = previous.token_ids + span.token_ids
            if previous.offset + len(previous.token_ids) == span.offset and len(tokens) <= _TOKENS_PER_SPAN:
                whole[at] = AcceptedSpan(span.run, previous.offset, tokens, span.is_prompt)
                continue
        last[span.run, span.is_prompt] = len(whole)
        whole.append(span)
    return whole


def _pb_span(span: AcceptedSpan) -> pb.Span:
    return pb.Span(run=span.run, offset=span.offset, token_ids=span.token_ids, is_prompt=span.is_prompt)


def _padded(message: pb.SyncRequest) -> pb.SyncRequest:
    message.padding = bytes(num_padding_bytes(message.ByteSize()))
    return message
