"""The command: a wrong setting is one sentence and exit code 2."""

import socket
import sys

import pytest
from tandem_gateway.main import main


def _run(monkeypatch: pytest.MonkeyPatch, capsys, *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["tandem-gateway", *arguments])
    monkeypatch.setattr("tandem_service.logs.configure", lambda settings, role: None)
    with pytest.raises(SystemExit) as info:
        main()
    assert info.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    return errors[0]


def test_model_and_decode_pods_are_required(monkeypatch, capsys, model_folder):
    assert "--model is required" in _run(monkeypatch, capsys, "--decode", "a:1")
    assert "--decode is required" in _run(monkeypatch, capsys, "--model", str(model_folder))


def test_a_missing_model_folder_is_named(monkeypatch, capsys, tmp_path):
    error = _run(monkeypatch, capsys, "--model", str(tmp_path / "none"), "--decode", "a:1")
    assert "none is not a model folder" in error
    assert "tandem model pull" in error


def test_a_missing_keys_file_is_named(monkeypatch, capsys, model_folder, tmp_path):
    missing = str(tmp_path / "keys")
    arguments = ("--model", str(model_folder), "--decode", "a:1", "--api-keys-file", missing)
    assert missing in _run(monkeypatch, capsys, *arguments)


@pytest.mark.parametrize("flag", ["--http-port", "--grpc-port"])
def test_a_taken_port_is_named_with_the_remedy(flag, monkeypatch, capsys, model_folder):
    other = "--grpc-port" if flag == "--http-port" else "--http-port"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        arguments = ("--model", str(model_folder), "--decode", "127.0.0.1:1", other, "0", flag, port)
        error = _run(monkeypatch, capsys, *arguments)
    assert port in error
    assert "choose another" in error
