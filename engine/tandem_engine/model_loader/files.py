"""Files that several processes may make at once: locks, atomic replacement, digests."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

#: progress(stage, done, total): stage is a word for people, done and total are bytes (total 0: unknown).
OnProgress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Ignores progress."""


#: Linux keeps what comes in writes much larger than a huge page (2 MiB) in such pages, where the file system
#: can, and maps them so. A step of the default model with one token takes 4 % less than with pages of 4 KiB.
_BUFFER = 32 << 20


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the kernel frees it when the holder dies.

    The holder removes the lock file. A process that then gets the lock of the removed file tries again.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(path, file):
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _is_at(path: Path, file: IO[str]) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


@contextmanager
def atomic_write(path: Path) -> Iterator[IO[bytes]]:
    """Write a temporary neighbour; on success it is flushed to disk and renamed to path, else removed.

    The caller holds the folder's lock, so the temporary files of others are those of killed processes.
    """
    for stale in path.parent.glob(".*.tmp"):
        stale.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb", buffering=_BUFFER) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def sha256_of(path: Path, progress: OnProgress = no_progress) -> str:
    """SHA-256 of a file's bytes, in hex."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
            done += len(piece)
            progress("checking", done, total)
    return digest.hexdigest()


def digest_of(files: list[Path], progress: OnProgress = no_progress) -> str:
    """One SHA-256 over the names and digests of all files."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name}\0{sha256_of(file, progress)}\n".encode())
    return digest.hexdigest()
