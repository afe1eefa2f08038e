"""Engine state -> protobuf, for both pods."""

from __future__ import annotations

from tandem_engine.loop import EngineLoop
from tandem_proto.v1 import common_pb2


def books_to_proto(loop: EngineLoop) -> common_pb2.Books:
    """The books as they are now; call it on the engine's thread. Runs the audit when nothing is running."""
    scheduler = loop.engine.scheduler
    blocks = loop.engine.blocks.usage()
    requests = scheduler.counts()
    return common_pb2.Books(
        blocks_total=blocks.total,
        blocks_free=blocks.free - blocks.cached,
        blocks_cached=blocks.cached,
        blocks_used=blocks.used,
        requests_waiting=requests.waiting + requests.waiting_for_kv,
        requests_running=requests.running,
        violations=[] if scheduler.has_work() else scheduler.check(),
    )
