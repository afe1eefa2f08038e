"""Gets models and converts their weights: `python -m tandem_cli.models FOLDER DTYPE QUANTIZATION`.

Importing torch takes two seconds, so this module avoids it if the model is complete on disk. A separate
process converts the weights; its end frees torch's memory.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from tandem_core.errors import ModelLoadError
from tandem_core.model import registry
from tandem_core.model.catalogue import catalogue
from tandem_core.model.json_file import read_object
from tandem_core.model.manifest import ModelManifest

from tandem_cli.options import megabytes

if TYPE_CHECKING:
    from tandem_engine.model_loader import ModelDescription

#: Without a terminal, smaller stages print one line.
_LARGE_BYTES = 50_000_000


def obtain(name_or_path: str) -> Path:
    """The model's folder; pulls a model that is not on this machine. Raises ModelLoadError."""
    folder = registry.find(name_or_path)
    return pull(name_or_path) if folder is None else _up_to_date(folder)


def _up_to_date(folder: Path) -> Path:
    """The folder, after adding what an earlier version did not write."""
    if ModelManifest.read(folder).recommended_sampling is None:
        from tandem_engine.model_loader import complete

        complete(folder)
    return folder


def pull(reference: str) -> Path:
    """The folder of the pulled model; shows progress on stderr. Raises ModelLoadError."""
    if (entry := catalogue().get(reference)) and registry.find(reference) is None:
        print(
            f"{reference}: licence {entry.license} ({entry.license_note})\n"
            f"up to {megabytes(entry.download_bytes)} to download from {entry.source}\n"
            f"{megabytes(entry.disk_bytes)} of disk for the download, and about {megabytes(entry.num_bytes)} "
            "more for the converted weights",
            file=sys.stderr,
        )
    from tandem_engine import model_loader

    with _progress_bars() as progress:
        folder = model_loader.pull(reference, progress)
    with contextlib.suppress(ModelLoadError):  # `tandem model show` reports the error
        described(folder)
    return folder


def described(folder: Path) -> ModelDescription:
    """The description of a model for `tandem model show`, computed once. Raises ModelLoadError."""
    from tandem_engine.model_loader.description import keep, read_kept

    if (kept := read_kept(_up_to_date(folder))) is not None:
        return kept
    from tandem_engine.model_loader import describe  # with torch

    description = describe(folder)
    keep(folder, description)
    return description


def pull_tokenizer(reference: str) -> Path:
    """The folder with the files of a gateway; shows progress on stderr. Raises ModelLoadError."""
    from tandem_engine import model_loader

    with _progress_bars() as progress:
        return model_loader.pull_tokenizer(reference, progress)


def prepare_weights(folder: Path, dtype: str, quantization: str) -> None:
    """Converts the weights once, before the pods start; shows progress. Raises ModelLoadError.

    Each pod verifies existing weights when it loads them.
    """
    note = _note(folder, dtype, quantization)
    if note.is_file() and (folder / note.read_text(encoding="utf-8")).is_file():
        return
    command = [sys.executable, "-P", "-m", "tandem_cli.models", str(folder), dtype, quantization]
    if subprocess.run(command, check=False).returncode != 0:
        raise ModelLoadError(
            f"the weights in {folder} could not be converted to {dtype}; the reason is above"
        )


def check_for_gateways(manifest: ModelManifest, chat_template: Path | None, generation_config: str) -> None:
    """Raises ModelLoadError if gateways would refuse the template or the recommended sampling."""
    if generation_config == "auto":
        _ = manifest.sampling
    if chat_template is not None:
        from tandem_core.model.chat_template import ChatTemplate

        ChatTemplate.check_file(chat_template, manifest.bos_token, manifest.eos_token)


def free_memory(folder: Path, dtype: str, quantization: str) -> int:
    """Bytes of RAM for pods in addition to the mapped weights of `prepare_weights`; at least 1."""
    from tandem_engine.free_memory import available_bytes

    weights = folder / _note(folder, dtype, quantization).read_text(encoding="utf-8")
    return max(1, available_bytes() - weights.stat().st_size)


def note_prepared(folder: Path, dtype: str, quantization: str, file_name: str) -> None:
    """Records the weight file of these options on this machine, which only torch can determine."""
    with contextlib.suppress(OSError):  # a read-only folder is converted already, or fails in the pod
        _note(folder, dtype, quantization).write_text(file_name, encoding="utf-8")


def _note(folder: Path, dtype: str, quantization: str) -> Path:
    return folder / f".prepared-{dtype}-{quantization}"


@contextlib.contextmanager
def _progress_bars() -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar per stage on a terminal, else a line per stage or per tenth of a large stage, on stderr.

    The yielded function takes a stage, its bytes done and its total bytes (0: unknown).
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    tasks: dict[str, TaskID] = {}
    tenths: dict[str, int] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def show(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = progress.add_task(stage, total=None, visible=False)
                if not (console.is_terminal and total):
                    console.print(stage, highlight=False)
            tenth = done * 10 // total if total >= _LARGE_BYTES else 0
            if not console.is_terminal and tenth > tenths.get(stage, 0):
                tenths[stage] = tenth
                console.print(f"{stage}: {megabytes(done)} of {megabytes(total)}", highlight=False)
            progress.update(tasks[stage], completed=done, total=total or None, visible=total > 0)

        yield show


def _convert(folder: Path, dtype: str, quantization: str) -> None:
    import torch
    from tandem_engine.model_loader import ensure_weights
    from tandem_engine.model_loader.loading import pick_numerics
    from tandem_engine.models.executors import Executor, executor_of
    from tandem_kernels import runs_packed

    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        with _progress_bars() as progress:
            path = folder / "config.json"
            if executor_of(read_object(path), path) is Executor.TRANSFORMERS:
                # Each pod reads the checkpoint itself.
                note_prepared(folder, dtype, quantization, path.name)
                return
            wanted = pick_numerics(folder, dtype, quantization, device)
            packed = runs_packed(wanted.dtype, torch.device(device))
            path = ensure_weights(
                folder, wanted.dtype, progress, packed=packed, quantization=wanted.quantization
            )
        note_prepared(folder, dtype, quantization, path.name)
    except ModelLoadError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
