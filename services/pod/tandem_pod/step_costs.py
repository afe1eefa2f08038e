"""Measures step costs before a pod serves, one pod of a machine after the other.

The pods of `tandem up` start together, and each measures on all cores. Concurrent measurements would double
the costs, and the gateway would refuse requests that could be served.

Under load, the gateway, clients and the lookahead service use the same cores, and steps take longer. Without
this correction a gateway admits too many requests if a new system is overloaded
(benchmarks/results/slo.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tandem_core.model import registry
from tandem_core.usable_cpus import usable_cpus
from tandem_engine.engine import Engine

#: Longest wait for another pod's measurement, which may have been suspended.
_TURN_S = 10.0
_POLL_S = 0.02
#: Slowdown of a step by a gateway, clients and the lookahead service on one core; on n cores an n-th of it.
#: Measured on two cores only: with twice this value, a new system refused some of eight clients that it could
#: have served (benchmarks/results/slo.md).
_OTHERS = 1.0


def measure(engine: Engine, *, decodes: bool, shares_cores: bool) -> None:
    """Runs `Engine.measure_costs`, one pod at a time; at once if Tandem's folder does not exist, as in a
    container of its own. `shares_cores`: a gateway and clients will use the same CPU cores."""
    slowed_by = 1.0 + _OTHERS / usable_cpus() if shares_cores else 1.0
    with _turn(registry.cache_root()):
        engine.measure_costs(decodes=decodes, slowed_by=slowed_by)


@contextlib.contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Holds the lock of the folder itself, so that no file is left in it."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            descriptor = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, descriptor)
            until = time.monotonic() + _TURN_S
            while time.monotonic() < until and not _try_lock(descriptor):
                time.sleep(_POLL_S)
        yield


def _try_lock(descriptor: int) -> bool:
    """Tries to lock; the kernel frees the lock when the descriptor is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
