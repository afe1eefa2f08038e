"""Redis servers for tests: one on a unix socket, a cluster, and a TLS port in front of a socket."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import redis.asyncio as redis
from processes import free_port
from tandem_cli.up import health, redis_server
from tandem_cli.up.supervisor import ProcessSpec, Supervisor
from waiting import until_async


class RedisServer:
    """A server of `tandem up`, kept running by its supervisor."""

    def __init__(self, folder: Path, *, is_persistent: bool = True) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.url = f"unix://{redis_server.socket_path(folder)}"
        command = redis_server.command(folder, is_persistent=is_persistent)
        spec = ProcessSpec("redis", "redis", command, ports={}, health_target=self.url)
        self._supervisor = Supervisor(
            [[spec]],
            probe=health.probe,
            on_line=lambda *_: None,
            on_event=lambda *_: None,
            on_change=lambda: None,
        )

    @property
    def pid(self) -> int | None:
        (child,) = self._supervisor.children
        return child.pid

    async def start(self) -> None:
        """Returns at once."""
        self._supervisor.start()

    async def stop(self) -> None:
        await self._supervisor.stop()


async def answers(client: redis.Redis) -> None:
    """Waits until a server that was just started answers."""

    async def is_up() -> bool:
        try:
            await client.ping()
        except (redis.ConnectionError, redis.BusyLoadingError):
            return False
        return True

    await until_async(is_up)


@contextlib.asynccontextmanager
async def cluster(folder: Path, num_nodes: int = 3) -> AsyncIterator[list[str]]:
    """Servers on loopback that divide the slots among them; yields their URLs."""
    binary = redis_server.find_server()
    ports = [(free_port(), free_port()) for _ in range(num_nodes)]
    nodes = []
    try:
        for port, bus in ports:
            home = folder / str(port)
            home.mkdir()
            nodes.append(
                await asyncio.create_subprocess_exec(
                    *(str(binary), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(home)),
                    *("--cluster-enabled", "yes", "--cluster-port", str(bus), "--save", ""),
                    stdout=asyncio.subprocess.DEVNULL,
                    stderr=asyncio.subprocess.DEVNULL,
                )
            )
        await _join(ports)
        yield [f"redis://127.0.0.1:{port}" for port, _ in ports]
    finally:
        for node in nodes:
            if node.returncode is None:
                node.kill()
            await node.wait()


async def _join(ports: list[tuple[int, int]]) -> None:
    """Joins the servers, as `redis-cli --cluster create` does."""
    clients = [redis.Redis(port=port) for port, _ in ports]
    bounds = [16384 * at // len(ports) for at in range(len(ports) + 1)]
    for client, first, last in zip(clients, bounds, bounds[1:], strict=False):
        await answers(client)
        await client.execute_command("CLUSTER ADDSLOTS", *range(first, last))
    for client in clients[1:]:
        await client.execute_command("CLUSTER MEET", "127.0.0.1", *ports[0])
    for client in clients:

        async def knows_all(client: redis.Redis = client) -> bool:
            info = await client.execute_command("CLUSTER INFO")
            return "ok" in str(info["cluster_state"]) and int(info["cluster_known_nodes"]) == len(ports)

        await until_async(knows_all, limit_s=20)
        await client.aclose()


@contextlib.asynccontextmanager
async def tls_door(socket_path: str, context: ssl.SSLContext) -> AsyncIterator[int]:
    """A port on loopback that speaks TLS and leads to a server's unix socket."""
    inside: set[asyncio.Task[None]] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def enter(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_unix_connection(socket_path)
        for pair in ((reader, inner_writer), (inner_reader, writer)):
            inside.add(asyncio.create_task(pump(*pair)))

    server = await asyncio.start_server(enter, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in inside:
            task.cancel()
