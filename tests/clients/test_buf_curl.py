"""`buf curl` over reflection, against the gRPC port, with no schema at hand."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
pytestmark = pytest.mark.skipif(BUF is None, reason="buf is not installed; `make venv` installs buf-bin")


def curl(target: str, method: str, message: object) -> subprocess.CompletedProcess[str]:
    url = f"http://{target}/tandem.v1.GatewayService/{method}"
    # The address is h2c: without TLS, buf asks for the protocol to be named.
    command = [
        str(BUF),
        "curl",
        "--protocol",
        "grpc",
        "--http2-prior-knowledge",
        url,
        "-d",
        json.dumps(message),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_chat_is_streamed(system):
    message = {
        "messages": [{"role": "user", "content": "hi"}],
        "sampling": {"maxTokens": 4, "ignoreEos": True},
    }
    done = curl(system.grpc_target, "Chat", message)
    assert done.returncode == 0, done.stderr
    decoder, events, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        event, end = decoder.raw_decode(rest)
        events.append(event)
        rest = rest[end:].strip()
    assert events[-1]["end"]["receipt"]["outputTokens"] == 4


def test_a_wrong_field_is_named(system):
    done = curl(system.grpc_target, "Chat", {"messages": [], "sampling": {"maxTokens": 4}})
    assert done.returncode != 0
    assert "messages: is empty" in done.stderr
