"""`buf curl` on the gRPC port, and on the HTTP port with the schema from files, without reflection."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BUF = shutil.which("buf", path=str(Path(sys.executable).parent)) or shutil.which("buf")
pytestmark = pytest.mark.skipif(BUF is None, reason="buf is not installed; `make venv` installs buf-bin")
PROTO = Path(__file__).parents[2] / "proto"
#: Which of the system's ports, and with which flags.
WAYS = {
    "connect": ("url", ["--schema", str(PROTO)]),
    "grpc": ("grpc_url", ["--protocol", "grpc"]),
}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "sampling": {"maxTokens": 4, "ignoreEos": True}}


@pytest.fixture(params=WAYS)
def curl(request: pytest.FixtureRequest, system):
    port, flags = WAYS[request.param]

    def run(method: str, message: object, *more: str) -> subprocess.CompletedProcess[str]:
        url = f"{getattr(system, port)}/tandem.v1.GatewayService/{method}"
        command = [str(BUF), "curl", *flags, *more, "-d", json.dumps(message), url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_a_chat_is_streamed(curl):
    done = curl("Chat", CHAT)
    assert done.returncode == 0, done.stderr
    decoder, events, rest = json.JSONDecoder(), [], done.stdout.strip()
    while rest:
        event, end = decoder.raw_decode(rest)
        events.append(event)
        rest = rest[end:].strip()
    assert events[-1]["end"]["receipt"]["outputTokens"] == 4


def test_the_models_are_listed(curl, system):
    done = curl("ListModels", {})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["models"][0]["name"] == system.model


def test_a_wrong_field_is_named(curl):
    done = curl("Chat", {"messages": [], "sampling": {"maxTokens": 4}})
    assert done.returncode == 3 << 3, "the code, INVALID_ARGUMENT"
    assert "messages: is empty" in done.stderr


def test_the_services_of_the_grpc_port_are_listed(system):
    command = [str(BUF), "curl", "--protocol", "grpc", "--list-methods", system.grpc_url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "tandem.v1.GatewayService/Chat" in done.stdout.split()
