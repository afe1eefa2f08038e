"""`tandem-gateway`: settings, logs, then the process until a signal."""

from __future__ import annotations

import asyncio
import sys

from tandem_core.errors import ModelLoadError
from tandem_service import logs
from tandem_service.settings import load

from tandem_gateway.auth import KeyFileError
from tandem_gateway.process import GatewayProcess
from tandem_gateway.settings import GatewaySettings


async def _serve(settings: GatewaySettings) -> None:
    process = GatewayProcess(settings)
    await process.start()
    await process.serve_until_signal()


def main() -> None:
    """Exit codes: 0 after a signal, 2 when a setting, the model folder, the keys or a port is wrong."""
    settings = load(GatewaySettings)
    logs.configure(settings, "gateway")
    try:
        asyncio.run(_serve(settings))
    except (ModelLoadError, KeyFileError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
