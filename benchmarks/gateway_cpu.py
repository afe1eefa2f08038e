"""What a request costs the gateway: CPU time of its process per refusal, per answer and per token.

    python benchmarks/gateway_cpu.py [--rounds 3] [--venv FOLDER] [--out FILE.md]

Starts `tandem up` (`--venv`: of another installation) and sends chats of about 260 prompt tokens over gRPC
and HTTP: with a strict objective that nothing can meet, so that they are refused, alone and 16 at once; with
answers of one token; and with longer ones, whose further tokens give the cost of a token. What the gateway
uses without requests is subtracted. All traffic is on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from pathlib import Path

import grpc
import httpx
import psutil
from peers import Server, say, tandem_peer
from reporting import markdown_table, write_page
from tandem_cli.bench.dataset import sample_dialogues, sample_policy
from tandem_core.model import registry
from tandem_engine import model_loader
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_channel
from timing_probe import wait_until_ready

NUM_REFUSED, NUM_ANSWERS, NUM_TOKENS = 160, 16, 32
IDLE_S = 4.0
HEADERS = {"x-slo-ttft-ms": "1", "x-slo-strict": "true"}
NOTES = """CPU time of the gateway's process without what it uses when idle: the median of the rounds, with
the least and the most. Each token is an event of its own (speculation is off). The client and the pods share
the cores, so caches are colder than in a gateway that has the machine to itself."""

#: Sends one chat with this number; of an answer, so many tokens; None: it must be refused.
Chat = Callable[[int, int | None], Awaitable[None]]


def texts(number: int) -> tuple[str, str]:
    """System prompt and question, about 260 tokens."""
    dialogues = sample_dialogues()
    question = dialogues[number % len(dialogues)].as_text()[:350]
    return sample_policy()[:700], f"{number} hello, I would like to return order {number * 7}. {question}"


def over_grpc(channel: grpc.aio.Channel) -> Chat:
    stub = gateway_pb2_grpc.GatewayServiceStub(channel)

    async def chat(number: int, num_tokens: int | None) -> None:
        system, user = texts(number)
        request = gateway_pb2.ChatRequest(
            messages=[
                gateway_pb2.ChatMessage(role=role, content=text)
                for role, text in (("system", system), ("user", user))
            ],
            sampling=common_pb2.SamplingParams(max_tokens=num_tokens or 48, ignore_eos=True),
            slo_class="chat" if num_tokens is None else "batch",
            slo=common_pb2.SloTarget(ttft_ns=1_000_000, strict=True) if num_tokens is None else None,
        )
        try:
            async for _ in stub.Chat(request):
                pass
        except grpc.aio.AioRpcError as error:
            if num_tokens is not None or error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise
        else:
            assert num_tokens is not None, "not refused"

    return chat


def over_http(client: httpx.AsyncClient) -> Chat:
    async def chat(number: int, num_tokens: int | None) -> None:
        system, user = texts(number)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        slo_class = "chat" if num_tokens is None else "batch"
        body = {"messages": messages, "max_tokens": num_tokens or 48, "ignore_eos": True, "stream": True,
                "slo_class": slo_class}  # fmt: skip
        headers = HEADERS if num_tokens is None else {}
        answer = await client.post("/v1/chat/completions", json=body, headers=headers)
        assert answer.status_code == (httpx.codes.TOO_MANY_REQUESTS if num_tokens is None else httpx.codes.OK)

    return chat


async def cpu_ms(gateway: psutil.Process, idle: float, chats: list[Awaitable[None]], at_once: int) -> float:
    """Of one chat. `idle`: the share of a core that the gateway uses without any."""
    began, before = time.monotonic(), sum(gateway.cpu_times()[:2])
    for start in range(0, len(chats), at_once):
        await asyncio.gather(*chats[start : start + at_once])
    used_s = sum(gateway.cpu_times()[:2]) - before - idle * (time.monotonic() - began)
    return used_s / len(chats) * 1e3


async def measure(url: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by what they are spent for, one figure a round."""
    port = httpx.URL(url).port
    assert port is not None
    (pid,) = {
        connection.pid
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
    }
    gateway = psutil.Process(pid)
    figures: defaultdict[str, list[float]] = defaultdict(list)
    numbers = itertools.count()
    async with (
        httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as client,
        open_channel(f"127.0.0.1:{port + 1}") as channel,
    ):
        doors = {"gRPC": over_grpc(channel), "HTTP": over_http(client)}
        for chat in doors.values():  # the pods learn what their steps cost
            await chat(next(numbers), 20)
            await asyncio.gather(*(chat(next(numbers), None) for _ in range(20)))
        for _ in range(rounds):
            before = sum(gateway.cpu_times()[:2])
            await asyncio.sleep(IDLE_S)
            idle = (sum(gateway.cpu_times()[:2]) - before) / IDLE_S
            figures["idle, a second"].append(idle * 1e3)
            for name, chat in doors.items():

                def some(count: int, num_tokens: int | None, chat: Chat = chat) -> list[Awaitable[None]]:
                    return [chat(next(numbers), num_tokens) for _ in range(count)]

                for at_once in (1, 16):
                    ms = await cpu_ms(gateway, idle, some(NUM_REFUSED, None), at_once)
                    figures[f"{name}, refused, {at_once} at once"].append(ms)
                short = await cpu_ms(gateway, idle, some(NUM_ANSWERS, 1), 4)
                long = await cpu_ms(gateway, idle, some(NUM_ANSWERS, NUM_TOKENS), 4)
                figures[f"{name}, answer of one token"].append(short)
                figures[f"{name}, each further token"].append((long - short) / (NUM_TOKENS - 1))
            say(", ".join(f"{name} {found[-1]:.2f}" for name, found in figures.items()))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=registry.DEFAULT_MODEL)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--venv", type=Path, default=Path(sys.prefix), help="of the Tandem to measure")
    parser.add_argument("--out", type=Path, help="page to write")
    options = parser.parse_args()
    model = model_loader.pull(options.model)
    server = Server(tandem_peer("gateway CPU", model, "--speculation off", options.venv))
    try:
        wait_until_ready(server.url)
        figures = asyncio.run(measure(server.url, options.rounds))
    finally:
        server.close()
    rows = [
        [name, f"{statistics.median(found):.2f}", f"{min(found):.2f} to {max(found):.2f}"]
        for name, found in figures.items()
    ]
    table = markdown_table(["", "CPU ms", "least to most"], rows)
    print(table)
    if options.out is not None:
        write_page(options.out, "What requests cost the gateway", table, NOTES)


if __name__ == "__main__":
    main()
