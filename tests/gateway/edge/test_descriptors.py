"""A gateway process that may open few files, and more connections than that."""

import asyncio
import json
import resource
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from processes import free_port
from tandem_cli.up import certificates
from tandem_service.tls import Role
from waiting import until_async

NUM_FILES = 128
NUM_CONNECTIONS = [400, pytest.param(2000, marks=pytest.mark.wide)]
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
REQUEST = b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n"

#: What strangers send on their connections, to which port, and whether the ports speak TLS.
KINDS = {
    "idle": (b"", "http", False),
    "half a request": (b"POST /v1/chat/comp", "http", False),
    "unread": (REQUEST * 20, "http", False),
    "no handshake": (b"", "http", True),
    "grpc": (b"", "grpc", False),
}


class LimitedGateway:
    """A process of `tandem-gateway` with a low hard limit of open files."""

    def __init__(self, model: Path, decode: str, keys: Path, log: Path, *flags: str) -> None:
        self.ports = {name: free_port() for name in ("http", "grpc", "metrics")}
        self.log = log
        command = [
            Path(sys.executable).with_name("tandem-gateway"), "--model", model, "--decode", decode,
            "--api-keys-file", keys, "--drain-s", "0",
            *(f"--{name}-port={port}" for name, port in self.ports.items()), *flags,
        ]  # fmt: skip

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (NUM_FILES // 2, NUM_FILES))

        self.process = subprocess.Popen(
            list(map(str, command)), stdout=log.open("wb"), stderr=subprocess.STDOUT, preexec_fn=limit
        )

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)


async def is_true(check: Callable[[], object]) -> bool:
    try:
        return bool(await check())
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("num_connections", NUM_CONNECTIONS)
@pytest.mark.parametrize("kind", KINDS)
async def test_callers_and_probes_are_served_while_strangers_take_all_connections(
    kind, num_connections, pods, model_folder, keys_file, tmp_path
):
    sent, port, with_tls = KINDS[kind]
    flags, scheme, verify = [], "http", ssl.create_default_context()
    if with_tls:
        certificates.prepare(tmp_path)
        files = certificates.issue(tmp_path, Role.GATEWAY)
        flags, scheme = ["--tls-cert", str(files.cert), "--tls-key", str(files.key)], "https"
        verify = ssl.create_default_context(cafile=str(tmp_path / "ca.pem"))
    pod = await pods(words=("a", "b"))
    gateway = LimitedGateway(model_folder, pod.target, keys_file, tmp_path / "log", *flags)
    url = f"{scheme}://127.0.0.1:{gateway.ports['http']}"
    probes = f"http://127.0.0.1:{gateway.ports['metrics']}"
    extensions = {"sni_hostname": Role.GATEWAY.dns_name} if with_tls else {}

    async def is_live() -> bool:
        async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
            return (await client.get(f"{probes}/livez")).status_code == 200

    async def answers() -> bool:
        async with httpx.AsyncClient(verify=verify, trust_env=False, timeout=2.0) as client:
            headers = {"authorization": "Bearer acme-key"}
            answer = await client.post(
                f"{url}/v1/chat/completions", json=CHAT, headers=headers, extensions=extensions
            )
            return answer.status_code == 200 and json.loads(answer.text)["usage"]["completion_tokens"] == 2

    strangers = []

    async def flood() -> None:
        for _ in range(num_connections // 2):
            _, writer = await asyncio.open_connection("127.0.0.1", gateway.ports[port], limit=1024)
            writer.write(sent)
            strangers.append(writer)

    with ExitStack() as stack:
        stack.callback(gateway.stop)
        await until_async(lambda: is_true(answers), limit_s=60.0)
        try:
            for _ in range(2):
                began = time.monotonic()
                await flood()
                assert await is_live()
                assert await answers()
                assert time.monotonic() - began < 20.0
            assert psutil.Process(gateway.process.pid).num_fds() < NUM_FILES
        finally:
            for writer in strangers:
                writer.transport.abort()
    log = gateway.log.read_bytes()
    assert b"raise the limit (ulimit -n)" in log
    assert log.count(b"\n") < 200, "log lines are bounded"
