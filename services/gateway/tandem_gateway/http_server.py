"""Runs uvicorn in the process's event loop, without its signal handlers and with a bounded drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp


class _QuietServer(uvicorn.Server):  # type: ignore[misc]  # uvicorn is not followed by mypy
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """PodServer handles the signals and drains both protocols."""
        yield


class HttpServer:
    """`await start()`, then `await stop(grace_s)`."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._app = app
        self._host = host
        self._requested_port = port
        self._server: _QuietServer | None = None
        self._task: asyncio.Task[None] | None = None
        #: Bound port, known after `start`.
        self.port = 0

    async def start(self) -> None:
        """Raises OSError, with the remedy, when the port is taken."""
        try:
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            listener = socket.create_server((self._host, self._requested_port), family=family, backlog=1024)
        except OSError as error:
            raise OSError(
                f"cannot listen on {self._host}:{self._requested_port} ({error.strerror}); choose another "
                "with --http-port or --host"
            ) from error
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self._app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75, ws="none"
        )
        self._server = _QuietServer(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError("the HTTP server ended while it started")
            await asyncio.sleep(0.005)

    async def stop(self, grace_s: float) -> None:
        """Accepts no new connections and closes those that are still open after `grace_s`."""
        if self._server is None or self._task is None:
            return
        self._server.config.timeout_graceful_shutdown = round(grace_s)
        self._server.should_exit = True
        await self._task
