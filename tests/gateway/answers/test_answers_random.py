"""Random cuts, and a Redis that fails at random: every client gets each token of its answer once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest
import redis.asyncio as redis
from redis_servers import RedisServer, answers
from tandem_gateway.answers import answer_store
from tandem_gateway.answers.answer_store import AnswerStore, StoreError
from tandem_proto.v1 import gateway_pb2

WORDS = tuple(f" w{index}" for index in range(12))
REQUEST = gateway_pb2.ChatRequest(messages=[gateway_pb2.ChatMessage(role="user", content="hi")])


def make_unreliable(monkeypatch: pytest.MonkeyPatch, rng: random.Random) -> None:
    """Loses calls to Redis or their replies, or delays them."""
    reach = AnswerStore.connection

    @asynccontextmanager
    async def unreliable(store: AnswerStore):
        if rng.random() < 0.15:
            raise StoreError("lost on its way")
        if rng.random() < 0.3:
            await asyncio.sleep(rng.uniform(0.0, 0.1))
        async with reach(store) as client:
            yield client
        if rng.random() < 0.15:
            raise StoreError("no reply")

    monkeypatch.setattr(AnswerStore, "connection", unreliable)
    monkeypatch.setattr(answer_store, "LEASE_MS", 3000)  # a heartbeat may be lost too


async def ask(fronts: tuple, rng: random.Random, num_events: list[int]) -> None:
    """One answer, with cuts. It begins anew if no gateway has kept it."""
    event_id, token_ids = "", []
    while True:
        front = rng.choice(fronts)
        request = gateway_pb2.ChatRequest(last_event_id=event_id) if event_id else REQUEST
        num_wanted = rng.choice((1, 2, 5, 100))
        call = front.grpc.Chat(request, timeout=60)
        try:
            async for response in call:
                if response.HasField("end"):
                    assert token_ids == list(range(10, 10 + len(WORDS)))
                    return
                assert response.chunk.event_id, "a chunk that cannot be resumed"
                event_id = response.chunk.event_id
                token_ids += response.chunk.token_ids
                num_events.append(1)
                num_wanted -= 1
                if not num_wanted:
                    call.cancel()
                    break
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                event_id, token_ids = "", []
            else:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error.details()
        await asyncio.sleep(rng.uniform(0.0, 0.15))


async def run(
    pods: Callable, gateway: Callable, monkeypatch: pytest.MonkeyPatch, folder: Path, seed: int, number: int
) -> None:
    rng = random.Random(seed)
    server = RedisServer(folder)
    await server.start()
    async with redis.Redis.from_url(server.url) as client:
        await answers(client)
        make_unreliable(monkeypatch, rng)
        pod = await pods(words=WORDS, pause_s=0.02)
        fronts = await gateway(pod, redis_url=server.url), await gateway(pod, redis_url=server.url)
        num_events: list[int] = []

        async def one() -> None:
            for _ in range(number):
                await ask(fronts, rng, num_events)

        async def disturb() -> None:
            while True:
                await asyncio.sleep(rng.uniform(0.1, 0.5))
                if rng.random() < 0.3:
                    await client.flushall()
                # Under calls that use the connections.
                await client.client_kill_filter(_type="normal", skipme=True)

        disturbing = asyncio.create_task(disturb())
        async with asyncio.timeout(number * 20):
            await asyncio.gather(*(one() for _ in range(6)))
        disturbing.cancel()
        assert len(num_events) >= 6 * number * len(WORDS)
    await server.stop()


async def test_each_token_is_sent_once_when_redis_fails(pods, gateway, monkeypatch, tmp_path):
    await run(pods, gateway, monkeypatch, tmp_path / "redis", seed=0, number=3)


@pytest.mark.wide
@pytest.mark.parametrize("seed", range(1, 9))
async def test_each_token_is_sent_once_in_many_runs(pods, gateway, monkeypatch, tmp_path, seed):
    await run(pods, gateway, monkeypatch, tmp_path / "redis", seed, number=30)
