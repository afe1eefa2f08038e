"""The compiled kernels that run here, those that emulate AMX, and the choice of one for a block of a test."""

from __future__ import annotations

import fcntl
import runpy
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tandem_kernels import native

_ROOT = Path(__file__).parents[2]
_BUILD = _ROOT / "build/tests"


def _is_usable(name: str) -> bool:
    try:
        native.load(name)
    except OSError:
        return False
    return True


#: Instruction sets whose compiled kernels are here and run on this processor.
NATIVE = [name for name in native.instruction_sets() if _is_usable(name)]
#: Plain C++ with the arithmetic of amx, compiled at first use.
EMULATED = "amx_emulated"
#: All compiled kernels that run here.
COMPILED = [*NATIVE, EMULATED] if NATIVE and shutil.which("g++") else NATIVE


@contextmanager
def native_library(name: str | None) -> Iterator[None]:
    """Lets the kernels use one instruction set's library, none of them ("off"), or the chosen one (None)."""
    chosen = native.LIBRARY
    if name == EMULATED:
        native.LIBRARY = native.load(EMULATED, _emulated_folder())
    elif name is not None:
        native.LIBRARY = None if name == "off" else native.load(name)
    try:
        yield
    finally:
        native.LIBRARY = chosen


@cache
def _emulated_folder() -> Path:
    """Compiles the kernels unless they are newer than their sources; one worker does, the others wait."""
    _BUILD.mkdir(parents=True, exist_ok=True)
    sources = [path for path in (_ROOT / "kernels/csrc").rglob("*") if path.is_file()]
    newest = max(path.stat().st_mtime for path in [*sources, _ROOT / "build_native.py"])
    library = _BUILD / f"tandem_{EMULATED}.so"
    with (_BUILD / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists() or library.stat().st_mtime < newest:
            built = runpy.run_path(str(_ROOT / "build_native.py"))["build_emulated"](_BUILD)
            assert built == library, (
                "the kernels that emulate AMX were not built; the compiler's message is above"
            )
    return _BUILD
