"""The compiled kernels that run here or are emulated, and the choice of one for a block of a test."""

from __future__ import annotations

import fcntl
import runpy
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from qemu_library import QemuLibrary
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
COMPILED = [*NATIVE, EMULATED] if "avx2" in NATIVE and shutil.which("g++") else NATIVE
#: Kernels that run under qemu, on a processor that has no more than they need, where can_run_arm.
ARM_PROCESSORS = {"neon_dotprod": "neoverse-n1", "neon_bf16": "max"}
_ARM_COMPILER, _QEMU, _ARM_ROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"


def can_run_arm() -> bool:
    return bool(shutil.which(_ARM_COMPILER) and shutil.which(_QEMU))


@contextmanager
def native_library(name: str | None) -> Iterator[None]:
    """Lets the kernels use one instruction set's library, none of them ("off"), or the chosen one (None)."""
    chosen = native.LIBRARY
    if name == EMULATED:
        native.LIBRARY = native.load(EMULATED, _built(EMULATED, _build_emulated))
    elif name in ARM_PROCESSORS and name not in NATIVE:
        native.LIBRARY = _arm_library(name)
    elif name is not None:
        native.LIBRARY = None if name == "off" else native.load(name)
    try:
        yield
    finally:
        native.LIBRARY = chosen


@cache
def _arm_library(name: str) -> QemuLibrary:
    folder = _built("arm", _build_arm)
    command = [_QEMU, "-L", _ARM_ROOT, "-cpu", ARM_PROCESSORS[name], str(folder / "run_library")]
    return QemuLibrary(command, folder / f"tandem_{name}.so")


def _build_arm(folder: Path) -> list[Path]:
    program = folder / "run_library"
    source = _ROOT / "tests/kernels/run_library.cpp"
    subprocess.run([_ARM_COMPILER, "-std=c++20", source, "-o", program], check=True)
    return [program, *_build_script()["cross_build"](_ARM_COMPILER, "aarch64", folder)]


def _build_emulated(folder: Path) -> list[Path]:
    return [_build_script()["build_emulated"](folder)]


def _build_script() -> dict[str, Any]:
    return runpy.run_path(str(_ROOT / "build_native.py"))


@cache
def _built(name: str, build: Callable[[Path], Sequence[Path | None]]) -> Path:
    """A folder with the output of `build`, called if a source is newer; one worker builds, the others
    wait."""
    folder = _BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    sources = [path for path in (_ROOT / "kernels/csrc").rglob("*") if path.is_file()]
    sources += [_ROOT / "build_native.py", _ROOT / "tests/kernels/run_library.cpp"]
    newest = max(path.stat().st_mtime for path in sources)
    stamp = folder / "built"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or stamp.stat().st_mtime < newest:
            assert all(build(folder)), f"{name} was not built; the compiler's message is above"
            stamp.touch()
    return folder
