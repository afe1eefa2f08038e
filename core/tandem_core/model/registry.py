"""Where models are stored on this machine, and which folder a model's name means.

$TANDEM_HOME | $XDG_CACHE_HOME/tandem | ~/.cache/tandem
  models/
    <name>/             complete: appears by one rename
    .<name>.lock        held while a process makes or replaces <name>
  tokenizers/           the same without weights, for gateways
"""

from __future__ import annotations

import os
from pathlib import Path

from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import MANIFEST_NAME, ModelManifest

DEFAULT_MODEL = "smollm2-135m-instruct"


def cache_root() -> Path:
    """Tandem's own folder, for everything that it keeps on this machine."""
    if home := os.environ.get("TANDEM_HOME"):
        return Path(home).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg).expanduser() / "tandem"
    return Path.home() / ".cache" / "tandem"


def models_root() -> Path:
    return cache_root() / "models"


def tokenizers_root() -> Path:
    return cache_root() / "tokenizers"


def folder_name(model_name: str) -> str:
    """A model's name as one path component: hub ids hold a slash."""
    return model_name.replace("/", "--")


def list_models() -> list[ModelManifest]:
    """Every complete model on this machine, by name."""
    found = models_root().glob(f"*/{MANIFEST_NAME}")
    return sorted((ModelManifest.read(p.parent) for p in found), key=lambda m: m.name)


def find(name_or_path: str | Path) -> Path | None:
    """The folder of a stored model by name, or of a path to a model folder; None: not on this machine."""
    path = Path(name_or_path).expanduser()
    if (path / MANIFEST_NAME).is_file():
        return path.resolve()
    stored = models_root() / folder_name(str(name_or_path))
    return stored if (stored / MANIFEST_NAME).is_file() else None


def resolve(name_or_path: str | Path) -> Path:
    """`find`, but raises ModelLoadError when the model is not on this machine."""
    if (folder := find(name_or_path)) is None:
        raise missing(str(name_or_path))
    return folder


def missing(name: str) -> ModelLoadError:
    """The error for a model that is not on this machine."""
    stored = ", ".join(manifest.name for manifest in list_models()) or "none"
    return ModelLoadError(
        f"there is no model {name!r} on this machine; stored are: {stored}; `tandem model pull` gets others"
    )


def converted_weights(folder: Path, manifest: ModelManifest) -> list[Path]:
    """Weights converted from those of the model; a start converts them again."""
    return [path for path in folder.glob("*.safetensors") if path.name != manifest.weights]
