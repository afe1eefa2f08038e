"""Commands find the system that runs on this machine, or the one at an address of any form."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from fake_gateway import Answer, FakeGateway
from fake_openai import FakeOpenAI
from tandem_cli import targets
from tandem_cli.main import app
from tandem_cli.up.state_file import FleetRecord, PodRecord, StateFile
from typer.testing import CliRunner

Register = Callable[..., FleetRecord]


@pytest.fixture(scope="module")
def supervisor() -> Iterator[int]:
    """Pid of a process whose command line is one of `tandem up`."""
    program = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", program, "up"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        # Popen returns when exec closes the descriptors, shortly before the kernel shows the command line.
        process.stdout.readline()
        yield process.pid


@pytest.fixture
def register(supervisor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Register:
    """Writes the state file of a system."""
    monkeypatch.setenv("TANDEM_HOME", str(tmp_path))

    def write(grpc_port: int = 7001, **fields: object) -> FleetRecord:
        gateway = PodRecord("gateway", "gateway-0", 1, {"grpc": grpc_port, "http": grpc_port + 1000})
        pods = (gateway, PodRecord("lookahead", "lookahead", 1, {"grpc": grpc_port + 2000}))
        record = replace(FleetRecord(supervisor, f"m{grpc_port}", True, pods), **fields)
        StateFile(tmp_path / "run" / f"{grpc_port}.json").write(record)
        return record

    return write


@pytest.mark.parametrize(
    "address",
    ["", "7001", "127.0.0.1:7001", "localhost:8001", "http://127.0.0.1:8001/v1", "http://localhost:9001/"],
)
def test_each_address_of_a_local_system_selects_the_needed_port(register, address) -> None:
    record = register()
    assert targets.gateway(address, "grpc") == "127.0.0.1:7001"
    assert targets.gateway(address, "http") == "http://127.0.0.1:8001"
    assert targets.fleet_of(address) == record


def test_a_system_with_tls_is_reached_with_tls(register) -> None:
    register(serves_tls=True)
    assert targets.gateway("", "grpc") == "https://127.0.0.1:7001"
    assert targets.gateway("http://127.0.0.1:7001", "http") == "https://127.0.0.1:8001"


def test_other_addresses_stay_as_they_are(register) -> None:
    register()
    assert targets.gateway("gpu1:7001", "grpc") == "gpu1:7001"
    assert targets.gateway("http://gpu1:8001/v1/", "grpc") == "gpu1:8001"
    assert targets.gateway("gpu1:8001", "http") == "http://gpu1:8001"
    assert targets.gateway("https://api.example.com", "grpc") == "https://api.example.com"


def test_a_starting_system_is_reported(register, capsys: pytest.CaptureFixture[str]) -> None:
    register(ready=False)
    with pytest.raises(typer.Exit):
        targets.gateway("", "grpc")
    assert "still starts" in capsys.readouterr().err


def test_without_a_local_system_the_default_ports_are_used(register) -> None:
    assert targets.gateway("", "grpc") == "127.0.0.1:20051"
    assert targets.gateway("", "http") == "http://127.0.0.1:8000"


def test_several_systems_are_listed(register, capsys: pytest.CaptureFixture[str]) -> None:
    register(7001)
    register(7101)
    with pytest.raises(typer.Exit):
        targets.gateway("", "grpc")
    shown = capsys.readouterr().err
    assert "--target 127.0.0.1:7001  m7001" in shown and "--target 127.0.0.1:7101  m7101" in shown


def test_the_state_of_a_killed_supervisor_is_ignored(register, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    register(7101, supervisor_pid=ended.pid)
    register(7201, supervisor_pid=os.getpid())  # now another process's
    (tmp_path / "run" / "7301.json").write_text("{")
    (tmp_path / "run" / "7401.json").write_text(json.dumps({"pods": [], "of": "a later version"}))
    assert targets.running() == {}
    record = register(7001)
    assert list(targets.running().values()) == [record]


@pytest.fixture
def silent(register) -> Iterator[None]:
    """A system here whose ports do not answer."""
    register(1)
    yield


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("chat",), "no gateway answers at 127.0.0.1:1 (Connection refused)"),
        (("bench", "serve", "--rate", "1"), "no gateway answers at 127.0.0.1:1 (Connection refused)"),
        (
            ("bench", "serve", "--rate", "1", "--transport", "http"),
            "no gateway answers at http://127.0.0.1:1001",
        ),
        (("top", "--once"), "no gateway answers at http://127.0.0.1:1001"),
        (("lookahead", "stats"), "no lookahead service answers at 127.0.0.1:2001"),
        (("plan", "--rate", "1", "--measured", "1"), "--measured 1: no gateway answers at 127.0.0.1:1"),
    ],
)
def test_an_unreachable_system_is_reported_first(silent, arguments, words) -> None:
    result = CliRunner().invoke(app, arguments, input="a question that is not asked\n")
    assert result.exit_code in (1, 2)
    assert " ".join(result.output.split()).startswith(f"error: {words}")


def test_the_wrong_port_of_another_machine_is_named(register) -> None:
    with FakeGateway(Answer()).serving() as gateway, FakeOpenAI().serving() as server:
        for arguments in (("top", "--once"), ("bench", "serve", "--rate", "1", "--transport", "http")):
            result = CliRunner().invoke(app, [*arguments, "--target", gateway.target])
            assert "is a gRPC port; give the gateway's HTTP port" in " ".join(result.output.split())
        result = CliRunner().invoke(app, ["chat", "--target", server.url])
        assert "is an HTTP port; give the gateway's gRPC port" in " ".join(result.output.split())


def test_chat_finds_the_local_system(register) -> None:
    with FakeGateway(Answer(("s", "u"))).serving() as gateway:
        register(int(gateway.target.rpartition(":")[2]))
        result = CliRunner().invoke(app, ["chat"], input="hi\n/quit\n")
    assert result.exit_code == 0, result.output
    assert [request.slo_class for request in gateway.requests] == [""]


def test_bench_requests_the_served_model_and_prints_no_table_without_an_answer(register) -> None:
    refused = Answer(failure=(targets.grpc.StatusCode.INTERNAL, "broken"))
    with FakeGateway(refused, model="served").serving() as gateway:
        register(int(gateway.target.rpartition(":")[2]))
        result = CliRunner().invoke(app, ["bench", "serve", "--concurrency", "1", "--num-requests", "2"])
    assert {request.model for request in gateway.requests} == {"served"}
    assert result.exit_code == 1
    assert "TTFT" not in result.stdout
    assert result.stderr == "error: no request succeeded; the first: INTERNAL: broken\n"
