"""Gateways that admit without predictions, for comparisons in `slo.py`.

fcfs   in order of arrival; the settings max-in-flight and max-queue are the limits
edf    earliest deadline first; requests without objectives come last and are never refused; at most
       MAX_WAITING others wait
"""

from __future__ import annotations

import math
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tandem_core.contracts import RefusalReason
from tandem_gateway import main as gateway_main
from tandem_gateway.admission.admission import Admission
from tandem_gateway.admission.admitted import Admitted
from tandem_gateway.errors import OverloadedError
from tandem_gateway.request import TokenizedRequest

ORDERS = ("fcfs", "edf")
#: Requests with objectives in the queue of `edf`.
MAX_WAITING = 16


class FixedGate:
    """Replaces a `Gate`."""

    slack_used = 0.0

    def __init__(self, admission: Admission, order: str) -> None:
        self._queue, self._order = admission.queue, order

    def decide(self, request: TokenizedRequest, num_places: int = 1, other_tokens: int = 0) -> Admitted:
        if self._order == "fcfs":
            return Admitted(replace(request, due_s=0.0), num_places=num_places)
        waiting = sum(one.request.has_objectives for one in self._queue.waiting())
        if request.has_objectives and waiting >= MAX_WAITING:
            raise OverloadedError(f"{waiting} requests wait", self._queue.turn_s(), RefusalReason.QUEUE_FULL)
        return Admitted(request, num_places=num_places)

    def may_begin(self, admitted: Admitted) -> bool:
        others = any(one.request.has_objectives for one in self._queue.waiting())
        return self._order == "fcfs" or admitted.request.has_objectives or not others

    def began(self, admitted: Admitted) -> None:
        pass

    def predicted_ttft_s(self, num_prompt_tokens: int) -> float:
        return math.nan


class FixedAdmission(Admission):
    """Admission with the order from the environment of this process."""

    def __init__(self, *given: Any, **settings: Any) -> None:
        super().__init__(*given, **settings)
        self.gate = FixedGate(self, os.environ["FIXED_GATE"])  # type: ignore[assignment]


def environment(order: str, folder: Path) -> Path:
    """An environment like this one in which `tandem up` starts a gateway with this order."""
    folder.mkdir()
    prefix, bin_folder = Path(sys.prefix), folder / "bin"
    shutil.copy(prefix / "pyvenv.cfg", folder)
    for name in ("lib", "include"):
        if (prefix / name).exists():
            (folder / name).symlink_to(prefix / name)
    bin_folder.mkdir()
    for script in (prefix / "bin").iterdir():
        if script.name != "tandem-gateway" and script.name != "tandem":
            (bin_folder / script.name).symlink_to(script.resolve() if script.is_symlink() else script)
    start = f"#!{bin_folder / 'python'}\nimport os, sys\n"
    gateway = f"sys.path.insert(0, {str(Path(__file__).parent)!r})\nos.environ['FIXED_GATE'] = {order!r}\n"
    scripts = {
        "tandem": "from tandem_cli.main import main\nmain()\n",
        "tandem-gateway": f"{gateway}from fixed_gate import main\nmain()\n",
    }
    for name, text in scripts.items():
        (bin_folder / name).write_text(start + text)
        (bin_folder / name).chmod(0o755)
    return folder


def main() -> None:
    with patch.object(gateway_main, "Admission", FixedAdmission):
        gateway_main.main()
