"""The prefill pod's process: load the model, listen, serve until a signal."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
from tandem_core.errors import TransferError
from tandem_engine.assemble import assemble
from tandem_engine.loop import EngineLoop
from tandem_engine.transport.zeromq import SenderOptions, ZmqSender
from tandem_pod import step_costs
from tandem_pod.serving import STATUS_CODES, exit_process, run, running, serving
from tandem_pod.status import PodGauges
from tandem_proto.v1 import prefill_pb2_grpc
from tandem_service import logs, settings
from tandem_service.priority import change_nice
from tandem_service.server import PodServer
from tandem_service.tls import Role, is_loopback

from tandem_prefill.kv_streaming import KVStreamer
from tandem_prefill.metrics import PrefillMetrics
from tandem_prefill.servicer import PrefillServicer
from tandem_prefill.settings import PrefillSettings

SERVICE = "tandem.v1.PrefillService"

CALLERS = {"Prefill": (Role.DECODE,), "GetPrefillStatus": (Role.GATEWAY, Role.OPERATOR)}


def main() -> None:
    """Entry point of `tandem-prefill`."""
    pod = settings.load(PrefillSettings)
    logs.configure(pod, "prefill")
    change_nice(pod.nice)
    run(open_pod(pod))


@asynccontextmanager
async def open_pod(pod: PrefillSettings) -> AsyncIterator[PodServer]:
    """A pod that serves until the context ends. Raises ModelLoadError, CapacityError, OSError."""
    # Not UNAVAILABLE, which is a lost connection to the decode pod: it counts the pod as crashed.
    codes = {**STATUS_CODES, TransferError: grpc.StatusCode.ABORTED}
    server = PodServer(pod, role="prefill", service_names=[SERVICE], status_codes=codes, callers=CALLERS)
    parts = await asyncio.to_thread(assemble, pod.engine_config(max_draft_nodes=0, decodes=False))
    await asyncio.to_thread(step_costs.measure, parts.engine, decodes=False, shares_cores=pod.shares_cores)
    streamer = KVStreamer(parts.engine.blocks, parts.layout.groups)
    loop = EngineLoop(parts.engine, on_failure=exit_process)
    sender = ZmqSender(parts.layout, parts.store, SenderOptions(num_connections=parts.pool.num_connections))
    metrics = PrefillMetrics(server.registry)
    gauges = PodGauges(server.registry)
    gauges.watch_copies(parts.pool.copy_counts)
    # In plaintext off loopback (--insecure) a proxy may hide the caller's address, and nothing proves it.
    servicer = PrefillServicer(
        parts,
        loop,
        sender,
        streamer,
        metrics,
        server.tracing,
        pod.pod_id,
        only_to_caller=pod.pod_tls_cert is not None or is_loopback(pod.host),
    )
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(servicer, server.grpc_server)  # type: ignore[no-untyped-call]
    async with (
        running(loop, sender),
        serving(server, servicer.status, gauges.show, loop, counts_work=parts.is_compiled),
    ):
        yield server
