"""Which files of a checkpoint hold its safetensors; without torch."""

from __future__ import annotations

from pathlib import Path

from tandem_core.errors import ModelLoadError
from tandem_core.model.json_file import read_object


def weight_files(path: Path) -> list[Path]:
    """The files that hold the weights: the index's, or the single one. Raises ModelLoadError."""
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_object(index).get("weight_map")
        names = set(map(str, weight_map.values())) if isinstance(weight_map, dict) else set()
        if not names or any(name != Path(name).name or "\0" in name for name in names):
            raise ModelLoadError(
                f"{index}: its weight_map names no files of this folder; download the model again"
            )
        files = [path / name for name in sorted(names)]
    else:
        files = sorted(path.glob("*.safetensors"))
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        what = missing[0] if missing else "*.safetensors"
        raise ModelLoadError(f"{path} lacks {what}; download the whole model (safetensors or GGUF)")
    return files
