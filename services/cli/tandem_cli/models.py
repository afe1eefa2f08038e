"""Gets models and converts their weights for the commands that need them.

Importing torch takes two seconds, so nothing here imports it while the model is already complete on disk.
Conversion runs in a process of its own, whose end frees torch's memory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

from tandem_core.errors import ModelLoadError
from tandem_core.model import registry


def obtain(name_or_path: str) -> Path:
    """The model's folder; pulls the model first when it is not on this machine. Raises ModelLoadError."""
    return registry.find(name_or_path) or pull(name_or_path)


def pull(reference: str) -> Path:
    """The folder of the pulled model; shows progress on stderr. Raises ModelLoadError."""
    from tandem_engine import model_loader

    from tandem_cli.progress import ProgressView

    with ProgressView() as progress:
        return model_loader.pull(reference, progress)


def prepare_weights(folder: Path, dtype: str, quantization: str) -> None:
    """Convert the weights now, once, instead of in the first pod; shows progress. Raises ModelLoadError.

    Weights that exist are not checked: each pod does that when it loads them.
    """
    note = _note(folder, dtype, quantization)
    if note.is_file() and (folder / note.read_text(encoding="utf-8")).is_file():
        return
    command = [sys.executable, "-P", "-m", "tandem_cli.convert", str(folder), dtype, quantization]
    if subprocess.run(command, check=False).returncode != 0:
        raise ModelLoadError(
            f"the weights in {folder} could not be converted to {dtype}; the reason is above"
        )


def note_prepared(folder: Path, dtype: str, quantization: str, file_name: str) -> None:
    """Record which weight file these options mean on this machine, since finding that out takes torch."""
    with contextlib.suppress(OSError):  # a read-only folder is converted already, or fails in the pod
        _note(folder, dtype, quantization).write_text(file_name, encoding="utf-8")


def _note(folder: Path, dtype: str, quantization: str) -> Path:
    return folder / f".prepared-{dtype}-{quantization}"
