"""Faults of processes and of the links between them.

kill    SIGKILL
term    SIGTERM: the process drains and ends
pause   SIGSTOP, and SIGCONT after up to three seconds: shorter and longer than every limit of silence
hang    SIGSTOP for good: the supervisor kills the process
cut     nothing passes between two processes for up to three seconds
slow    SIGKILL, and the next process reads its model from a slow disk
clock   the wall clock of a process jumps by hours, forward or backward
stuck   the engine's thread stops for good while its process answers
full    more requests at once than the gateways have places for, and than the pods have blocks for
reset   connections between two processes are reset and refused for up to three seconds
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial

from tandem_cli.up.supervisor import Child

from tandem_chaos.child_faults import BACKWARD, FORWARD, STUCK
from tandem_chaos.system import ChaosSystem


class FaultKind(enum.StrEnum):
    KILL = "kill"
    TERM = "term"
    PAUSE = "pause"
    HANG = "hang"
    CUT = "cut"
    RESET = "reset"
    SLOW = "slow"
    CLOCK = "clock"
    STUCK = "stuck"
    FULL = "full"

    @property
    def is_of_link(self) -> bool:
        return self in (FaultKind.CUT, FaultKind.RESET)

    @property
    def needs_fork(self) -> bool:
        return self in (FaultKind.SLOW, FaultKind.CLOCK, FaultKind.STUCK)

    def can_hit(self, role: str) -> bool:
        match self:
            case FaultKind.CUT | FaultKind.RESET:
                return role != "gateway"  # nothing of the fleet calls it
            case FaultKind.SLOW | FaultKind.STUCK:
                return role in ("decode", "prefill")
            case FaultKind.CLOCK:
                return role != "redis"  # its keys expire by its clock
            case FaultKind.FULL:
                return role == "gateway"
            case _:
                return True


PROCESS_KINDS = (FaultKind.KILL, FaultKind.TERM, FaultKind.PAUSE, FaultKind.HANG)
ROLES = ("gateway", "decode", "prefill", "lookahead", "redis")
_LONGEST_PAUSE_S = 3.0
#: Who calls whom.
_CALLERS = {
    "decode": ("gateway",),
    "prefill": ("decode", "gateway"),
    "lookahead": ("decode",),
    "redis": ("lookahead", "gateway"),
}


@dataclass
class Fault:
    kind: FaultKind
    role: str
    #: The process; with a link, the one that is called.
    name: str = ""
    #: What happened to whom, for people.
    what: str = ""
    #: Monotonic seconds.
    at: float = 0.0
    #: Length of a pause.
    lasts_s: float = 0.0

    @property
    def cause(self) -> str:
        return f"{self.kind} {self.role}"


class Injector:
    """Draws faults from the seed and injects them."""

    def __init__(
        self,
        fleet: ChaosSystem,
        rng: random.Random,
        kinds: tuple[FaultKind, ...],
        roles: tuple[str, ...],
        burst: Callable[[], Coroutine[None, None, None]],
    ) -> None:
        self._fleet = fleet
        self._rng = rng
        self._choices = [(kind, role) for kind in kinds for role in roles if kind.can_hit(role)]
        if not self._choices:
            raise ValueError(f"--kinds {','.join(kinds)}: none of them can hit one of {','.join(roles)}")
        #: Sends too many requests; returns when all have their answers.
        self._burst = burst
        self._ending: set[asyncio.Task[None]] = set()

    def draw(self) -> Fault:
        kind, role = self._rng.choice(self._choices)
        return Fault(kind, role)

    async def inject(self, fault: Fault) -> None:
        """The caller has waited until the role can spare a process."""

        async def is_ready() -> bool:
            return any(child.ready.is_set() for child in self._fleet.of_role(fault.role))

        await self._fleet.until(f"a {fault.role} to harm", is_ready)
        child = self._rng.choice([one for one in self._fleet.of_role(fault.role) if one.ready.is_set()])
        lasts_s = self._rng.uniform(0.05, _LONGEST_PAUSE_S)
        fault.at = time.monotonic()
        fault.name = child.spec.name
        fault.what = f"{fault.kind} {fault.name}"
        if fault.kind.is_of_link:
            self._cut(fault, child, lasts_s)
            return
        if fault.kind is FaultKind.FULL:
            fault.what = "full gateways and pods"
            self._keep(asyncio.create_task(self._burst()))
            return
        assert child.pid is not None
        number = {
            FaultKind.KILL: signal.SIGKILL,
            FaultKind.TERM: signal.SIGTERM,
            FaultKind.SLOW: signal.SIGKILL,
            FaultKind.STUCK: STUCK,
            FaultKind.CLOCK: self._rng.choice((FORWARD, BACKWARD)),
        }
        if fault.kind is FaultKind.SLOW:
            self._fleet.slow_down_next_start(fault.name)
        with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(child.pid, number.get(fault.kind, signal.SIGSTOP))
        if fault.kind is FaultKind.PAUSE:
            fault.what += f" for {lasts_s:.2f} s"
            fault.lasts_s = lasts_s
            self._later(lasts_s, partial(_continue, child.pid))

    async def settle(self) -> None:
        """Waits until pauses, cuts and bursts are over."""
        await asyncio.gather(*self._ending)

    def _cut(self, fault: Fault, child: Child, lasts_s: float) -> None:
        proxy = self._fleet.proxies[child.spec.name]
        callers = sorted(proxy.callers()) or [
            caller.spec.name for role in _CALLERS[fault.role] for caller in self._fleet.of_role(role)
        ]
        caller = self._rng.choice(callers)
        fault.what = f"{fault.kind} {caller} - {child.spec.name} for {lasts_s:.2f} s"
        proxy.cut(caller, reset=fault.kind is FaultKind.RESET)
        self._later(lasts_s, partial(proxy.heal, caller))

    def _later(self, delay_s: float, end: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(delay_s)
            end()

        self._keep(asyncio.create_task(wait()))

    def _keep(self, task: asyncio.Task[None]) -> None:
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _continue(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)
