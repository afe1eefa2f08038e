"""Asks a process whether it serves: pods by grpc.health.v1, gateways with TLS by /health, Redis by a ping."""

from __future__ import annotations

import ssl

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_service.channels import open_channel
from tandem_service.tls import PodTls, Role

from tandem_cli import redis_server
from tandem_cli.supervisor import Health, ProcessSpec


async def check(
    target: str, timeout_s: float = 1.0, tls: PodTls | None = None, role: Role | None = None
) -> Health:
    """What the server at `target` answers within the time; a fresh connection each time."""
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


async def _check_https(url: str, timeout_s: float = 1.0) -> Health:
    """Of a gateway with TLS for its callers, whatever its certificate says: the process is our own."""
    import httpx

    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with httpx.AsyncClient(verify=context, trust_env=False, timeout=timeout_s) as client:
            reply = await client.get(url)
    except httpx.TransportError:
        return Health.SILENT
    return Health.SERVING if reply.is_success else Health.NOT_SERVING


async def probe(spec: ProcessSpec, tls: PodTls | None = None) -> Health:
    """What a supervised process answers; `tls`: credentials towards the pods, all but the gateway's."""
    if spec.health_target.startswith("https://"):
        return await _check_https(spec.health_target)
    if spec.health_target.startswith("unix://"):
        is_there = await redis_server.answers(spec.health_target.removeprefix("unix://"))
        return Health.SERVING if is_there else Health.SILENT
    if tls is None or spec.role == Role.GATEWAY:
        return await check(spec.health_target)
    return await check(spec.health_target, tls=tls, role=Role(spec.role))
