"""Links that fall silent, and links that are reset."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tandem_chaos.cuts import Proxy


@asynccontextmanager
async def echo_behind_a_proxy(path: Path | None = None) -> AsyncIterator[Proxy]:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            writer.write(data)
        writer.close()

    if path is None:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        target = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(echo, str(path / "echo"))
        target = str(path / "echo")
    proxy = Proxy(target, lambda: {"me": os.getpid()})
    await proxy.listen(path and path / "proxy")
    try:
        yield proxy
    finally:
        await proxy.close()
        server.close()


async def connect(proxy: Proxy) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if proxy.address.startswith("/"):
        return await asyncio.open_unix_connection(proxy.address)
    return await asyncio.open_connection(*proxy.address.rsplit(":", 1))


@pytest.mark.parametrize("is_unix", [False, True])
async def test_a_cut_link_holds_bytes_back_until_it_is_healed(tmp_path: Path, is_unix: bool) -> None:
    async with echo_behind_a_proxy(tmp_path if is_unix else None) as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"a")
        assert await reader.readexactly(1) == b"a"
        assert proxy.callers() == {"me"}
        proxy.cut("me", reset=False)
        writer.write(b"b")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await reader.readexactly(1)
        proxy.cut("another", reset=True)  # concerns nobody here
        proxy.heal("me")
        assert await reader.readexactly(1) == b"b"
        writer.close()


@pytest.mark.parametrize("is_unix", [False, True])
async def test_a_reset_link_ends_and_refuses(tmp_path: Path, is_unix: bool) -> None:
    async with echo_behind_a_proxy(tmp_path if is_unix else None) as proxy:
        reader, writer = await connect(proxy)
        writer.write(b"a")
        await reader.readexactly(1)
        proxy.cut("me", reset=True)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        late, writer = await connect(proxy)
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await late.readexactly(1)
        proxy.heal("me")
        reader, writer = await connect(proxy)
        writer.write(b"c")
        assert await reader.readexactly(1) == b"c"
        writer.close()
