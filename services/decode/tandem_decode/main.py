"""The decode pod's process: load the model, open the KV ingress, serve until a signal."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tandem_core.speculation import SpeculationMode
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror
from tandem_engine.assemble import EngineParts, assemble
from tandem_engine.loop import EngineLoop
from tandem_engine.transport.zeromq import ReceiverOptions, SenderOptions, ZmqReceiver, ZmqSender
from tandem_pod import step_costs
from tandem_pod.serving import STATUS_CODES, exit_process, run, running, serving
from tandem_prefill.kv_streaming import KVStreamer
from tandem_prefill.main import SERVICE as PREFILL_SERVICE
from tandem_prefill.metrics import PrefillMetrics
from tandem_prefill.servicer import PrefillServicer
from tandem_proto.v1 import common_pb2, decode_pb2_grpc, lookahead_pb2, prefill_pb2_grpc
from tandem_service import logs, settings
from tandem_service.channels import open_channel
from tandem_service.server import PodServer
from tandem_service.tls import PodTls, Role, is_loopback

from tandem_decode.handoff import Handoff
from tandem_decode.lookahead_sync import LookaheadSync, MakeClient
from tandem_decode.metrics import DecodeMetrics
from tandem_decode.prefill_client import PrefillClient
from tandem_decode.servicer import DecodeServicer
from tandem_decode.settings import DecodeSettings

SERVICE = "tandem.v1.DecodeService"

CALLERS = {
    "Decode": (Role.GATEWAY,),
    "GetDecodeStatus": (Role.GATEWAY, Role.OPERATOR),
    "Prefill": (Role.DECODE,),
}


def main() -> None:
    """Entry point of `tandem-decode`."""
    pod = settings.load(DecodeSettings)
    logs.configure(pod, "decode")
    run(open_pod(pod))


@asynccontextmanager
async def open_pod(pod: DecodeSettings) -> AsyncIterator[PodServer]:
    """A pod that serves until the context ends. Raises ModelLoadError, CapacityError, OSError."""
    server = PodServer(
        pod,
        role="decode",
        service_names=[SERVICE, PREFILL_SERVICE],
        status_codes=STATUS_CODES,
        callers=CALLERS,
    )
    tls = pod.pod_tls()
    drafter = Drafter(None, DraftPolicy(mode=SpeculationMode(pod.speculation)))
    parts = await asyncio.to_thread(assemble, pod.engine_config(max_draft_nodes=pod.draft_nodes), drafter)
    await asyncio.to_thread(step_costs.measure, parts.engine, decodes=True, shares_cores=pod.shares_cores)
    loop = EngineLoop(parts.engine, on_failure=exit_process)
    receiver = ZmqReceiver(
        parts.layout,
        parts.store,
        ReceiverOptions(host=pod.kv_host, port=pod.kv_port, num_connections=parts.pool.num_connections),
    )
    client = PrefillClient(functools.partial(open_channel, tls=tls, role=Role.PREFILL))
    peers = PrefillClient(functools.partial(open_channel, tls=tls, role=Role.DECODE))
    sender = ZmqSender(parts.layout, parts.store, SenderOptions(num_connections=parts.pool.num_connections))
    prefill = PrefillServicer(
        parts,
        loop,
        sender,
        KVStreamer(parts.engine.blocks, parts.layout.groups),
        PrefillMetrics(server.registry),
        server.tracing,
        pod.pod_id,
        only_to_caller=tls is not None or is_loopback(pod.host),
    )
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prefill, server.grpc_server)  # type: ignore[no-untyped-call]
    metrics = DecodeMetrics(server.registry)
    metrics.pod.watch_copies(parts.pool.copy_counts)
    lookahead = LookaheadSync(
        drafter,
        _client_maker(pod, parts, drafter, loop, tls),
        parts.manifest.vocab_size,
        loop.call_async,
        pod.max_tenants,
        pod.shared_text_bytes,
    )
    handoff = Handoff(
        loop,
        receiver,
        client,
        peers,
        vocab_size=parts.manifest.vocab_size,
    )
    servicer = DecodeServicer(
        pod,
        parts,
        loop,
        receiver,
        handoff,
        lookahead,
        metrics,
        prefill,
        sender,
        server.tracing,
    )
    server.hand_over = servicer.hand_over
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server.grpc_server)  # type: ignore[no-untyped-call]
    lookahead.open("default")  # the tenant of callers without a key, connected before its first request

    def show(status: common_pb2.PodStatus) -> None:
        metrics.pod.show(status)
        metrics.show_handoffs(handoff.counts())
        metrics.show_dropped_frames(receiver.dropped_frames)
        metrics.show_reliability(drafter.reliability())
        metrics.show_lookahead(connected=lookahead.connected, dropped_spans=lookahead.dropped_spans)

    async with running(loop, receiver, sender):
        try:
            async with serving(server, servicer.status, show, loop, counts_work=parts.is_compiled):
                yield server
        finally:
            await lookahead.close()
            await client.close()
            await peers.close()


def _client_maker(
    pod: DecodeSettings, parts: EngineParts, drafter: Drafter, loop: EngineLoop, tls: PodTls | None
) -> MakeClient | None:
    if not pod.lookahead or not SpeculationMode(pod.speculation).uses_shared_text:
        return None

    def make(tenant: str, mirror: GlobalMirror) -> LookaheadClient:
        namespace = lookahead_pb2.Namespace(
            tenant=tenant,
            model_revision=parts.manifest.revision,
            tokenizer_hash=parts.manifest.tokenizer_hash,
        )

        async def on_purge() -> None:
            await loop.call_async(lambda: drafter.forget_tenant(tenant))

        client = LookaheadClient(pod.lookahead, namespace, pod.pod_id, mirror, on_purge=on_purge, tls=tls)
        client.start()
        return client

    return make
