"""A gateway in this process, in front of real pods."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
from tandem_gateway.main import GatewayProcess
from tandem_gateway.settings import GatewaySettings
from tandem_proto.v1 import gateway_pb2_grpc
from waiting import until_async


@asynccontextmanager
async def front_door(
    model: Path,
    decode: tuple[str, ...],
    prefill: tuple[str, ...] = (),
    *,
    waits: bool = True,
    **settings: object,
) -> AsyncIterator[tuple[httpx.AsyncClient, gateway_pb2_grpc.GatewayServiceStub]]:
    """A gateway; with `waits` it sees all pods when it is yielded."""
    process = GatewayProcess(
        GatewaySettings(
            model=model, decode=decode, prefill=prefill, grpc_port=0, http_port=0, poll_interval_s=0.1,
            pod_id="g-0", **settings,
        )
    )  # fmt: skip
    await process.start()
    url = f"http://127.0.0.1:{process.http_port}"
    async with (
        httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False) as http,
        grpc.aio.insecure_channel(f"127.0.0.1:{process.grpc_port}") as channel,
    ):

        async def are_there() -> bool:
            pods = (await http.get("/fleet")).json()["pods"]
            return sum(pod["healthy"] for pod in pods) == len(decode) + len(prefill)

        if waits:
            await until_async(are_there)
        yield http, gateway_pb2_grpc.GatewayServiceStub(channel)
    await process.stop()
