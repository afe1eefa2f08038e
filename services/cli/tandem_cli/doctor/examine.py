"""Runs all checks of manifests, or all checks and trials of a running system."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from tandem_cli.doctor.finding import Finding
from tandem_cli.doctor.lifecycle_checks import LIFECYCLE_CHECKS
from tandem_cli.doctor.manifests import Objects
from tandem_cli.doctor.probes import PROBES
from tandem_cli.doctor.settings_checks import READABLE_CHECKS, SETTINGS_CHECKS
from tandem_cli.doctor.system import System
from tandem_cli.doctor.system_checks import SYSTEM_CHECKS

SubjectT = TypeVar("SubjectT")
MANIFEST_CHECKS = (*READABLE_CHECKS, *SETTINGS_CHECKS, *LIFECYCLE_CHECKS)
NUM_SYSTEM_CHECKS = len(SYSTEM_CHECKS) + len(PROBES)


def examine_manifests(objects: Objects) -> list[Finding]:
    """Stops after settings that cannot be read, because other checks need their values."""
    findings = run_checks(READABLE_CHECKS, objects)
    if any(one.check == "refused-setting" for one in findings):
        return findings
    return findings + run_checks((*SETTINGS_CHECKS, *LIFECYCLE_CHECKS), objects)


async def examine_system(system: System) -> list[Finding]:
    """Runs trials one after the other, so that they add little load."""
    trials = [_named(probe, finding) for probe in PROBES async for finding in probe(system)]
    return run_checks(SYSTEM_CHECKS, system) + trials


def run_checks(checks: Sequence[Callable[[SubjectT], Iterable[Finding]]], subject: SubjectT) -> list[Finding]:
    return [_named(check, finding) for check in checks for finding in check(subject)]


def _named(check: Callable[..., object], finding: Finding) -> Finding:
    return replace(finding, check=check.__name__.replace("_", "-"))
