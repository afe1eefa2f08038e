"""Streams are cut again and again, and gateways killed: a client gets its whole answer, each token once."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
import toy_models
from waiting import until_async

if TYPE_CHECKING:
    from conftest import RunningFleet

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(3600)]

NUM_PROMPTS, NUM_CLIENTS, KILL_EVERY_S = 12, 6, 4.0
#: A client gives up when no gateway has answered for so long.
LIMIT_S = 60.0


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    #: From the end of one connection to the first event of the next, by whether a gateway had died.
    gaps_s: dict[str, list[float]] = field(default_factory=lambda: {"cut": [], "gateway killed": []})


@dataclass
class Received:
    text: str = ""
    num_tokens: int = 0
    last_id: str = ""
    is_done: bool = False
    completion_tokens: int = 0


def body(index: int) -> dict[str, object]:
    """Greedy and sampled, with penalties and log probabilities: the state that a resumed answer needs."""
    rng = random.Random(index)
    return {
        "prompt": [rng.randrange(10, toy_models.VOCABULARY) for _ in range(20 + 40 * index)],
        "stream": True,
        "slo_class": "batch",
        "stream_options": {"include_usage": True},
        "logprobs": 1,
        "max_tokens": 60 + 10 * index,
        "ignore_eos": True,
        "temperature": 0.8 * (index % 2),
        "frequency_penalty": 0.5 * (index % 3),
        "seed": index,
    }


async def read(response: httpx.Response, received: Received, stop_after: int) -> None:
    """Reads at most so many events."""
    event_id = ""
    async for line in response.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        if name != "data":
            continue
        if value == "[DONE]":
            received.is_done = True
            return
        event = json.loads(value)
        if "error" in event:
            raise httpx.RemoteProtocolError(event["error"]["message"])
        received.last_id = event_id or received.last_id
        event_id = ""
        for choice in event["choices"]:
            received.text += choice["text"]
            received.num_tokens += len((choice["logprobs"] or {"tokens": ()})["tokens"])
        if event.get("usage"):
            received.completion_tokens = event["usage"]["completion_tokens"]
        stop_after -= 1
        if not stop_after:
            return


async def whole_answer(urls: list[str], index: int, rng: random.Random, tally: Tally, key: str) -> Received:
    """One request, cut up to three times by the client, each part through any gateway."""
    received = Received()
    cuts_left = rng.randrange(4)
    cause, cut_at, give_up_at = "", 0.0, time.monotonic() + LIMIT_S
    async with httpx.AsyncClient(timeout=30.0, trust_env=False) as client:
        while not received.is_done:
            headers = {"last-event-id": received.last_id} if received.last_id else {"x-event-ids": "true"}
            if key and not received.last_id:
                headers["idempotency-key"] = key
            request = None if received.last_id else body(index)
            stop_after = rng.randrange(1, 8) if cuts_left else 0
            url = rng.choice(urls)
            num_before = received.num_tokens
            try:
                async with client.stream("POST", url, json=request, headers=headers) as response:
                    if response.status_code == 503:
                        raise httpx.ConnectError(f"503: {await response.aread()!r}")
                    assert response.status_code == 200, (await response.aread(), received)
                    if cause:
                        tally.counts[f"resumed after: {cause}"] += 1
                    started = time.monotonic()
                    await read(response, received, stop_after)
                if cause and cut_at:
                    tally.gaps_s[cause].append(started - cut_at)
                cause, cut_at = "cut", time.monotonic()
                cuts_left -= 1
            except httpx.TransportError:
                if cause != "gateway killed" or received.num_tokens > num_before:
                    cause, cut_at = "gateway killed", time.monotonic()
                tally.counts["connections lost"] += 1
                assert time.monotonic() < give_up_at, f"no gateway has answered for {LIMIT_S} s"
                await asyncio.sleep(0.05)
            if received.num_tokens > num_before:
                give_up_at = time.monotonic() + LIMIT_S
    return received


async def resume_streams(fleet: RunningFleet, num_streams: int, seed: int) -> Tally:
    rng = random.Random(seed)
    tally = Tally()
    urls = [
        f"http://127.0.0.1:{pod.ports['http']}/v1/completions"
        for pod in fleet.state.pods
        if pod.role == "gateway"
    ]
    uncut = [await whole_answer(urls, index, _Uncut(), Tally(), "") for index in range(NUM_PROMPTS)]
    assert all(answer.num_tokens == answer.completion_tokens for answer in uncut)
    queue = list(range(num_streams))

    async def client() -> None:
        while queue:
            number = queue.pop()
            index = number % NUM_PROMPTS
            key = f"{seed}-{number}" if number % 2 else ""
            answer = await whole_answer(urls, index, rng, tally, key)
            assert answer.text == uncut[index].text, (number, answer)
            assert answer.num_tokens == answer.completion_tokens == uncut[index].num_tokens, (number, answer)
            tally.counts["streams"] += 1

    async def killer() -> None:
        while True:
            await asyncio.sleep(rng.uniform(0.5, 1.0) * KILL_EVERY_S)
            pids = fleet.state.pids("gateway")
            if len(pids) < len(urls):  # the other one is still down: a client needs one
                continue
            healthy = [await _is_healthy(url) for url in urls]
            if not all(healthy):
                continue
            os.kill(rng.choice(pids), signal.SIGKILL)
            tally.counts["gateways killed"] += 1

    killing = asyncio.create_task(killer())
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(client())
    finally:
        killing.cancel()

    async def are_back() -> bool:
        return all([await _is_healthy(url) for url in urls])

    await until_async(are_back, limit_s=60.0)
    return tally


class _Uncut(random.Random):
    def randrange(self, *args: int) -> int:  # type: ignore[override]
        return 0


async def _is_healthy(url: str) -> bool:
    try:
        async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
            return (await client.get(url.removesuffix("/v1/completions") + "/health")).status_code == 200
    except httpx.TransportError:
        return False


def report(tally: Tally) -> str:
    lines = [f"{name}: {count}" for name, count in sorted(tally.counts.items())]
    for cause, gaps in tally.gaps_s.items():
        ordered = sorted(gaps)
        if ordered:
            p50, p99 = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)]
            lines.append(f"gap, {cause}: p50 {p50 * 1e3:.0f} ms, p99 {p99 * 1e3:.0f} ms ({len(ordered)})")
    return "\n".join(lines)


@pytest.mark.parametrize("num_streams", [24, pytest.param(2000, marks=pytest.mark.wide)])
def test_cut_streams_are_resumed_through_two_gateways(
    start_fleet, tiny_model: Path, tmp_path: Path, num_streams: int
) -> None:
    with start_fleet(tiny_model, tmp_path, "--gateways", "2", "--prefill", "0") as fleet:
        tally = asyncio.run(resume_streams(fleet, num_streams, seed=num_streams))
        print(report(tally))
        assert tally.counts["streams"] == num_streams
        assert tally.counts["resumed after: cut"] > num_streams / 2
        fleet.assert_idle(within_s=20.0)
