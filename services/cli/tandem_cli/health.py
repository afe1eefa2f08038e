"""Asks a pod whether it serves, by grpc.health.v1."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_service.channels import open_channel

from tandem_cli.supervisor import ProcessSpec


async def is_serving(target: str, timeout_s: float = 1.0) -> bool:
    """Whether the server at `target` answers SERVING within the time; a fresh connection each time."""
    channel = open_channel(target)
    try:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
    except (grpc.aio.AioRpcError, TimeoutError):
        return False
    finally:
        await channel.close(None)


async def probe(spec: ProcessSpec) -> bool:
    """`is_serving` of a supervised process."""
    return await is_serving(spec.health_target)
