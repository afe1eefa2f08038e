"""Compiles the C++ parts, each a shared library next to the Python that loads it.

    python build_native.py

    kernels/csrc     the CPU kernels, once per instruction set of x86-64 or 64-bit ARM
    drafting/csrc    the drafter, required

Run at install time by the hatchling hook (hatch_build.py). The compiler is $CXX or g++, whose OpenMP is the
libgomp that torch has loaded. Without one the hook asks for the PyPI package ziglang to compile the drafter;
torch then computes instead of the CPU kernels, because zig has no OpenMP.
"""

from __future__ import annotations

import importlib.util
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
#: By platform.machine(). The names are part of the contract with tandem_kernels.native.
_INSTRUCTION_SETS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_vnni": (*_AVX512, "-mavx512vnni"),
        "avx512_bf16": (*_AVX512, "-mavx512vnni", "-mavx512bf16"),
        "amx": (*_AVX512, "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    },
    "aarch64": {
        "neon_dotprod": ("-march=armv8.2-a+dotprod",),
        "neon_bf16": ("-march=armv8.2-a+dotprod+bf16",),
    },
}
#: Emulates the arithmetic of amx on processors with AVX2. Only tests compile it; it is not installed.
_EMULATED = (*_AVX2, "-DTANDEM_EMULATED")
_KERNEL_FLAGS = ("-fopenmp", "-fno-math-errno", "-Wno-psabi")


@dataclass(frozen=True)
class Library:
    """A shared library: all .cpp files of a folder, compiled together."""

    sources: Path
    target: Path
    flags: tuple[str, ...] = ()


def system_compiler() -> str | None:
    """Path of $CXX or g++."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> list[Path]:
    """The libraries built; instruction sets that the compiler does not know are left out.

    Raises RuntimeError when the drafter cannot be built.
    """
    drafter = Library(_ROOT / "drafting/csrc", _ROOT / "drafting/tandem_drafting/tandem_drafting.so")
    wanted = [drafter]
    if found := system_compiler():
        compiler = [found]
        wanted += _kernels(platform.machine(), _ROOT / "kernels/tandem_kernels/native")
        if wanted == [drafter]:
            print(f"tandem: no CPU kernels for {platform.machine()}; torch stands in", file=sys.stderr)
    elif importlib.util.find_spec("ziglang"):
        compiler = [sys.executable, "-m", "ziglang", "c++", "-s"]
        print(
            "tandem: no g++; torch stands in for the CPU kernels, which is several times slower",
            file=sys.stderr,
        )
    else:
        raise RuntimeError("tandem needs a C++ compiler: install g++, set CXX, or `pip install ziglang`")
    built = _build_all(compiler, wanted)
    if drafter.target not in built:
        raise RuntimeError("tandem: the drafter was not built; the compiler's message is above")
    return built


def build_emulated(folder: Path) -> Path | None:
    """Compiles the kernels that emulate AMX into a folder; None without a compiler or on other processors."""
    compiler = system_compiler()
    if compiler is None or platform.machine() != "x86_64":
        return None
    target = folder / "tandem_amx_emulated.so"
    return _build_one([compiler], Library(_ROOT / "kernels/csrc", target, _KERNEL_FLAGS + _EMULATED))


def cross_build(compiler: str, machine: str, folder: Path) -> list[Path]:
    """Compiles the kernels for a kind of processor, such as "aarch64", into a folder; the libraries built."""
    return _build_all([compiler], _kernels(machine, folder))


def _kernels(machine: str, folder: Path) -> list[Library]:
    """The CPU kernels for a kind of processor."""
    return [
        Library(_ROOT / "kernels/csrc", folder / f"tandem_{name}.so", _KERNEL_FLAGS + flags)
        for name, flags in _INSTRUCTION_SETS.get(machine, {}).items()
    ]


def _build_all(compiler: list[str], libraries: list[Library]) -> list[Path]:
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return [path for path in pool.map(lambda library: _build_one(compiler, library), libraries) if path]


def _build_one(compiler: list[str], library: Library) -> Path | None:
    sources = [str(path) for path in sorted(library.sources.glob("*.cpp"))]
    # Written aside and renamed: a running process keeps the file it has mapped.
    aside = library.target.with_suffix(".so.new")
    command = [*compiler, *_COMMON, *library.flags, *sources, "-o", str(aside)]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        aside.unlink(missing_ok=True)
        print(f"tandem: {library.target.name} was not built:\n{result.stderr[-2000:]}", file=sys.stderr)
        return None
    return aside.replace(library.target)


if __name__ == "__main__":
    for path in build():
        print(path)
