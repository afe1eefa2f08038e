"""What the benchmarks' reports have in common: the command, the machine, Markdown tables."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

#: What decides the speed of matrix products on x86, as /proc/cpuinfo names it.
_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")


def describe_command() -> str:
    """What was run, not where: paths are shortened to their names."""
    words = [Path(word).name if "/" in word and " " not in word else word for word in sys.argv[1:]]
    return shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *words])


def describe_machine() -> str:
    """Processor, its vector instructions, cores, memory, system."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() == "flags":
            flags = set(value.split())
    features = ", ".join(feature for feature in _FEATURES if feature in flags)
    memory_gb = psutil.virtual_memory().total / 1e9
    return (
        f"{name} ({features or 'no known vector instructions'}), {os.cpu_count()} cores, {memory_gb:.0f} GB, "
        f"{platform.system()}, Python {platform.python_version()}"
    )


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
