"""`buf curl` on both ports: on gRPC by reflection, on HTTP with the schema from files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from harness import MODEL, URL, feature

BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
GRPC_URL = os.environ["TANDEM_GRPC_URL"]
PROTO = Path(__file__).parents[3] / "proto"
CHAT = {"messages": [{"role": "user", "content": "hi"}], "sampling": {"maxTokens": 4, "ignoreEos": True}}


def curl(flags: list[str], url: str, message: object) -> subprocess.CompletedProcess[str]:
    command = [str(BUF), "curl", *flags, "-d", json.dumps(message), url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def check(flags: list[str], port: str) -> None:
    """A stream, an answer and a refusal."""
    service = f"{port}/tandem.v1.GatewayService"
    done = curl(flags, f"{service}/Chat", CHAT)
    decoder, events, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        event, end = decoder.raw_decode(rest)
        events.append(event)
        rest = rest[end:].strip()
    assert events, done.stderr
    assert events[-1]["end"]["receipt"]["outputTokens"] == 4
    done = curl(flags, f"{service}/ListModels", {})
    assert json.loads(done.stdout)["models"][0]["name"] == MODEL
    done = curl(flags, f"{service}/Chat", {"messages": [], "sampling": {"maxTokens": 4}})
    assert done.returncode == 3 << 3, "the code, INVALID_ARGUMENT"
    assert "messages: is empty" in done.stderr


@feature("gRPC")
def _() -> None:
    check(["--protocol", "grpc"], GRPC_URL)


@feature("Connect")
def _() -> None:
    check(["--schema", str(PROTO)], URL)


@feature("list methods")
def _() -> None:
    command = [str(BUF), "curl", "--protocol", "grpc", "--list-methods", GRPC_URL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "tandem.v1.GatewayService/Chat" in done.stdout.split()
