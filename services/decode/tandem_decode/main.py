"""The decode pod's process: load the model, open the KV ingress, serve until a signal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import structlog
from tandem_core.errors import InvalidRequestError
from tandem_core.speculation import SpeculationMode
from tandem_drafting import native
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.mirror import GlobalMirror
from tandem_engine.assemble import EngineConfig, EngineParts, assemble
from tandem_engine.errors import CapacityError
from tandem_engine.loop import EngineLoop
from tandem_engine.transport.zeromq import ReceiverOptions, ZmqReceiver
from tandem_pod.books import refreshing
from tandem_proto.v1 import common_pb2, decode_pb2_grpc, lookahead_pb2
from tandem_service import logs, settings
from tandem_service.channels import open_channel
from tandem_service.server import PodServer

from tandem_decode.handoff import Handoff
from tandem_decode.learnt import DrafterTables
from tandem_decode.lookahead_client import LookaheadClient
from tandem_decode.metrics import DecodeMetrics
from tandem_decode.prefill_client import PrefillClient
from tandem_decode.servicer import DecodeServicer
from tandem_decode.settings import DecodeSettings
from tandem_decode.sharing import MakeClient, Sharing

SERVICE = "tandem.v1.DecodeService"
STATUS_CODES: dict[type[Exception], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    # Not RESOURCE_EXHAUSTED, which invites to try again here: a pod with more blocks may take it.
    CapacityError: grpc.StatusCode.FAILED_PRECONDITION,
}


def main() -> None:
    """Entry point of `tandem-decode`."""
    pod_settings = settings.load(DecodeSettings)
    logs.configure(pod_settings, "decode")
    asyncio.run(_serve(pod_settings))


async def _serve(pod: DecodeSettings) -> None:
    async with open_pod(pod) as server:
        await server.serve_until_signal()


@asynccontextmanager
async def open_pod(pod: DecodeSettings) -> AsyncIterator[PodServer]:
    """A pod that serves until the context ends. Raises ModelLoadError, CapacityError, OSError."""
    server = PodServer(pod, role="decode", service_names=[SERVICE], status_codes=STATUS_CODES)
    drafter = Drafter(None, DraftPolicy(strategy=SpeculationMode(pod.speculation)))
    parts = await asyncio.to_thread(_assemble, pod, drafter)
    loop = EngineLoop(parts.engine, on_failure=_die)
    receiver = ZmqReceiver(parts.layout, parts.pool, ReceiverOptions(host=pod.kv_host, port=pod.kv_port))
    client = PrefillClient(open_channel)
    metrics = DecodeMetrics(server.registry)
    sharing = Sharing(drafter, _client_maker(pod, parts, drafter, loop), parts.manifest.vocab_size)
    servicer = DecodeServicer(
        pod,
        parts,
        loop,
        receiver,
        Handoff(
            loop,
            receiver,
            client,
            block_bytes=parts.layout.block_bytes,
            vocab_size=parts.manifest.vocab_size,
        ),
        sharing,
        metrics,
    )
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server.grpc_server)  # type: ignore[no-untyped-call]
    sharing.open("default")  # the tenant of callers without a key: warm before its first request

    def show(status: common_pb2.PodStatus) -> None:
        metrics.books.show(status)
        metrics.show_transport(receiver.counters)
        metrics.show_reliability(drafter.reliability())
        metrics.show_lookahead(connected=sharing.connected, dropped_spans=sharing.dropped_spans)

    loop.start()
    await server.start()
    server.set_serving(True)
    try:
        async with refreshing(servicer.status, show):
            yield server
    finally:
        await server.stop()
        await sharing.close()
        await client.close()
        await asyncio.to_thread(loop.close)
        await asyncio.to_thread(receiver.close)


def _assemble(pod: DecodeSettings, drafter: Drafter) -> EngineParts:
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
            max_draft_nodes=pod.draft_nodes,
        ),
        drafter,
    )


def _client_maker(
    pod: DecodeSettings, parts: EngineParts, drafter: Drafter, loop: EngineLoop
) -> MakeClient | None:
    if not pod.lookahead or pod.speculation not in ("chain", "global"):
        return None

    def make(tenant: str, mirror: GlobalMirror) -> LookaheadClient:
        namespace = lookahead_pb2.Namespace(
            tenant=tenant,
            model_revision=parts.manifest.revision,
            tokenizer_hash=parts.manifest.tokenizer_hash,
        )
        tables = None
        if native.LIBRARY is not None:
            tables = DrafterTables(drafter, tenant, lambda work: asyncio.wrap_future(loop.call(work)))
        client = LookaheadClient(pod.lookahead, namespace, pod.pod_id, mirror, tables=tables)
        client.start()
        return client

    return make


def _die(error: Exception) -> None:
    """The engine's state may be broken: end the process, so that whoever supervises it starts a clean one."""
    structlog.get_logger("tandem.decode").critical("the engine failed", exc_info=error)
    os._exit(70)
