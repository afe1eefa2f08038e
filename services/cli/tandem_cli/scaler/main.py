"""The process of `tandem scaler`."""

from __future__ import annotations

import asyncio
import signal

import structlog
from kubernetes.aio import client
from tandem_service.discovery import Discovery
from tandem_service.kubernetes_watch import load_config, own_namespace
from tandem_service.metrics import MetricsServer, new_registry
from tandem_service.tasks import end_tasks

from tandem_cli.scaler.controller import Controller, ScalerMetrics
from tandem_cli.scaler.lease import Leadership
from tandem_cli.scaler.settings import ScalerSettings
from tandem_cli.scaler.workloads import Workload, parse_workload


async def serve(options: ScalerSettings) -> None:
    """Runs until SIGTERM or SIGINT. Raises OSError if the metrics port is taken, ConfigException without a
    cluster."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    async with client.ApiClient(await load_config()) as api:
        namespace = options.namespace or own_namespace()
        leadership = Leadership(api, namespace, options.lease, options.pod_id, lease_s=options.lease_s)
        registry = new_registry()
        discoveries = {
            "gateway": Discovery(options.gateways),
            "prefill": Discovery(options.prefill),
            "decode": Discovery(options.decode),
        }
        controller = Controller(
            discoveries,
            {
                "prefill": Workload(api, namespace, parse_workload(options.prefill_workload)),
                "decode": Workload(api, namespace, parse_workload(options.decode_workload)),
            },
            leadership,
            options.policy(),
            ScalerMetrics(registry),
            dry_run=options.dry_run,
        )
        server = None
        if options.metrics_port is not None:
            server = MetricsServer(
                registry, options.host, options.metrics_port, is_ready=lambda: True, is_serving=lambda: True
            )
        log = structlog.get_logger("tandem.scaler")
        log.info("scaler runs", namespace=namespace, metrics_port=server.port if server else None)
        tasks: list[asyncio.Task[None]] = []
        try:
            for discovery in discoveries.values():
                await discovery.start(lambda: None)
            tasks = [
                asyncio.create_task(leadership.run(), name="lease"),
                asyncio.create_task(controller.run(options.interval_s), name="scaler"),
            ]
            await stop.wait()
        finally:
            # The loop ends before the lease is released, so that two scalers never decide.
            await end_tasks(tasks[1:])
            await end_tasks(tasks[:1])
            for discovery in discoveries.values():
                await discovery.close()
            if server is not None:
                await asyncio.to_thread(server.close)
