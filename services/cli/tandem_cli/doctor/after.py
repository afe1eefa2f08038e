"""All that is examined of a running system: what it says, then what the probes show."""

from __future__ import annotations

from tandem_cli.doctor.finding import Finding, run_checks
from tandem_cli.doctor.probes import run_probes
from tandem_cli.doctor.system import System
from tandem_cli.doctor.system_checks import SYSTEM_CHECKS


async def examine_system(system: System) -> list[Finding]:
    return [*run_checks(SYSTEM_CHECKS, system), *await run_probes(system)]
