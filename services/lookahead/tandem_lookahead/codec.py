"""Protobuf <-> the service's own types; no other module of the service builds or reads messages' fields.

Limits are checked here, at the border: what comes out of `decode_*` can be merged without further care.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from urllib.parse import quote

from google.protobuf.message import DecodeError
from tandem_engine.drafts.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb

#: Token ids are stored as int32.
MAX_TOKEN_ID = 2**31 - 1
MAX_SPAN_TOKENS = 65_536
MAX_NAME_LENGTH = 512
SNAPSHOT_CHUNK_BYTES = 1 << 20


class BadMessageError(Exception):
    """A message breaks the protocol; names field and limit (INVALID_ARGUMENT)."""


@dataclass(frozen=True)
class Namespace:
    """Whose text a forest holds; forests of different namespaces never meet."""

    tenant: str
    model_revision: str
    tokenizer_hash: str
    lora: str = ""
    template: str = ""

    @property
    def key(self) -> str:
        """One string per namespace: each part percent-quoted, joined by slashes."""
        parts = (self.tenant, self.model_revision, self.tokenizer_hash, self.lora, self.template)
        return "/".join(quote(part, safe="") for part in parts)


@dataclass(frozen=True)
class Hello:
    """Who opened a stream, and up to where its mirror is current."""

    namespace: Namespace
    pod_id: str
    have_position: str


@dataclass(frozen=True)
class Delta:
    """Spans and the stream position after them."""

    spans: tuple[AcceptedSpan, ...]
    position: str


@dataclass(frozen=True)
class PublishedSnapshot:
    """A whole forest as bytes, and the stream position it includes."""

    payload: bytes
    version: str
    position: str


Update = Delta | PublishedSnapshot


def decode_hello(request: pb.SyncRequest) -> Hello:
    """Raises BadMessageError when the message is none."""
    if request.WhichOneof("message") != "hello":
        raise BadMessageError("message: the first one on a stream must be hello")
    space = request.hello.namespace
    namespace = Namespace(
        space.tenant, space.model_revision, space.tokenizer_hash, space.lora, space.template
    )
    if len(namespace.key) > MAX_NAME_LENGTH:
        raise BadMessageError(f"hello.namespace: longer than {MAX_NAME_LENGTH} characters once quoted")
    return Hello(namespace, request.hello.pod_id, request.hello.have_position)


def decode_spans(request: pb.SyncRequest) -> tuple[AcceptedSpan, ...]:
    """Raises BadMessageError when the message holds no spans or one out of bounds."""
    if request.WhichOneof("message") != "spans":
        raise BadMessageError("message: only spans may follow the hello")
    for span in request.spans.spans:
        if len(span.token_ids) > MAX_SPAN_TOKENS:
            raise BadMessageError(f"span.token_ids: {len(span.token_ids)} tokens; at most {MAX_SPAN_TOKENS}")
        if max(span.token_ids, default=0) > MAX_TOKEN_ID:
            raise BadMessageError(f"span.token_ids: {max(span.token_ids)} is over {MAX_TOKEN_ID}")
    return _spans(request.spans.spans)


def encode_update(update: Update) -> Iterator[pb.SyncResponse]:
    """One message for a delta, a chunk per SNAPSHOT_CHUNK_BYTES for a snapshot."""
    if isinstance(update, Delta):
        yield pb.SyncResponse(delta=pb.Delta(spans=_pb_spans(update.spans), position=update.position))
        return
    view = memoryview(update.payload)
    num_chunks = max(1, -(-len(view) // SNAPSHOT_CHUNK_BYTES))
    for index in range(num_chunks):
        chunk = view[index * SNAPSHOT_CHUNK_BYTES : (index + 1) * SNAPSHOT_CHUNK_BYTES]
        yield pb.SyncResponse(
            snapshot=pb.SnapshotChunk(
                version=update.version,
                index=index,
                num_chunks=num_chunks,
                payload=bytes(chunk),
                position=update.position,
            )
        )


def pack_spans(spans: Iterable[AcceptedSpan]) -> bytes:
    """As a Redis stream entry holds them."""
    return pb.SpanBatch(spans=_pb_spans(spans)).SerializeToString()


def unpack_spans(payload: bytes) -> tuple[AcceptedSpan, ...]:
    """Raises ValueError when the entry is damaged."""
    batch = pb.SpanBatch()
    try:
        batch.ParseFromString(payload)
    except DecodeError as error:
        raise ValueError("stream entry is not a span batch") from error
    return _spans(batch.spans)


def _spans(spans: Iterable[pb.Span]) -> tuple[AcceptedSpan, ...]:
    return tuple(AcceptedSpan(s.request_id, s.offset, tuple(s.token_ids)) for s in spans if s.token_ids)


def _pb_spans(spans: Iterable[AcceptedSpan]) -> list[pb.Span]:
    return [pb.Span(request_id=s.request_id, offset=s.offset, token_ids=s.token_ids) for s in spans]
