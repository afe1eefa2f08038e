"""What a pod still holds, by its own books."""

from __future__ import annotations

from tandem_proto.v1 import common_pb2


def held(books: common_pb2.Books) -> dict[str, object]:
    """Entry -> value of whatever an idle pod must not have; {} when everything was given back."""
    names = ("blocks_used", "requests_waiting", "requests_running", "transfers_open",
             "credit_bytes_outstanding", "streams_open", "violations")  # fmt: skip
    kept = {name: getattr(books, name) for name in names if getattr(books, name)}
    missing = books.blocks_total - books.blocks_free - books.blocks_cached
    return kept | ({"missing blocks": missing} if missing else {})
