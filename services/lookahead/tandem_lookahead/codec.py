"""Protobuf <-> the service's own types; no other module of the service builds or reads messages' fields.

Limits are checked here, at the border: what comes out of `decode_*` can be merged without further care.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from urllib.parse import quote, unquote

import xxhash
from google.protobuf.message import DecodeError
from tandem_drafting.padding import num_padding_bytes
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb

#: Token ids are stored as int32.
MAX_TOKEN_ID = 2**31 - 1
MAX_SPAN_TOKENS = 65_536
MAX_RUN_NAME_LENGTH = 64
MAX_NAME_LENGTH = 512
MAX_TABLES_BYTES = 2 << 20
#: With what goes around it, a chunk fits a message of 1 MiB.
SNAPSHOT_CHUNK_BYTES = (1 << 20) - 1024


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

    @classmethod
    def of_key(cls, key: str) -> Namespace:
        """Raises ValueError for what is no key."""
        parts = key.split("/")
        if len(parts) != 5:
            raise ValueError(f"{key!r} is no namespace's key")
        return cls(*map(unquote, parts))


@dataclass(frozen=True)
class Place:
    """Up to where a pod is current: a position in the stream of one generation of a namespace's text.

    A generation ends when the text is purged; what is of another one is to be forgotten.
    """

    generation: str = ""
    position: str = ""

    def __str__(self) -> str:
        return f"{self.generation}/{self.position}" if self.generation else ""

    @classmethod
    def parse(cls, text: str) -> Place:
        """Of what is unreadable, the beginning."""
        generation, slash, position = text.partition("/")
        return cls(generation, position) if slash else cls()


@dataclass(frozen=True)
class Hello:
    """Who opened a stream, and what it has already."""

    namespace: Namespace
    pod_id: str
    place: Place
    snapshot_version: str
    snapshot_chunks: int
    tables_format: str


@dataclass(frozen=True)
class Tables:
    """What a pod's drafter has learnt; opaque."""

    format: str
    num_observations: int
    payload: bytes


@dataclass(frozen=True)
class Welcome:
    """The first answer on a stream."""

    wants_prompts: bool

    def messages(self) -> Iterator[pb.SyncResponse]:
        yield _padded(pb.SyncResponse(welcome=pb.SyncWelcome(wants_prompts=self.wants_prompts)))


@dataclass(frozen=True)
class Delta:
    """Shared spans that are new, and where a pod is after them."""

    spans: tuple[AcceptedSpan, ...]
    place: Place

    @cached_property
    def _message(self) -> pb.SyncResponse:
        return _padded(pb.SyncResponse(delta=pb.Delta(spans=_pb_spans(self.spans), position=str(self.place))))

    def messages(self) -> Iterator[pb.SyncResponse]:
        yield self._message


