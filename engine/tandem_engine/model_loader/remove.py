"""Deletes a stored model, unless a process on this machine uses it.

Pods map the weight file. Linux would keep its pages until they end, but a pod that is restarted could not
load the model again, so a model in use stays.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import MANIFEST_NAME, ModelManifest
from tandem_core.model.registry import converted_weights, folder_name, missing, models_root

from tandem_engine.model_loader.files import locked


@dataclass(frozen=True)
class RemovedModel:
    folder: Path
    #: Bytes by file name, largest first; those of an unfinished pull too.
    files: dict[str, int]
    #: Weights outside of Tandem's folder, which are still there: a local file, or the hub's cache.
    kept: Path | None

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


def remove(name: str, *, only_converted: bool = False) -> RemovedModel:
    """Removes a model and the remains of an unfinished pull of this name, or only the converted weights of a
    complete model. Raises ModelLoadError."""
    root = models_root()
    folder = root / folder_name(name)
    fresh = folder.with_name(f".{folder.name}.new")
    # The name is a single component, so that nothing outside of the store can be meant.
    if folder.parent != root or folder.name in ("", ".", "..") or not (folder.is_dir() or fresh.is_dir()):
        raise missing(name)
    try:
        with locked(root / f".{folder.name}.lock"):
            if users := _processes_that_map(folder):
                raise ModelLoadError(
                    f"{name} is in use by process {', '.join(map(str, users))}; end it (of `tandem up`: "
                    "Ctrl-C there), then remove the model"
                )
            if only_converted:
                made = converted_weights(folder, ModelManifest.read(folder))
                files = {path.name: path.stat().st_size for path in made}
                for path in made:
                    path.unlink()
                return RemovedModel(folder, files, None)
            kept = _source_outside(folder)
            files = {p.name: p.stat().st_size for f in (folder, fresh) for p in f.rglob("*") if p.is_file()}
            for existing in (folder, fresh):
                if existing.is_dir():
                    shutil.rmtree(existing)
    except OSError as error:
        raise ModelLoadError(f"{folder} could not be removed ({error})") from error
    return RemovedModel(folder, dict(sorted(files.items(), key=lambda item: -item[1])), kept)


def _processes_that_map(folder: Path) -> list[int]:
    """Pids; those of other users cannot be seen without their rights."""
    wanted = f" {folder.resolve()}/"
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if wanted in maps.read_text(errors="replace"):
                found.append(int(maps.parent.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return sorted(found)


def _source_outside(folder: Path) -> Path | None:
    if not (folder / MANIFEST_NAME).is_file():
        return None
    weights = Path(ModelManifest.read(folder).weights)
    return weights if weights.is_absolute() and weights.exists() else None
