"""The command: a wrong setting gives one sentence and exit code 2."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest


def _run(*arguments: str) -> str:
    command = Path(sys.executable).with_name("tandem-gateway")
    ended = subprocess.run([command, *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


def test_model_and_decode_pods_are_required(model_folder):
    assert "--model is required" in _run("--decode", "a:1")
    assert "--decode is required" in _run("--model", str(model_folder))


def test_a_missing_model_folder_is_named(tmp_path):
    error = _run("--model", str(tmp_path / "none"), "--decode", "a:1")
    assert "none is not a model folder" in error
    assert "tandem model pull" in error


def test_a_chat_template_that_cannot_be_used_is_named_with_its_line(model_folder, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}\n{{ m.content }")
    error = _run("--model", str(model_folder), "--decode", "a:1", "--chat-template", str(path))
    assert f"{path}: line 2: " in error


def test_a_missing_keys_file_is_named(model_folder, tmp_path):
    missing = str(tmp_path / "keys")
    arguments = ("--model", str(model_folder), "--decode", "a:1", "--api-keys-file", missing)
    assert missing in _run(*arguments)


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_taken_port_is_named_with_the_remedy(flag, model_folder):
    other = "--grpc-port" if flag == "--http-port" else "--http-port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ("--model", str(model_folder), "--decode", "127.0.0.1:1", other, "0", flag, port)
        error = _run(*arguments)
    assert port in error
    assert "choose another" in error
