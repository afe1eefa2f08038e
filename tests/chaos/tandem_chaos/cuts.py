"""TCP proxies on loopback in front of pods. A cut link is silent, a reset one is closed and refuses.

A proxy finds which pod made a connection by the owner of its local port, so that a link between any two pods
can be cut alone. That is expensive, so it looks only when there is a cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class _Connection:
    #: The caller's port, or its pid if the socket is a unix one.
    origin: tuple[str, int]
    writers: tuple[asyncio.StreamWriter, asyncio.StreamWriter]
    #: Bytes pass while it is set.
    is_open: asyncio.Event = field(default_factory=asyncio.Event)


class Proxy:
    """In front of one pod. `listen`: a port of loopback is chosen, or a unix socket is made."""

    def __init__(self, target: str, pids: Callable[[], Mapping[str, int]]) -> None:
        """`target`: host:port, or the path of a unix socket; `pids`: the pods that may call, by name."""
        self._target = target
        self._pids = pids
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        #: Callers whose links are cut, and whether they are told (reset).
        self._cut: dict[str, bool] = {}
        self.address = ""

    async def listen(self, path: Path | None = None) -> None:
        if path is not None:
            self._server = await asyncio.start_unix_server(self._accept, str(path))
            self.address = str(path)
            return
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def callers(self) -> set[str]:
        """Who has a connection."""
        return {caller for _, caller in self._with_callers()} - {""}

    def _with_callers(self) -> list[tuple[_Connection, str]]:
        names = _Names(self._pids())
        return [(connection, names.of(connection.origin)) for connection in self._connections]

    def cut(self, caller: str, *, reset: bool) -> None:
        self._cut[caller] = reset
        for connection, name in self._with_callers():
            if name != caller:
                continue
            connection.is_open.clear()
            if reset:
                _abort(*connection.writers)

    def heal(self, caller: str) -> None:
        """What was held back passes."""
        self._cut.pop(caller, None)
        for connection, name in self._with_callers():
            if name not in self._cut:
                connection.is_open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        origin = _origin(writer)
        caller = _Names(self._pids()).of(origin) if self._cut else ""
        if self._cut.get(caller):
            _abort(writer)
            return
        try:
            inner_reader, inner_writer = await (
                asyncio.open_unix_connection(self._target)
                if self._target.startswith("/")
                else asyncio.open_connection(*self._target.rsplit(":", 1))
            )
        except OSError:
            _abort(writer)
            return
        connection = _Connection(origin, (writer, inner_writer))
        if caller not in self._cut:
            connection.is_open.set()
        self._connections.add(connection)
        pumps = [
            asyncio.create_task(self._pump(connection, source, sink))
            for source, sink in ((reader, inner_writer), (inner_reader, writer))
        ]
        for task in pumps:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._connections.discard(connection)
            for task in pumps:
                task.cancel()
            _abort(writer, inner_writer)

    async def _pump(
        self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_CHUNK_BYTES):
                await connection.is_open.wait()
                writer.write(data)
                await writer.drain()
            await connection.is_open.wait()


def _origin(writer: asyncio.StreamWriter) -> tuple[str, int]:
    connection = writer.get_extra_info("socket")
    if connection.family == socket.AF_UNIX:
        size = struct.calcsize("3i")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return "pid", struct.unpack("3i", credentials)[0]
    return "port", writer.get_extra_info("peername")[1]


def _abort(*writers: asyncio.StreamWriter) -> None:
    """Closes the connections at once; over TCP the peer gets a reset."""
    for writer in writers:
        connection = writer.get_extra_info("socket")
        if connection.family != socket.AF_UNIX:
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()


class _Names:
    """Which process has which local port, as of now."""

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._by_pid = {pid: name for name, pid in pids.items()}
        by_inode = {inode: name for name, pid in pids.items() for inode in _sockets_of(pid)}
        self._by_port: dict[int, str] = {}
        for table in ("tcp", "tcp6"):  # gRPC connects to IPv4 addresses with IPv6 sockets
            for line in Path("/proc/net", table).read_text().splitlines()[1:]:
                fields = line.split()
                if (name := by_inode.get(fields[9])) is not None:
                    self._by_port[int(fields[1].rpartition(":")[2], 16)] = name

    def of(self, origin: tuple[str, int]) -> str:
        """Empty: none of them."""
        kind, number = origin
        return (self._by_pid if kind == "pid" else self._by_port).get(number, "")


def _sockets_of(pid: int) -> list[str]:
    """Inodes."""
    found = []
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                kind, _, inode = str(descriptor.readlink()).partition("socket:[")
                if not kind:
                    found.append(inode.rstrip("]"))
    return found
