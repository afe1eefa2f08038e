"""kube-proxy for one Service: a new connection goes to one of the ready pods, open ones stay."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Sequence


class ServiceProxy:
    def __init__(self, address: str, ports: Sequence[int], pods: Callable[[], list[str]]) -> None:
        """`pods` gives the addresses of the ready pods."""
        self.address = address
        self._ports = ports
        self._pods = pods
        self._turns = itertools.count()
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        for port in self._ports:

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
            ) -> None:
                await self._connect(reader, writer, port)

            self._servers.append(await asyncio.start_server(serve, self.address, port))

    def close(self) -> None:
        for server in self._servers:
            server.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        pods = self._pods()
        if pods:
            pod = pods[next(self._turns) % len(pods)]
            await pipe(reader, writer, asyncio.open_connection(pod, port))
        writer.close()


async def pipe(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    connecting: Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]],
) -> None:
    """Copies both ways until both ends are closed."""
    with contextlib.suppress(OSError):
        upstream, downstream = await connecting
        await asyncio.gather(_copy(reader, downstream), _copy(upstream, writer))
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while piece := await reader.read(65_536):
            writer.write(piece)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()
