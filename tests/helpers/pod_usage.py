"""The resources that a pod still holds, by its status."""

from __future__ import annotations

from tandem_proto.v1 import common_pb2


def held(usage: common_pb2.ResourceUsage) -> dict[str, object]:
    """Entries of the status that must be empty in an idle pod, with their values; {} if all are."""
    names = ("blocks_used", "requests_waiting", "requests_running", "transfers_open",
             "credit_bytes_outstanding", "streams_open", "violations")  # fmt: skip
    kept = {name: getattr(usage, name) for name in names if getattr(usage, name)}
    missing = usage.blocks_total - usage.blocks_free - usage.blocks_cached
    return kept | ({"missing blocks": missing} if missing else {})
