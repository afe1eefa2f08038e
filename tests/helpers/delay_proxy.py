"""A TCP proxy on loopback that delays each direction by a variable time."""

from __future__ import annotations

import asyncio
import contextlib


class DelayProxy:
    """Runs from `start` to `stop`; `delay_s` applies to bytes that arrive after it is set."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.delay_s = 0.0
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        for source, sink in ((reader, inner_writer), (inner_reader, writer)):
            task = asyncio.create_task(self._forward(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps the order of bytes; the delay does not grow with their number."""
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, data = await waiting.get()
                await asyncio.sleep(max(0.0, due - loop.time()))
                writer.write(data)
                await writer.drain()

        sending = asyncio.create_task(send())
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                waiting.put_nowait((loop.time() + self.delay_s, data))
        sending.cancel()
        writer.close()
