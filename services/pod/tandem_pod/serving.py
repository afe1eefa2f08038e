"""The life of a process around an engine: start the engine's thread, serve until a signal, stop in reverse
order."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import structlog
from tandem_core.errors import (
    CapacityError,
    InvalidRequestError,
    LayoutMismatchError,
    LogitsError,
    ModelLoadError,
    TransferError,
)
from tandem_engine.loop import EngineLoop
from tandem_engine.transport.incoming import KVReceiver
from tandem_engine.transport.outgoing import KVSender
from tandem_proto.v1 import common_pb2
from tandem_service.server import PodServer
from tandem_service.tasks import end_tasks

from tandem_pod.engine_watch import EngineWatch
from tandem_pod.status import refreshing_gauges

STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    # Not RESOURCE_EXHAUSTED, after which callers retry the same pod: a pod with more blocks may take the
    # request.
    CapacityError: grpc.StatusCode.FAILED_PRECONDITION,
    LayoutMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    LogitsError: grpc.StatusCode.INTERNAL,
    TransferError: grpc.StatusCode.UNAVAILABLE,
}


def run(pod: AbstractAsyncContextManager[PodServer]) -> None:
    """Runs `serve`; settings that do not fit the model or this machine end the process with one sentence."""
    try:
        asyncio.run(serve(pod))
    except (ModelLoadError, CapacityError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error


async def serve(pod: AbstractAsyncContextManager[PodServer]) -> None:
    """Runs a pod until SIGTERM or SIGINT."""
    async with pod as server:
        await server.serve_until_signal()


def exit_process(error: Exception) -> None:
    """For `EngineLoop.on_failure`: the engine's state may be broken, so the supervisor must start a new
    process."""
    structlog.get_logger("tandem.engine").critical("the engine failed", exc_info=error)
    os._exit(70)


@asynccontextmanager
async def running(loop: EngineLoop, *transports: KVReceiver | KVSender) -> AsyncIterator[None]:
    """The engine's thread runs until the context ends; then the transports are closed, too."""
    loop.start()
    try:
        yield
    finally:
        await asyncio.to_thread(loop.close)
        for transport in transports:
            await asyncio.to_thread(transport.close)


@asynccontextmanager
async def serving(
    server: PodServer,
    status: Callable[[], common_pb2.PodStatus],
    show: Callable[[common_pb2.PodStatus], None],
    loop: EngineLoop,
    *,
    counts_work: bool,
) -> AsyncIterator[None]:
    """The server answers calls and `show` updates the gauges until the context ends; then the server
    drains. The process ends when the engine's thread hangs (see `EngineWatch`)."""

    def on_change(is_stuck: bool) -> None:
        server.set_serving(not is_stuck and not server.draining.is_set())

    watch = EngineWatch(loop, counts_work=counts_work, on_change=on_change, on_hang=exit_process)
    await server.start()
    server.set_serving(True)
    watching = asyncio.create_task(watch.run(), name="engine-watch")
    try:
        async with refreshing_gauges(status, show):
            yield
    finally:
        await server.stop()
        await end_tasks([watching])
        await server.tracing.close()
