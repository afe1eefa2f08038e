"""Faults inside a forked pod: its wall clock jumps, the disk with its model is slow, its engine hangs.

The clock is that of the C library, so gRPC and TLS see the jump as Python does. A small library, compiled
here, is loaded before the C library and adds an offset that a signal changes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import safetensors
from tandem_engine.loop import EngineLoop
from tandem_engine.model_loader import loading

FORWARD, BACKWARD = signal.SIGUSR1, signal.SIGUSR2
#: Stops the thread of the engine.
STUCK = signal.SIGHUP
#: Longer than everything that expires: answers are kept for minutes, leases a second.
_JUMP_S = 5 * 3600
#: Longer in sum than every limit of silence.
_TENSOR_S = 0.2
_WALL_CLOCK = r"""
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long offset_s;

void tandem_jump_s(long seconds) { offset_s += seconds; }

int clock_gettime(clockid_t id, struct timespec *now) {
  int result = syscall(SYS_clock_gettime, id, now);
  if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_s;
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec precise;
  clock_gettime(CLOCK_REALTIME, &precise);
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *result) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (result) *result = now.tv_sec;
  return now.tv_sec;
}
"""


def compile_wall_clock(folder: Path) -> Path:
    """The library for LD_PRELOAD. Raises ValueError without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise ValueError("--kinds clock needs a C compiler named cc; install one, or leave clock out")
    path = folder / "wall_clock.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-O1", "-x", "c", "-o", str(path), "-"],
        input=_WALL_CLOCK.encode(),
        check=True,
    )
    return path


def jump_on_signals() -> None:
    """In a process with that library: FORWARD and BACKWARD move its clock by hours, and it says so."""
    jump_s = ctypes.CDLL(None).tandem_jump_s
    jump_s.argtypes = [ctypes.c_long]

    def jump(number: int, _frame: object) -> None:
        jump_s(_JUMP_S if number == FORWARD else -_JUMP_S)
        os.write(1, f"the wall clock has jumped to {time.time():.0f}\n".encode())

    signal.signal(FORWARD, jump)
    signal.signal(BACKWARD, jump)


class _SlowFile:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, name: str) -> Any:
        time.sleep(_TENSOR_S)
        return self._file.get_tensor(name)


def read_model_slowly() -> None:
    """Each tensor of the model takes this process `_TENSOR_S`."""

    @contextmanager
    def slow_open(*arguments: Any, **options: Any) -> Iterator[_SlowFile]:
        with safetensors.safe_open(*arguments, **options) as file:
            yield _SlowFile(file)

    loading.safe_open = slow_open  # type: ignore[assignment,attr-defined]


def stop_engine_on_signal() -> None:
    """STUCK keeps the engine's thread from its next step or call, for good; the other threads go on."""
    stuck = threading.Event()
    drain = EngineLoop._drain

    def hang(loop: EngineLoop, **options: Any) -> None:
        while stuck.is_set():
            time.sleep(1)
        drain(loop, **options)

    EngineLoop._drain = hang  # type: ignore[method-assign,assignment]
    signal.signal(STUCK, lambda *_: stuck.set())
