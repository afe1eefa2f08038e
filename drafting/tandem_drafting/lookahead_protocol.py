"""The lookahead protocol: spans and snapshots as protobuf, for pods and for the service.

Limits are checked here. Decoded spans can be merged without further checks. A snapshot is a message with one
digest over all of its content.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import xxhash
from google.protobuf.message import DecodeError
from tandem_proto.v1 import lookahead_pb2 as pb

from tandem_drafting.spans import AcceptedSpan

#: Token ids are stored as int32.
MAX_TOKEN_ID = 2**31 - 1
MAX_SPAN_TOKENS = 65_536
MAX_NAME_LENGTH = 64
#: A chunk and the fields around it fit a message of 1 MiB.
SNAPSHOT_CHUNK_BYTES = (1 << 20) - 1024
#: Version of the messages in a snapshot.
SNAPSHOT_VERSION = 1

Corpus = TypeVar("Corpus", pb.SharedCorpus, pb.NamespaceCorpus)


class BadMessageError(ValueError):
    """A message breaks the protocol. Names field and limit."""


def spans_to_proto(spans: Iterable[AcceptedSpan]) -> list[pb.Span]:
    return [pb.Span(run=s.run, offset=s.offset, token_ids=s.token_ids, is_prompt=s.is_prompt) for s in spans]


def spans_from_proto(spans: Iterable[pb.Span]) -> tuple[AcceptedSpan, ...]:
    """Leaves out empty spans. Raises BadMessageError for one that exceeds a limit."""
    return tuple(span for span in map(_span_from_proto, spans) if span.token_ids)


def _span_from_proto(span: pb.Span) -> AcceptedSpan:
    token_ids = tuple(span.token_ids)
    if len(token_ids) > MAX_SPAN_TOKENS:
        raise BadMessageError(f"span.token_ids: {len(token_ids)} tokens; at most {MAX_SPAN_TOKENS}")
    if max(token_ids, default=0) > MAX_TOKEN_ID:
        raise BadMessageError(f"span.token_ids: {max(token_ids)} is over {MAX_TOKEN_ID}")
    if span.offset > MAX_TOKEN_ID:
        raise BadMessageError(f"span.offset: {span.offset} is over {MAX_TOKEN_ID}")
    if not 0 < len(span.run) <= MAX_NAME_LENGTH:
        raise BadMessageError(f"span.run: {len(span.run)} characters, must be 1 to {MAX_NAME_LENGTH}")
    return AcceptedSpan(span.run, span.offset, token_ids, span.is_prompt)


def split_span(span: AcceptedSpan) -> list[AcceptedSpan]:
    """Splits spans that exceed the limit."""
    return [
        AcceptedSpan(span.run, span.offset + at, span.token_ids[at : at + MAX_SPAN_TOKENS], span.is_prompt)
        for at in range(0, len(span.token_ids), MAX_SPAN_TOKENS)
    ]


def snapshot_to_bytes(corpus: pb.SharedCorpus | pb.NamespaceCorpus) -> bytes:
    """Sets the version and adds the digest."""
    corpus.version = SNAPSHOT_VERSION
    content = corpus.SerializeToString()
    return pb.Snapshot(digest=xxhash.xxh3_128_digest(content), content=content).SerializeToString()


def snapshot_from_bytes(payload: bytes, kind: type[Corpus]) -> Corpus:
    """Raises ValueError for a damaged snapshot or another version."""
    try:
        snapshot = pb.Snapshot.FromString(payload)
        if xxhash.xxh3_128_digest(snapshot.content) != snapshot.digest:
            raise ValueError("snapshot is damaged: its digest does not match")
        corpus = kind.FromString(snapshot.content)
    except DecodeError as error:
        raise ValueError("snapshot is damaged: it is not a Snapshot message") from error
    if corpus.version != SNAPSHOT_VERSION:
        raise ValueError(f"snapshot has version {corpus.version}; this program reads {SNAPSHOT_VERSION}")
    return corpus
