"""Real pods behind a gateway, all in this process, and a client of its HTTP port."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from pod_fleet import Fleet, run_fleet
from tandem_gateway.main import GatewayProcess
from tandem_gateway.settings import GatewaySettings
from waiting import until_async


@asynccontextmanager
async def served(tiny_model: Path, **options: object) -> AsyncIterator[tuple[Fleet, httpx.AsyncClient]]:
    """Both pods and their gateway."""
    async with run_fleet(tiny_model, **options) as fleet:
        process = GatewayProcess(
            GatewaySettings(
                model=tiny_model,
                decode=(fleet.decode_target,),
                prefill=(fleet.prefill_target,),
                grpc_port=0,
                http_port=0,
                drain_s=0.0,
                poll_interval_s=0.1,
            )
        )
        await process.start()
        url = f"http://127.0.0.1:{process.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=30.0, trust_env=False) as client:

            async def is_healthy() -> bool:
                pods = (await client.get("/fleet")).json()["pods"]
                return [pod["healthy"] for pod in pods] == [True, True]

            await until_async(is_healthy)
            yield fleet, client
        await process.stop()
        await fleet.assert_idle()
