"""Compiles the C++ parts, each a shared library next to the Python that loads it.

    python build_native.py

    kernels/csrc   the CPU kernels, once per instruction set; x86-64 alone
    drafting/csrc    the drafter

Run at install time by the hatchling hook (hatch_build.py). Needs nothing but g++ (or $CXX: a compiler whose
OpenMP is libgomp, which torch has loaded). Without one nothing is built: the engine then computes with torch
alone, and does not draft.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parent
_COMMON = ("-O3", "-std=c++20", "-fPIC", "-shared")

_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mpopcnt")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
#: Best last. The names are part of the contract with tandem_kernels.native.
_INSTRUCTION_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": (*_AVX512, "-mavx512vnni"),
    "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
}
_KERNEL_FLAGS = ("-fopenmp", "-fno-math-errno", "-Wno-psabi")


@dataclass(frozen=True)
class Library:
    """A shared library: all .cpp files of a folder, compiled together."""

    sources: Path
    target: Path
    flags: tuple[str, ...] = ()


def libraries() -> list[Library]:
    """What can be built for this machine's processor."""
    found = [Library(_ROOT / "drafting/csrc", _ROOT / "drafting/tandem_drafting/tandem_drafting.so")]
    if platform.machine() in ("x86_64", "AMD64"):
        kernels = _ROOT / "kernels"
        found += [
            Library(
                kernels / "csrc", kernels / f"tandem_kernels/native/tandem_{name}.so", _KERNEL_FLAGS + flags
            )
            for name, flags in _INSTRUCTION_SETS.items()
        ]
    else:
        print(f"tandem: no CPU kernels for {platform.machine()}; they fall back to torch", file=sys.stderr)
    return found


def build() -> list[Path]:
    """The libraries built; empty without a compiler. Instruction sets it does not know are left out."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        print("tandem: no C++ compiler found; the CPU kernels fall back to torch", file=sys.stderr)
        return []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        built = pool.map(lambda library: _build_one(compiler, library), libraries())
        return [path for path in built if path is not None]


def _build_one(compiler: str, library: Library) -> Path | None:
    sources = [str(path) for path in sorted(library.sources.glob("*.cpp"))]
    # Written aside and renamed: a running process keeps the file it has mapped.
    aside = library.target.with_suffix(".so.new")
    command = [compiler, *_COMMON, *library.flags, *sources, "-o", str(aside)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        aside.unlink(missing_ok=True)
        print(f"tandem: {library.target.name} was not built:\n{result.stderr[-2000:]}", file=sys.stderr)
        return None
    return aside.replace(library.target)


if __name__ == "__main__":
    for path in build():
        print(path)
