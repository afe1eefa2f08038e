"""Checks whether a process serves: pods by grpc.health.v1, Redis by a ping."""

from __future__ import annotations

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_service.channels import open_channel

from tandem_cli import redis_server
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
    """Whether a supervised process serves."""
    if spec.health_target.startswith("unix://"):
        return await redis_server.answers(spec.health_target.removeprefix("unix://"))
    return await is_serving(spec.health_target)
