"""The Redis servers of `tandem up`: which program runs, what a kill -9 costs, and what stays on disk."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
import redis.asyncio as redis
from redis_servers import RedisServer
from tandem_cli.up import redis_server
from waiting import until, until_async


def program(folder: Path, name: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_server_in_path_is_preferred_to_valkeylites(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert redis_server.find_server().name == "valkey-server"
    assert os.access(redis_server.find_server(), os.X_OK)
    valkey = program(tmp_path / "bin", "valkey-server")
    assert redis_server.find_server() == valkey
    installed = program(tmp_path / "bin", "redis-server")
    assert redis_server.find_server() == installed


async def until_it_answers(socket: str) -> None:
    await until_async(lambda: redis_server.answers(socket))


@pytest.mark.parametrize("folder", ["data", "long" * 30])
async def test_a_killed_server_restarts_within_a_second_with_its_data(tmp_path, folder):
    server = RedisServer(tmp_path / folder)
    socket = server.url.removeprefix("unix://")
    await server.start()
    try:
        await until_it_answers(socket)
        async with redis.Redis.from_url(server.url) as client:
            await client.set("key", "value")
            before = server.pid
            os.kill(before, signal.SIGKILL)
            killed = time.monotonic()
            await until(lambda: server.pid not in (None, before))
            await until_it_answers(socket)
            assert time.monotonic() - killed < 1.0
            assert await client.get("key") == b"value"
    finally:
        await server.stop()
    assert not await redis_server.answers(socket)
    assert not await asyncio.to_thread(os.path.exists, socket)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGTERM])
async def test_the_server_for_answers_leaves_nothing_on_disk(tmp_path, fault):
    secret, folder = b"My passport number is QX7731904", tmp_path / "answers"
    server = RedisServer(folder, is_persistent=False)
    await server.start()
    try:
        await until_it_answers(server.url.removeprefix("unix://"))
        async with redis.Redis.from_url(server.url) as client:
            await client.set("prompt", secret, px=60_000)
            before = server.pid
            os.kill(before, fault)
            await until(lambda: server.pid not in (None, before))
    finally:
        await server.stop()
    assert [path for path in folder.rglob("*") if path.is_file() and secret in path.read_bytes()] == []


async def test_a_servers_files_are_private_also_in_a_folder_of_an_earlier_version(tmp_path):
    folder = tmp_path / "lookahead"
    folder.mkdir(mode=0o755)
    redis_server.make_folders(folder)
    server = RedisServer(folder)
    await server.start()
    try:
        await until_it_answers(server.url.removeprefix("unix://"))
        async with redis.Redis.from_url(server.url) as client:
            await client.set("key", "value")
        found = [folder, *folder.rglob("*")]
        assert any(path.is_file() for path in found)
        assert [path for path in found if path.stat().st_mode & 0o077] == []
    finally:
        await server.stop()