@dataclass(frozen=True)
class SharedText:
    """All that is shared of a namespace, as bytes."""

    payload: bytes
    place: Place

    @cached_property
    def version(self) -> str:
        return xxhash.xxh3_64_hexdigest(self.payload)

    @property
    def num_chunks(self) -> int:
        return max(1, -(-len(self.payload) // SNAPSHOT_CHUNK_BYTES))


@dataclass(frozen=True)
class Snapshot:
    """Shared text on its way to a pod that has its first chunks already."""

    text: SharedText
    first_chunk: int = 0
    is_purge: bool = False

    @property
    def place(self) -> Place:
        return self.text.place

    def messages(self) -> Iterator[pb.SyncResponse]:
        view = memoryview(self.text.payload)
        for index in range(self.first_chunk, self.text.num_chunks):
            chunk = view[index * SNAPSHOT_CHUNK_BYTES : (index + 1) * SNAPSHOT_CHUNK_BYTES]
            yield _padded(
                pb.SyncResponse(
                    snapshot=pb.SnapshotChunk(
                        version=self.text.version,
                        index=index,
                        num_chunks=self.text.num_chunks,
                        payload=bytes(chunk),
                        position=str(self.place),
                        is_purge=self.is_purge,
                    )
                )
            )


@dataclass(frozen=True)
class TablesUpdate:
    """Learnt tables on their way to a pod."""

    tables: Tables

    def messages(self) -> Iterator[pb.SyncResponse]:
        yield _padded(pb.SyncResponse(tables=encode_tables(self.tables)))


Update = Welcome | Delta | Snapshot | TablesUpdate


def decode_hello(request: pb.SyncRequest) -> Hello:
    """Raises BadMessageError when the message is none."""
    if request.WhichOneof("message") != "hello":
        raise BadMessageError("message: the first one on a stream must be hello")
    hello = request.hello
    return Hello(
        decode_namespace(hello.namespace),
        hello.pod_id,
        Place.parse(hello.have_position),
        hello.snapshot_version,
        hello.snapshot_chunks,
        hello.tables_format,
    )


def decode_namespace(space: pb.Namespace) -> Namespace:
    """Raises BadMessageError when it is too long to be a key."""
    namespace = Namespace(
        space.tenant, space.model_revision, space.tokenizer_hash, space.lora, space.template
    )
    if len(namespace.key) > MAX_NAME_LENGTH:
        raise BadMessageError(f"namespace: longer than {MAX_NAME_LENGTH} characters once quoted")
    return namespace


def encode_namespace(namespace: Namespace) -> pb.Namespace:
    return pb.Namespace(
        tenant=namespace.tenant,
        model_revision=namespace.model_revision,
        tokenizer_hash=namespace.tokenizer_hash,
        lora=namespace.lora,
        template=namespace.template,
    )


def decode_message(request: pb.SyncRequest) -> tuple[AcceptedSpan, ...] | Tables:
    """What follows the hello. Raises BadMessageError when it is something else or out of bounds."""
    match request.WhichOneof("message"):
        case "spans":
            return _checked(request.spans)
        case "tables":
            return decode_tables(request.tables)
        case _:
            raise BadMessageError("message: only spans and tables may follow the hello")


def decode_tables(tables: pb.LearntTables) -> Tables:
    """Raises BadMessageError when they are too large or not what was sent."""
    if not 0 < len(tables.format) <= MAX_RUN_NAME_LENGTH:
        raise BadMessageError(
            f"tables.format: {len(tables.format)} characters, must be 1 to {MAX_RUN_NAME_LENGTH}"
        )
    if len(tables.payload) > MAX_TABLES_BYTES:
        raise BadMessageError(f"tables.payload: {len(tables.payload)} bytes, at most {MAX_TABLES_BYTES}")
    if xxhash.xxh3_128_digest(tables.payload) != tables.digest:
        raise BadMessageError("tables.digest: is not the payload's; it was damaged on its way, send it again")
    return Tables(tables.format, tables.num_observations, tables.payload)


def encode_tables(tables: Tables) -> pb.LearntTables:
    return pb.LearntTables(
        format=tables.format,
        num_observations=tables.num_observations,
        payload=tables.payload,
        digest=xxhash.xxh3_128_digest(tables.payload),
    )


def pack_spans(spans: Iterable[AcceptedSpan]) -> bytes:
    """As a Redis stream entry holds them."""
    return pb.SpanBatch(spans=_pb_spans(spans)).SerializeToString()


def unpack_spans(payload: bytes) -> tuple[AcceptedSpan, ...]:
    """Raises ValueError when the entry is damaged."""
    batch = pb.SpanBatch()
    try:
        batch.ParseFromString(payload)
        return _checked(batch)
    except (DecodeError, BadMessageError) as error:
        raise ValueError("stream entry is not a span batch") from error


def _checked(batch: pb.SpanBatch) -> tuple[AcceptedSpan, ...]:
    for span in batch.spans:
        if len(span.token_ids) > MAX_SPAN_TOKENS:
            raise BadMessageError(f"span.token_ids: {len(span.token_ids)} tokens; at most {MAX_SPAN_TOKENS}")
        if max(span.token_ids, default=0) > MAX_TOKEN_ID:
            raise BadMessageError(f"span.token_ids: {max(span.token_ids)} is over {MAX_TOKEN_ID}")
        if span.offset > MAX_TOKEN_ID:
            raise BadMessageError(f"span.offset: {span.offset} is over {MAX_TOKEN_ID}")
        if not 0 < len(span.run) <= MAX_RUN_NAME_LENGTH:
            raise BadMessageError(f"span.run: {len(span.run)} characters, must be 1 to {MAX_RUN_NAME_LENGTH}")
    return tuple(
        AcceptedSpan(s.run, s.offset, tuple(s.token_ids), s.is_prompt) for s in batch.spans if s.token_ids
    )


def _pb_spans(spans: Iterable[AcceptedSpan]) -> list[pb.Span]:
    return [pb.Span(run=s.run, offset=s.offset, token_ids=s.token_ids, is_prompt=s.is_prompt) for s in spans]


def _padded(message: pb.SyncResponse) -> pb.SyncResponse:
    message.padding = bytes(num_padding_bytes(message.ByteSize()))
    return message
