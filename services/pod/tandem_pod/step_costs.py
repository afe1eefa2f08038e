"""Measures what steps cost before a pod serves, one pod of a machine after the other.

The pods of `tandem up` start together, and each measures on all cores. At the same time, each would find that
steps take twice as long as they do alone, and the gateway would refuse requests that could be served.

When they serve, the gateway, clients and the lookahead service use the same cores, and steps take longer. A
gateway that does not know it before the first of these steps lets too many requests in when a system that was
just started gets more load than it can do (benchmarks/results/slo.md).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from tandem_core.model import registry
from tandem_engine.engine import Engine

#: The longest wait for one's turn: a pod that was stopped while it measures keeps no other one from serving.
_TURN_S = 10.0
_POLL_S = 0.02
#: What a gateway, clients and the lookahead service add to the length of a step on one core, as a share of
#: it; on n cores an n-th of that. Measured on two cores only: with twice as much, some of eight clients of a
#: system that was just started were refused though it could have served them (benchmarks/results/slo.md).
_OTHERS = 1.0


def measure(engine: Engine, *, decodes: bool, shares_cores: bool) -> None:
    """`Engine.measure_costs` in turn; at once where Tandem's folder does not exist, as in a container, which
    shares it with no other pod. `shares_cores`: a gateway and clients will use the same CPU cores."""
    slowed_by = 1.0 + _OTHERS / len(os.sched_getaffinity(0)) if shares_cores else 1.0
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
    """The kernel frees it when the descriptor is closed."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
