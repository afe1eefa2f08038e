"""Reads the sampling that a model's files recommend, as arguments of SamplingParams.

generation_config.json of a checkpoint (do_sample: false means greedy), general.sampling.* of a GGUF file.
Only types are checked here. A gateway that uses the values checks their ranges (ModelManifest.sampling), so a
model with an odd value can be served without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tandem_core.errors import ModelLoadError, quoted
from tandem_core.model.json_file import read_object

from tandem_engine.model_loader.gguf_file import open_all

_CHECKPOINT = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    "max_new_tokens": "max_tokens",
}
_GGUF = {
    **{f"general.sampling.{name}": name for name in ("top_k", "top_p", "min_p")},
    "general.sampling.temp": "temperature",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_WHOLE = ("top_k", "max_tokens")
#: Larger values, infinities and NaN are refused.
_LIMIT = 1e15


def recommended_sampling(source: Path) -> dict[str, float]:
    """The recommendation of a checkpoint folder or a GGUF file; {}: none. Raises ModelLoadError if a value is
    not a number."""
    if source.suffix == ".gguf":
        return _numbers(source, open_all(source)[0].fields, _GGUF)
    path = source / "generation_config.json"
    listed = read_object(path) if path.is_file() else {}
    found = _numbers(path, listed, _CHECKPOINT)
    return found | {"temperature": 0.0} if listed.get("do_sample") is False else found


def _numbers(path: Path, listed: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    found: dict[str, float] = {}
    for key, name in names.items():
        value = listed.get(key)
        if value is None:
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LIMIT
        if not is_number or (name in _WHOLE and value != int(value)):
            kind = "a whole number" if name in _WHOLE else "a number"
            raise ModelLoadError(
                f"{path}: {key} is {quoted(str(value))}, but must be {kind}; correct a copy of the model"
            )
        # GGUF files hold float32; the nearest short decimal is what their author wrote.
        found[name] = int(value) if name in _WHOLE else float(f"{value:.6g}")
    if found.get("top_k", 0) < 0:  # some files write -1 for all tokens
        found["top_k"] = 0
    return found
