"""Redis stopped, full, slow, emptied: nothing is lost, nothing stuck."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import redis.asyncio as redis
from delay_proxy import DelayProxy
from processes import free_port
from redis_servers import answers
from tandem_cli.up.redis_server import find_server
from waiting import pause_async


class Talk:
    """Two pods, one on each replica, which both say something now and then; a third one listens to each."""

    def __init__(self, fleet, one, two) -> None:
        self._fleet, self._services = fleet, (one, two)
        self._said = 0

    async def start(self) -> None:
        self.speakers = [(await self._fleet.pod(service))[0] for service in self._services]
        self.mirrors = [(await self._fleet.pod(service))[1] for service in self._services]

    def say(self) -> None:
        for speaker in self.speakers:
            speaker.push(f"r{self._said}", 0, range(10 * self._said, 10 * self._said + 10))
            self._said += 1

    async def all_is_heard(self) -> None:
        await self._fleet.until(
            lambda: all(mirror.num_tokens == 10 * self._said for mirror in self.mirrors), limit_s=20
        )

    async def go_on(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.1)):
            self.say()
            await pause_async(0.1)


@pytest.fixture
async def process(fleet):
    return await fleet.redis()


async def talk_over(fleet, url: str) -> Talk:
    talk = Talk(fleet, *[await fleet.service(redis_url=url) for _ in range(2)])
    await talk.start()
    talk.say()
    await talk.all_is_heard()
    return talk


async def test_redis_is_stopped_and_goes_on(fleet, process):
    talk = await talk_over(fleet, process.url)
    os.kill(process.pid, signal.SIGSTOP)
    try:
        await talk.go_on(3.0)
        # Each replica goes on with its own pods.
        own = [mirror.num_tokens for mirror in talk.mirrors]
        assert all(tokens > 20 for tokens in own)
    finally:
        os.kill(process.pid, signal.SIGCONT)
    await talk.all_is_heard()


async def test_redis_is_killed_and_restarted(fleet, process):
    talk = await talk_over(fleet, process.url)
    fleet.kill_redis(process)  # its supervisor starts another
    await talk.go_on(0.5)
    await talk.all_is_heard()


async def test_redis_is_emptied(fleet, process):
    talk = await talk_over(fleet, process.url)
    async with redis.Redis.from_url(process.url) as client:
        await client.flushall()
    await talk.go_on(0.5)
    await talk.all_is_heard()


async def test_redis_is_full_for_a_while(fleet, process):
    talk = await talk_over(fleet, process.url)
    async with redis.Redis.from_url(process.url) as client:
        await client.config_set("maxmemory", "1mb")
        await talk.go_on(0.5)
        await client.config_set("maxmemory", "0")
    await talk.all_is_heard()


async def test_redis_is_far_away(fleet, tmp_path):
    port = free_port()
    command = (str(find_server()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path))
    quiet = asyncio.subprocess.DEVNULL
    child = await asyncio.create_subprocess_exec(*command, "--save", "", stdout=quiet, stderr=quiet)
    proxy = DelayProxy(port)
    await proxy.start()
    try:
        async with redis.Redis(port=port) as client:
            await answers(client)
        talk = await talk_over(fleet, f"redis://127.0.0.1:{proxy.port}")
        proxy.delay_s = 0.1  # 200 ms there and back
        await talk.go_on(0.5)
        await talk.all_is_heard()
        await fleet.stop()
    finally:
        await proxy.stop()
        child.kill()
        await child.wait()


async def test_one_replica_ends_and_its_pods_find_it_again(fleet, process):
    one, two = [await fleet.service(redis_url=process.url) for _ in range(2)]
    talk = Talk(fleet, one, two)
    await talk.start()
    talk.say()
    await talk.all_is_heard()
    port = one.pod.server.port
    await one.stop()
    await talk.go_on(0.5)
    await fleet.service(redis_url=process.url, port=port)
    await talk.all_is_heard()
