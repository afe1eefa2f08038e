"""A real service in this process and a real Redis server, stopped at the end of each test."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
from redis_servers import RedisServer
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror
from tandem_lookahead.main import LookaheadPod
from tandem_lookahead.settings import LookaheadSettings
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from waiting import until

NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")


class RunningService:
    """A lookahead pod and the task that runs it."""

    def __init__(self, pod: LookaheadPod, redis: RedisServer | None) -> None:
        self.pod = pod
        #: The server that the fleet started for it.
        self.redis = redis
        self._running: asyncio.Task[None] | None = None

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.pod.server.port}"

    async def start(self) -> None:
        await self.pod.start()
        self._running = asyncio.create_task(self.pod.run())

    async def stop(self) -> None:
        if self._running is not None:
            self.pod.server.request_stop()
            await self._running
            self._running = None
        await self.pod.close()


def kill_redis(process: RedisServer) -> int:
    """kill -9 by pid; returns the pid that is gone."""
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    return pid


class Fleet:
    """Starts services and pods, and stops all of them at the end of the test."""

    until = staticmethod(until)
    kill_redis = staticmethod(kill_redis)

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._services: list[RunningService] = []
        self._clients: list[LookaheadClient] = []
        self._redis: list[RedisServer] = []
        self._default_redis: RedisServer | None = None

    async def redis(self) -> RedisServer:
        process = RedisServer(self._folder / f"redis{len(self._redis)}")
        self._redis.append(process)
        await process.start()
        return process

    async def service(
        self,
        *,
        port: int = 0,
        redis_url: str = "",
        expect_redis: bool = True,
        min_requests: int = 1,
        **options: object,
    ) -> RunningService:
        """By default services use one Redis server, and text is shared at once."""
        if not redis_url and self._default_redis is None:
            self._default_redis = await self.redis()
        settings = LookaheadSettings(
            port=port,
            redis_url=redis_url or self._default_redis.url,
            drain_s=2.0,
            min_requests=min_requests,
            pod_id=f"la{len(self._services)}",
            **options,
        )
        service = RunningService(LookaheadPod(settings), None if redis_url else self._default_redis)
        self._services.append(service)
        await service.start()
        if expect_redis:
            registry = service.pod.server.registry
            await until(lambda: registry.get_sample_value("tandem_lookahead_redis_connected") == 1)
        return service

    async def pod(self, service: RunningService, **options: object) -> tuple[LookaheadClient, GlobalMirror]:
        """A connected decode pod's client and its mirror."""
        return await self.pod_at(service.target, **options)

    async def pod_at(
        self,
        target: str,
        *,
        namespace: pb.Namespace = NAMESPACE,
        mirror: GlobalMirror | None = None,
        on_purge: Callable[[], Awaitable[None]] | None = None,
    ) -> tuple[LookaheadClient, GlobalMirror]:
        """The same for a service in another process."""
        mirror = mirror or GlobalMirror()
        client = LookaheadClient(target, namespace, f"pod{len(self._clients)}", mirror, on_purge=on_purge)
        self._clients.append(client)
        client.start()
        await until(lambda: client.connected)
        return client, mirror

    @asynccontextmanager
    async def stream(
        self, service: RunningService, *messages: pb.SyncRequest
    ) -> AsyncIterator[grpc.aio.StreamStreamCall]:
        """A call of Sync that sends these messages and stays open."""

        async def requests() -> AsyncIterator[pb.SyncRequest]:
            for message in messages:
                yield message
            await asyncio.Event().wait()

        async with grpc.aio.insecure_channel(service.target) as channel:
            yield lookahead_pb2_grpc.LookaheadServiceStub(channel).Sync(requests())

    async def stop(self) -> None:
        for client in self._clients:
            await client.close()
        for service in self._services:
            await service.stop()
        for process in self._redis:
            await process.stop()


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    fleet = Fleet(tmp_path)
    yield fleet
    await fleet.stop()
