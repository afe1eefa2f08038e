"""Whether a file can be a model at all, by its name and first bytes."""

from __future__ import annotations

from pathlib import Path

from tandem_core.errors import ModelLoadError, quoted

#: Suffixes of llama2.c's checkpoints.
LLAMA2C_SUFFIXES = (".bin", ".data")
_SUFFIXES = (".gguf", ".safetensors", *LLAMA2C_SUFFIXES)
_KINDS = f"a folder of safetensors, a GGUF file, or a llama2.c checkpoint ({', '.join(LLAMA2C_SUFFIXES)})"
_NUM_BYTES = 512
_LFS_POINTER = "version https://git-lfs.github.com/spec/"
#: Control characters that texts hold: tab, line feed, form feed, carriage return.
_IN_TEXTS = frozenset("\t\n\f\r")


def check_model_file(path: Path) -> None:
    """Raises ModelLoadError for a text, whatever its name, and for a file that is no kind of model."""
    with path.open("rb") as file:
        start = file.read(_NUM_BYTES)
    if not start:
        raise ModelLoadError(f"{path} is empty; download it again")
    text = _as_text(start)
    if text.startswith(_LFS_POINTER):
        raise ModelLoadError(
            f"{path} is a text file that only points to the weights (Git LFS); fetch them with `git lfs pull`"
        )
    if text:
        raise ModelLoadError(
            f"{path} is a text file, no model: it begins with {quoted(text.strip()[:60])}; pull {_KINDS}"
        )
    if path.suffix not in _SUFFIXES:
        raise ModelLoadError(
            f"{path} is no kind of model that can be served, by its name; pull {_KINDS}, and rename the file "
            "if it is one of these"
        )


def _as_text(start: bytes) -> str:
    """ "": it is none."""
    for cut in range(min(4, len(start))):  # the last character may be incomplete
        try:
            text = start[: len(start) - cut].decode()
        except UnicodeDecodeError:
            continue
        return text if all(c.isprintable() or c in _IN_TEXTS for c in text) else ""
    return ""
