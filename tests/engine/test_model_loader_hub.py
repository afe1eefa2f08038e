"""A private hub on loopback, named by HF_ENDPOINT, that wants HF_TOKEN; and no hub at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from tandem_core.model.manifest import ModelManifest
from toy_models import save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

COMMIT, TOKEN, NAME = "0123456789abcdef0123456789abcdef01234567", "hf_secret", "acme/tiny"


class Hub(ThreadingHTTPServer):
    """Serves the files of one repository to those who send the token."""

    def __init__(self, files: Path) -> None:
        self.files = files
        #: The answer to everything, instead.
        self.body: bytes | None = None
        super().__init__(("127.0.0.1", 0), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        files, path = self.server.files, self.path.partition("?")[0]
        if self.server.body is not None:
            self._send(200, self.server.body)
        elif self.headers.get("authorization") != f"Bearer {TOKEN}":
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif path.startswith(f"/api/models/{NAME}/tree/"):
            listed = [
                {"type": "file", "path": p.name, "size": p.stat().st_size, "oid": "ab"}
                for p in files.iterdir()
            ]
            self._send(200, json.dumps(listed).encode())
        elif path.startswith(f"/api/models/{NAME}"):
            siblings = [{"rfilename": p.name} for p in files.iterdir()]
            self._send(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        elif path.startswith(f"/{NAME}/resolve/") and (file := files / path.rpartition("/")[2]).is_file():
            content = file.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()}"'
            self._send(200, content, {"ETag": etag, "X-Repo-Commit": COMMIT})
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    do_HEAD = do_GET  # noqa: N815  # http.server's name

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Prints nothing."""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Hub]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    save_checkpoint(LlamaForCausalLM(config), tmp_path / "files")
    (tmp_path / "files/generation_config.json").write_text('{"eos_token_id": [2, 7], "temperature": 0.6}')
    with Hub(tmp_path / "files") as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        with contextlib.suppress(OSError):
            server.shutdown()


def pull(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`tandem model pull` in a process of its own, since the hub's client reads its variables once."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    clean |= {"TANDEM_HOME": str(tmp_path / "tandem"), "HF_HOME": str(tmp_path / "hf"), **environment}
    command = [str(Path(sys.executable).with_name("tandem")), "model", "pull", NAME]
    return subprocess.run(command, env=clean, capture_output=True, text=True, timeout=120, check=False)


def test_a_private_hub_needs_its_token_and_afterwards_no_network(hub: Hub, tmp_path: Path) -> None:
    refused = pull(tmp_path, HF_ENDPOINT=hub.url)
    assert refused.returncode == 1
    (error,) = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert hub.url in error and "401" in error and "HF_TOKEN" in error

    pulled = pull(tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert pulled.returncode == 0, pulled.stderr
    folder = tmp_path / "tandem/models/acme--tiny"
    manifest = ModelManifest.read(folder)
    assert (manifest.source, manifest.eos_token_ids) == (f"hub:{NAME}@{COMMIT}", (2, 7))
    assert manifest.sampling == {"temperature": 0.6}
    assert Path(manifest.weights).is_relative_to(tmp_path / "hf"), "the hub's own cache holds the weights"

    hub.shutdown()
    hub.server_close()
    (folder / "tandem.json").unlink()
    again = pull(tmp_path, HF_HUB_OFFLINE="1", HF_ENDPOINT=hub.url)
    assert again.returncode == 0, again.stderr
    assert ModelManifest.read(folder) == manifest


@pytest.mark.parametrize("body", [b"<html>", b'{"error": "x"}', b"[]"])
def test_a_server_that_is_not_a_hub_gives_a_one_sentence_error(hub: Hub, tmp_path: Path, body: bytes) -> None:
    hub.body = body
    refused = pull(tmp_path, HF_ENDPOINT=hub.url)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert f"could not be downloaded from the Hugging Face hub at {hub.url}" in refused.stderr
