"""Runs a part's stages one after another, each in a process with a time limit, and writes their tables.

    plan     every stage gets its seconds while the part's minutes last; later ones are cut
    run      fork -> the stage writes its rows to the page as they are measured -> done, FAILED or TIMED OUT
             a stage may also use what earlier ones left over, but not the seconds of later ones

Stages are forked, because importing torch again takes seconds for each. So nothing here may touch CUDA: a
process that has cannot be forked.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import multiprocessing
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import torch

PARTS = {"A": "checks", "B": "attention", "C": "steps", "D": "transfer"}
#: A stage with less than this share of its seconds is cut.
LEAST_SHARE = 0.5
_FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Stage:
    """One table of a part."""

    name: str
    seconds: float
    run: Callable[[Bench], None]

    @property
    def title(self) -> str:
        return (self.run.__doc__ or "").partition("\n")[0]


@dataclass
class Bench:
    """What a stage gets: where to compute, how much, how long, and the page to write to."""

    device: torch.device
    page: TextIO
    deadline: float = float("inf")
    _width: int = field(default=0, init=False)

    @property
    def dry(self) -> bool:
        """Tiny shapes, on the CPU."""
        return self.device.type != "cuda"

    @property
    def left_s(self) -> float:
        return self.deadline - time.monotonic()

    def table(self, *head: str) -> None:
        self._width = len(head)
        self._write(f"\n| {' | '.join(head)} |\n|{'---|' * len(head)}\n")

    def row(self, *cells: object) -> None:
        """Cells that a short row lacks stay empty."""
        texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
        texts += [""] * (self._width - len(texts))
        self._write(f"| {' | '.join(text.replace('|', '/') for text in texts)} |\n")

    def note(self, text: str) -> None:
        self._write(f"\n{text}\n")

    def _write(self, text: str) -> None:
        self.page.write(text)
        self.page.flush()


def plan(stages: Sequence[Stage], total_s: float) -> list[float]:
    """Seconds of each stage, 0 for those that are cut: the first come first."""
    seconds = []
    for stage in stages:
        given = min(stage.seconds, total_s)
        if given < LEAST_SHARE * stage.seconds:
            given = 0.0
        seconds.append(given)
        total_s -= given
    return seconds


def run_stages(
    stages: Sequence[Stage], total_s: float, device: torch.device, page: TextIO, log: TextIO
) -> list[str]:
    """Runs the stages that fit. Returns the names of those that failed."""
    ends = time.monotonic() + total_s
    seconds = plan(stages, total_s)
    shown = ", ".join(
        f"{s.name} {t:.0f} s" if t else f"{s.name} CUT" for s, t in zip(stages, seconds, strict=True)
    )
    _say(page, f"\nPlan of {total_s / 60:.1f} minutes: {shown}\n")
    failed = []
    for number, stage in enumerate(stages):
        if not seconds[number]:
            _say(page, f"\n## {stage.name}: CUT\n\nNot run: the minutes went to the stages before it.\n")
            continue
        limit_s = ends - time.monotonic() - sum(seconds[number + 1 :])
        _say(page, f"\n## {stage.name}{' (dry run)' if device.type != 'cuda' else ''}\n\n{stage.title}\n")
        before = Path(page.name).stat().st_size
        outcome = _run_stage(stage, limit_s, device, page, log)
        with Path(page.name).open() as written:
            written.seek(before)
            print(written.read(), end="", flush=True)
        _say(page, f"\n{outcome}\n")
        if not outcome.startswith("Done"):
            failed.append(stage.name)
    return failed


def _run_stage(stage: Stage, limit_s: float, device: torch.device, page: TextIO, log: TextIO) -> str:
    """Done, FAILED or TIMED OUT, with the last line that the stage left in the log."""
    print(f"===== {stage.name}", file=log, flush=True)
    logged = Path(log.name).stat().st_size
    began = time.monotonic()
    process = _FORK.Process(target=_in_child, args=(stage, limit_s, device, page, log))
    process.start()
    timed_out = False
    try:
        process.join(limit_s)
        timed_out = process.is_alive()
    finally:
        # With everything that the stage started, also when this process is told to end.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.join()
    took = time.monotonic() - began
    if not timed_out and process.exitcode == 0:
        return f"Done in {took:.0f} s."
    with Path(log.name).open(errors="replace") as text:
        text.seek(logged)
        lines = [line.strip() for line in text if line.strip()]
    last = lines[-1] if lines else "nothing in the log"
    code = process.exitcode or 0
    if timed_out or code < 0:
        # The log ends with the stacks of all threads, the main one last, each from its innermost call on.
        stacks = [n for n, line in enumerate(lines[:-1]) if "(most recent call first)" in line]
        last = lines[stacks[-1] + 1] if stacks else last
    ended = "TIMED OUT" if timed_out else f"FAILED ({signal.Signals(-code).name})" if code < 0 else "FAILED"
    return f"**{ended}** after {took:.0f} s: `{last[:300]}`"


def _in_child(stage: Stage, limit_s: float, device: torch.device, page: TextIO, log: TextIO) -> None:
    os.setpgid(0, 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    faulthandler.enable(log)
    faulthandler.dump_traceback_later(max(limit_s - 1, 1), file=log)
    torch.manual_seed(0)
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        stage.run(Bench(device, page, deadline=time.monotonic() + limit_s))
    except BaseException as error:
        traceback.print_exc(file=log)
        # CUDA's errors end with advice.
        print(f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}", file=log, flush=True)
        os._exit(1)
    log.flush()
    # Without the interpreter's clean-up, in which a thread of CUDA or gRPC may hang.
    os._exit(0)


def run_parts(options: argparse.Namespace) -> int:
    """The exit code: 1 if a stage failed. Raises OSError when the pages cannot be written."""
    # As Ctrl-C does: a stage has a process group of its own and would run on.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    dry = options.dry_run or not _has_gpu()
    device = torch.device("cpu" if dry else "cuda")
    options.out.mkdir(parents=True, exist_ok=True)
    failed: list[str] = []
    known: list[str] = []
    for part in options.part or PARTS:
        name = f"{part}-dry-run" if dry else part
        with (
            # An earlier run's rows stay: a stage may be run again by itself.
            (options.out / f"{name}.md").open("a", buffering=1) as page,
            (options.out / f"{name}.log").open("a", buffering=1) as log,
        ):
            _say(
                page, f"# Part {part}{': DRY RUN on the CPU with tiny shapes, not a result' if dry else ''}\n"
            )
            words = [Path(word).name if "/" in word else word for word in sys.argv[1:]]
            _say(page, f"Command: `python -m gpu {shlex.join(words)}`  \nHardware: {_hardware(dry)}\n")
            try:
                stages = importlib.import_module(f"gpu.{PARTS[part]}").STAGES
            except ImportError as error:
                traceback.print_exc(file=log)
                _say(page, f"\n**FAILED**: `{error}`; a bundle may hold what is missing\n")
                failed.append(f"part {part}")
                continue
            known += (s.name for s in stages)
            stages = [s for s in stages if not options.stage or s.name in options.stage]
            failed += run_stages(stages, options.minutes * 60, device, page, log)
    if unknown := set(options.stage or ()) - set(known):
        print(f"No such stage: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        failed += sorted(unknown)
    print(f"Failed: {', '.join(failed)}" if failed else "No stage failed.")
    return int(bool(failed))


def _say(page: TextIO, text: str) -> None:
    """Writes the text to the page and to standard output."""
    print(text, end="", flush=True)
    page.write(text)
    page.flush()


def _has_gpu() -> bool:
    """Asked in another process, because the answer initializes CUDA."""
    process = _FORK.Process(target=lambda: sys.exit(not torch.cuda.is_available()))
    process.start()
    process.join()
    return process.exitcode == 0


def _hardware(dry: bool) -> str:
    machine = (
        f"{len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    if dry:
        return machine
    return f"{query_gpu('name,driver_version,memory.total')}; {machine}"


def query_gpu(fields: str) -> str:
    """What nvidia-smi says, comma-separated."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is absent"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    smi = subprocess.run(command, capture_output=True, text=True)
    return (smi.stdout or smi.stderr).strip()
