"""A gRPC server on loopback for a stand-in, with or without an event loop in the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc


@contextmanager
def serving(servicer: object, add_to_server: Callable[[object, grpc.Server], None]) -> Iterator[str]:
    """Answers each call on a thread; yields host:port."""
    server = grpc.server(ThreadPoolExecutor(8))
    add_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
