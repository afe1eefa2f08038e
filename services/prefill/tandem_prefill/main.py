"""The prefill pod's process: load the model, listen, serve until a signal, leave the books balanced."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import structlog
from tandem_core.errors import InvalidRequestError
from tandem_engine.assemble import EngineConfig, EngineParts, assemble
from tandem_engine.errors import CapacityError, LayoutMismatchError, TransferError
from tandem_engine.loop import EngineLoop
from tandem_engine.transport.zeromq import ZmqSender
from tandem_pod.books import refreshing
from tandem_proto.v1 import prefill_pb2_grpc
from tandem_service import logs, settings
from tandem_service.priority import step_back
from tandem_service.server import PodServer

from tandem_prefill.kv_streaming import KVStreamer
from tandem_prefill.metrics import PrefillMetrics
from tandem_prefill.servicer import PrefillServicer
from tandem_prefill.settings import PrefillSettings

SERVICE = "tandem.v1.PrefillService"
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    CapacityError: grpc.StatusCode.FAILED_PRECONDITION,
    LayoutMismatchError: grpc.StatusCode.FAILED_PRECONDITION,
    TransferError: grpc.StatusCode.UNAVAILABLE,
}


def main() -> None:
    """Entry point of `tandem-prefill`."""
    pod_settings = settings.load(PrefillSettings)
    logs.configure(pod_settings, "prefill")
    step_back(pod_settings.nice)
    asyncio.run(_serve(pod_settings))


async def _serve(pod: PrefillSettings) -> None:
    async with open_pod(pod) as server:
        await server.serve_until_signal()


@asynccontextmanager
async def open_pod(pod: PrefillSettings) -> AsyncIterator[PodServer]:
    """A pod that serves until the context ends. Raises ModelLoadError, CapacityError, OSError."""
    server = PodServer(pod, role="prefill", service_names=[SERVICE], status_codes=STATUS_CODES)
    parts = await asyncio.to_thread(_assemble, pod)
    streamer = KVStreamer(parts.engine.blocks, parts.layout.num_layers)
    parts.engine.layer_listener = streamer.on_layer_done
    loop = EngineLoop(parts.engine, on_failure=_die)
    sender = ZmqSender(parts.layout, parts.pool)
    metrics = PrefillMetrics(server.registry)
    servicer = PrefillServicer(parts, loop, sender, streamer, metrics, pod.pod_id)
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.grpc_server)  # type: ignore[no-untyped-call]
    loop.start()
    await server.start()
    server.set_serving(True)
    try:
        async with refreshing(servicer.status, metrics.books.show):
            yield server
    finally:
        await server.stop()
        await asyncio.to_thread(loop.close)
        await asyncio.to_thread(sender.close)


def _assemble(pod: PrefillSettings) -> EngineParts:
    return assemble(
        EngineConfig(
            model=pod.model,
            dtype=pod.dtype,
            quantization=pod.quantization,
            deterministic=pod.deterministic,
            device=pod.device,
            threads=pod.threads,
            num_blocks=pod.num_blocks,
            block_size=pod.block_size,
            chunk_size=pod.chunk_size,
            max_batch=pod.max_batch,
            prefix_cache=pod.prefix_cache,
            max_draft_nodes=0,
        )
    )


def _die(error: Exception) -> None:
    """The engine's state may be broken: end the process, so that whoever supervises it starts a clean one."""
    structlog.get_logger("tandem.prefill").critical("the engine failed", exc_info=error)
    os._exit(70)
