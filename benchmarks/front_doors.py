"""What attacks on the gateway's public ports cost it.

    python benchmarks/front_doors.py --model FOLDER [--gateway PROGRAM] [--out FILE.md]

Starts a gateway (`PROGRAM`: that of another installation) without pods and measures, each on a fresh one: its
memory after six gRPC calls of 8 MiB without a key; the longest time in which it does not answer /metrics
while it gets a chat of 8 MiB, and of as many bytes as the model's context may hold; and how many of 50
half-sent HTTP requests it still holds after 25 s. All traffic is on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx
import psutil
from reporting import markdown_table, write_page
from tandem_service.channels import open_channel

GRPC_PORT, HTTP_PORT = 27650, 27600
KEY = "benchmark"
CHAT = f"http://127.0.0.1:{HTTP_PORT}/v1/chat/completions"
HELD_S = 25.0


@dataclass
class Gateway:
    process: psutil.Process
    client: httpx.AsyncClient


@asynccontextmanager
async def gateway(program: Path, model: Path, folder: Path) -> AsyncIterator[Gateway]:
    keys = folder / "keys.jsonl"
    keys.write_text(json.dumps({"key_sha256": hashlib.sha256(KEY.encode()).hexdigest(), "tenant": "t"}))
    command = [str(program), "--model", str(model), "--decode", "127.0.0.1:1", "--api-keys-file", str(keys),
               "--grpc-port", str(GRPC_PORT), "--http-port", str(HTTP_PORT), "--drain-s", "0",
               "--failover-wait-s", "0"]  # fmt: skip
    started = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        async with httpx.AsyncClient(timeout=120.0, trust_env=False) as client:
            for _ in range(600):
                try:
                    await client.get(f"http://127.0.0.1:{HTTP_PORT}/metrics")
                    break
                except httpx.TransportError:
                    await asyncio.sleep(0.1)
            yield Gateway(psutil.Process(started.pid), client)
    finally:
        started.kill()
        await started.wait()


async def memory_after_calls_without_a_key(running: Gateway) -> str:
    before = running.process.memory_info().rss

    async def call() -> None:
        async with open_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
            # Without functions for messages, these are bytes.
            chat = channel.unary_stream("/tandem.v1.GatewayService/Chat")  # type: ignore[call-arg]
            # 2,000,000 empty messages: four bytes each on the wire, far more when they are parsed.
            payload = b"\x12\x02\x0a\x00" * (2 * 1024 * 1024 - 1000)
            try:
                async for _ in chat(payload):
                    pass
            except grpc.aio.AioRpcError:
                pass

    await asyncio.gather(*(call() for _ in range(6)))
    after = running.process.memory_info().rss
    return f"{before / 1e6:.0f} -> {after / 1e6:.0f} MB"


async def longest_silence(running: Gateway, num_bytes: int) -> str:
    """Of /metrics, while a chat of so many bytes is answered; and the chat's status."""
    body = json.dumps({"messages": [{"role": "user", "content": "0x1f " * (num_bytes // 5)}]}).encode()
    chat = asyncio.create_task(
        running.client.post(CHAT, content=body, headers={"authorization": f"Bearer {KEY}"})
    )
    longest = 0.0
    while not chat.done():
        asked = time.monotonic()
        await running.client.get(f"http://127.0.0.1:{HTTP_PORT}/metrics")
        longest = max(longest, time.monotonic() - asked)
    return f"{longest * 1e3:.0f} ms (status {chat.result().status_code})"


async def half_sent_requests(running: Gateway) -> str:
    opened = []
    for index in range(50):
        reader, writer = await asyncio.open_connection("127.0.0.1", HTTP_PORT)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
        rest = b"authorization: Bearer " + KEY.encode() + b"\r\ncontent-length: 100\r\n\r\n{"
        writer.write(head + (rest if index % 2 else b""))
        opened.append((reader, writer))

    async def is_held(reader: asyncio.StreamReader) -> bool:
        try:
            async with asyncio.timeout(HELD_S):
                await reader.read()  # until the gateway closes
            return False
        except TimeoutError:
            return True

    held = sum(await asyncio.gather(*(is_held(reader) for reader, _ in opened)))
    for _, writer in opened:
        writer.close()
    return f"{held} of 50"


async def run(options: argparse.Namespace) -> None:
    limit = json.loads((options.model / "tandem.json").read_text())["max_model_len"] * 80
    attacks = {
        "memory after six gRPC calls of 8 MiB without a key": memory_after_calls_without_a_key,
        "silence during a chat of 8 MiB": lambda running: longest_silence(running, 8 * 1024 * 1024 - 1000),
        f"silence during a chat of {limit // 1000} kB": lambda running: longest_silence(running, limit),
        f"half-sent requests held after {HELD_S:.0f} s": half_sent_requests,
    }
    rows = []
    for name, attack in attacks.items():
        with tempfile.TemporaryDirectory() as folder:
            async with gateway(options.gateway, options.model, Path(folder)) as running:
                rows.append([name, await attack(running)])
        print(*rows[-1], sep=": ", flush=True)
    if options.out is not None:
        write_page(options.out, "Attacks on the public ports", markdown_table(["attack", "effect"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    default = Path(sys.executable).with_name("tandem-gateway")
    parser.add_argument("--gateway", type=Path, default=default, help="the gateway's program")
    parser.add_argument("--out", type=Path, help="page to write")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
