"""Compiles the native CPU kernels, a shared library per instruction set, next to the Python that loads them.

    python kernels/csrc/build.py

Run at install time by the hatchling hook (hatch_build.py). Needs nothing but g++ (or $CXX: a compiler whose
OpenMP is libgomp, which torch has loaded). Without one, or on a machine that is not x86-64, nothing is built,
and the engine computes with torch alone.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).resolve().parent
LIBRARY_DIR = SOURCE_DIR.parent / "tandem_kernels" / "native"

_AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mpopcnt"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
#: Best last. The names are part of the contract with tandem_kernels.native.
INSTRUCTION_SETS = {
    "avx2": _AVX2,
    "avx512": _AVX512,
    "avx512_vnni": [*_AVX512, "-mavx512vnni"],
    "avx512_bf16": [*_AVX512, "-mavx512vnni", "-mavx512bf16"],
}
_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-fno-math-errno", "-Wno-psabi"]


def build() -> list[Path]:
    """The libraries built; empty without a compiler. Instruction sets it does not know are left out."""
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        print("tandem: no C++ compiler found; the CPU kernels fall back to torch", file=sys.stderr)
        return []
    if platform.machine() not in ("x86_64", "AMD64"):
        print(f"tandem: no native kernels for {platform.machine()}; they fall back to torch", file=sys.stderr)
        return []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = pool.map(lambda name: _build_one(compiler, name), INSTRUCTION_SETS)
        return [path for path in built if path is not None]


def _build_one(compiler: str, name: str) -> Path | None:
    sources = [str(path) for path in sorted(SOURCE_DIR.glob("*.cpp"))]
    target = LIBRARY_DIR / f"tandem_{name}.so"
    # Written aside and renamed: a running process keeps the file it has mapped.
    aside = target.with_suffix(".so.new")
    command = [compiler, *_FLAGS, *INSTRUCTION_SETS[name], *sources, "-o", str(aside)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        aside.unlink(missing_ok=True)
        print(f"tandem: {name} kernels were not built:\n{result.stderr[-2000:]}", file=sys.stderr)
        return None
    return aside.replace(target)


if __name__ == "__main__":
    for library in build():
        print(library)
