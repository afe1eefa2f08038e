"""The model store as the command line uses it, importing torch only when there is work to do.

`tandem_engine.store` imports torch, two seconds that each start would wait; what is already on disk
is found here without it. Conversion runs in a process of its own, so that its memory goes back.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

_MANIFEST = "tandem.json"


class ModelError(Exception):
    """A model cannot be had; one sentence with the remedy."""


def home() -> Path:
    """Tandem's folder in the user's cache, as `tandem_core.model.registry.cache_root` finds it."""
    if chosen := os.environ.get("TANDEM_HOME"):
        return Path(chosen).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "tandem"
    return Path.home() / ".cache" / "tandem"


def find(name_or_path: str) -> Path | None:
    """The folder of a model on this machine, as model.registry.resolve finds it; None: not here."""
    path = Path(name_or_path).expanduser()
    if (path / _MANIFEST).is_file():
        return path.resolve()
    stored = home() / "models" / name_or_path.replace("/", "--")
    return stored if (stored / _MANIFEST).is_file() else None


def obtain(name_or_path: str) -> Path:
    """The model's folder; pulled first, with progress on stderr, when it is not here. Raises ModelError."""
    folder = find(name_or_path)
    return folder if folder is not None else pull(name_or_path)


def pull(reference: str) -> Path:
    """The folder of the pulled model. Raises ModelError."""
    from tandem_core.errors import ModelLoadError
    from tandem_engine import store

    from tandem_cli.progress import ProgressView

    try:
        with ProgressView() as progress:
            return store.pull(reference, progress)
    except ModelLoadError as error:
        raise ModelError(str(error)) from error


def name_of(folder: Path) -> str:
    """The model's name in requests. Raises ModelError for a damaged manifest."""
    try:
        return str(json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))["name"])
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{folder / _MANIFEST} cannot be read ({error}); pull the model again") from error


def prepare_weights(folder: Path, dtype: str, quantization: str) -> None:
    """Convert the weights now, once, instead of in the first pod; shows progress. Raises ModelError.

    Weights that are there are not checked: each pod does that when it loads them.
    """
    note = _note(folder, dtype, quantization)
    if note.is_file() and (folder / note.read_text(encoding="utf-8")).is_file():
        return
    command = [sys.executable, "-P", "-m", "tandem_cli.convert", str(folder), dtype, quantization]
    if subprocess.run(command, check=False).returncode != 0:
        raise ModelError(f"the weights in {folder} could not be converted to {dtype}; the reason is above")


def note_prepared(folder: Path, dtype: str, quantization: str, file_name: str) -> None:
    """Remembers which file these options led to on this machine: finding that out takes torch."""
    with contextlib.suppress(OSError):  # a read-only folder is converted already, or fails in the pod
        _note(folder, dtype, quantization).write_text(file_name, encoding="utf-8")


def _note(folder: Path, dtype: str, quantization: str) -> Path:
    return folder / f".prepared-{dtype}-{quantization}"
