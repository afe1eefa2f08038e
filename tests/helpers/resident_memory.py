"""Measures the memory that something takes, in a process of its own.

A test process has free pages of earlier tests, which would hide growth.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import ParamSpec, TypeVar

_P, _T = ParamSpec("_P"), TypeVar("_T")


def resident_bytes() -> int:
    """Of this process."""
    num_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return num_pages * os.sysconf("SC_PAGE_SIZE")


def in_own_process(function: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    # Unlike an executor's, a pool's end kills a process that hangs.
    with get_context("spawn").Pool(1, _find_tests) as pool:
        return pool.apply(function, args, kwargs)


def _find_tests() -> None:
    """pytest names the modules of functions as folders from here, without this path."""
    sys.path.insert(0, str(Path(__file__).parents[2]))
