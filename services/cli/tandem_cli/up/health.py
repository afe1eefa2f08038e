"""Health probes of processes: grpc.health.v1 of pods, the metrics port of gateways, ping of Redis."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_service.channels import open_channel
from tandem_service.tls import PodTls, Role

from tandem_cli.up import redis_server
from tandem_cli.up.supervisor import Health, ProcessSpec


async def check(
    target: str, timeout_s: float = 1.0, tls: PodTls | None = None, role: Role | None = None
) -> Health:
    """Health of the server at `target`, over a new connection."""
    channel = open_channel(target, tls, role)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        serving = reply.status == health_pb2.HealthCheckResponse.SERVING
        return Health.SERVING if serving else Health.NOT_SERVING
    except (grpc.aio.AioRpcError, TimeoutError):
        return Health.SILENT
    finally:
        await channel.close(None)


async def _check_http(url: str, timeout_s: float = 2.0) -> Health:
    """Health from /livez and /healthz of the metrics port, which has its own thread. A gateway serves once it
    knows a decode pod."""
    import httpx

    try:
        # The URL is http. With verification each client would read all root certificates, 15 ms of CPU.
        async with httpx.AsyncClient(trust_env=False, verify=False, timeout=timeout_s) as client:
            if not (await client.get(f"{url}/livez")).is_success:  # the event loop hangs
                return Health.SILENT
            is_serving = (await client.get(f"{url}/healthz")).is_success
    except httpx.TransportError:
        return Health.SILENT
    return Health.SERVING if is_serving else Health.NOT_SERVING


async def probe(spec: ProcessSpec, tls: PodTls | None = None) -> Health:
    """Health of a supervised process. `tls`: credentials for pods."""
    if spec.health_target.startswith("http://"):
        return await _check_http(spec.health_target)
    if spec.health_target.startswith("unix://"):
        is_there = await redis_server.answers(spec.health_target.removeprefix("unix://"))
        return Health.SERVING if is_there else Health.SILENT
    if tls is None:
        return await check(spec.health_target)
    return await check(spec.health_target, tls=tls, role=Role(spec.role))
