"""Results pages: title, table, command, hardware, notes."""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import psutil
from tandem_core.slo import SloTarget

#: What decides the speed of matrix products on x86 and ARM -> flags of /proc/cpuinfo that it needs.
_FEATURES = {
    **{flag: {flag} for flag in ("avx2", "avx512f", "avx512_vnni", "avx512_bf16")},
    "amx": {"amx_tile", "amx_int8", "amx_bf16"},
    **{f"neon_{name}": {flag} for name, flag in (("dotprod", "asimddp"), ("bf16", "bf16"))},
}


def describe_command() -> str:
    """The command with paths shortened to their names, because pages must not name a machine's folders."""
    script = Path(sys.argv[0])
    # Scripts that share code with the tests need their helpers.
    helpers = ["PYTHONPATH=tests/helpers"] if "tests/helpers" in os.environ.get("PYTHONPATH", "") else []
    words = [Path(word).name if "/" in word and " " not in word else word for word in sys.argv[1:]]
    return " ".join([*helpers, shlex.join(["python", f"benchmarks/{script.name}", *words])])


def describe_machine() -> str:
    """Processor, vector instructions, cores that this process may use, memory, system, versions."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
    memory_gb = psutil.virtual_memory().total / 1e9
    versions = f"Python {platform.python_version()}, torch {metadata.version('torch')}"
    return (
        f"{name} ({describe_features(flags)}), {len(os.sched_getaffinity(0))} cores, "
        f"{memory_gb:.0f} GB, {platform.system()}, {versions}"
    )


def describe_features(flags: set[str]) -> str:
    present = [feature for feature, needed in _FEATURES.items() if needed <= flags]
    return ", ".join(present) or "no known vector instructions"


def describe_objectives(slo: SloTarget) -> str:
    limits = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2E", slo.e2e_s))
    relative = (("TTFT", slo.ttft_slowdown), ("TPOT", slo.tpot_slowdown), ("E2E", slo.e2e_slowdown))
    parts = [f"{name} {limit_s:g} s" for name, limit_s in limits if limit_s]
    parts += [f"{name} {times:g} times as long as without load" for name, times in relative if times]
    return ", ".join(parts) or "none"


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])


def page(title: str, table: str, notes: str = "") -> str:
    measured = f"Command: `{describe_command()}`  \nHardware: {describe_machine()}"
    return f"# {title}\n\n{table}\n\n{measured}\n\n{notes}".rstrip() + "\n"


def write_page(out: Path, title: str, table: str, notes: str = "") -> None:
    """Writes a results page and prints it."""
    text = page(title, table, notes)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    print(text)
