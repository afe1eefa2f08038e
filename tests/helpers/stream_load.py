"""Clients that stream answers over gRPC through any gateway and resume cut streams. The answers are compared
with those of an undisturbed system. For tests that replace pods during streams."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc
from tandem_cli.bench.dataset import sample_dialogues
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_public_channel

ANSWER_LIMIT_S = 300.0

#: The gateways' targets at this time.
Gateways: TypeAlias = Callable[[], Sequence[str]]


@dataclass
class Answer:
    tokens: tuple[int, ...] = ()
    num_resumes: int = 0
    longest_gap_s: float = 0.0
    failure: str = ""


def request(index: int, least_tokens: int) -> gateway_pb2.ChatRequest:
    texts = [dialogue.as_text() for dialogue in sample_dialogues()]
    text = texts[index % len(texts)][: 400 + 300 * (index % 5)]
    sampling = common_pb2.SamplingParams(
        max_tokens=least_tokens + 20 * (index % 4), temperature=0.7 * (index % 2), seed=index, ignore_eos=True
    )
    message = gateway_pb2.ChatMessage(role="user", content=f"{index}: {text}")
    return gateway_pb2.ChatRequest(messages=[message], sampling=sampling, slo_class="batch")


async def ask(gateways: Gateways, index: int, rng: random.Random, least_tokens: int = 80) -> Answer:
    """One answer, resumed through any gateway until it is complete."""
    answer, event_id, tokens = Answer(), "", []
    key = f"{index}-{rng.random()}"
    give_up_at = time.monotonic() + ANSWER_LIMIT_S
    last_at: float | None = None
    while True:
        async with open_public_channel(rng.choice(gateways())) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)
            message = request(index, least_tokens)
            message.idempotency_key = key
            if event_id:
                message = gateway_pb2.ChatRequest(last_event_id=event_id)
            try:
                async for response in stub.Chat(message):
                    now = time.monotonic()
                    if last_at is not None:
                        answer.longest_gap_s = max(answer.longest_gap_s, now - last_at)
                    last_at = now
                    event_id = response.chunk.event_id or response.end.event_id
                    tokens += response.chunk.token_ids
                    if response.HasField("end"):
                        answer.tokens = tuple(tokens)
                        return answer
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > give_up_at:
                    answer.failure = f"{error.code().name}: {error.details()}"
                    return answer
        answer.num_resumes += 1
        await asyncio.sleep(0.1)


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    gaps_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    is_over: bool = False


async def load(
    gateways: Gateways,
    expected: Sequence[Answer],
    tally: Tally,
    rng: random.Random,
    least_tokens: int = 80,
) -> None:
    while not tally.is_over:
        index = rng.randrange(len(expected))
        answer = await ask(gateways, index, rng, least_tokens)
        tally.counts["answers"] += 1
        tally.counts["resumed"] += answer.num_resumes
        tally.gaps_s.append(answer.longest_gap_s)
        if answer.failure:
            tally.failures.append(answer.failure)
        elif answer.tokens != expected[index].tokens:
            tally.counts["changed"] += 1
