"""What a check finds: what is wrong, where, and the remedy, a sentence each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

SubjectT = TypeVar("SubjectT")


class Severity(StrEnum):
    #: Something does not work, or will not.
    ERROR = "error"
    #: It works, but an operator should know.
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    where: str
    what: str
    remedy: str
    severity: Severity = Severity.ERROR
    #: Name of the check that found it; `run_checks` sets it.
    check: str = ""


def run_checks(
    checks: Sequence[Callable[[SubjectT], Iterable[Finding]]], subject: SubjectT
) -> Iterator[Finding]:
    for check in checks:
        for finding in check(subject):
            yield named(check, finding)


def named(check: Callable[..., object], finding: Finding) -> Finding:
    return replace(finding, check=check.__name__.replace("_", "-"))
