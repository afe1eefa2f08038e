"""The result of a check: the fault, its place and its remedy, a sentence each."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    #: Something does not work, or will not.
    ERROR = "error"
    #: The system works, but an operator should know.
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    where: str
    what: str
    remedy: str
    severity: Severity = Severity.ERROR
    #: Name of the check that found it; the examination sets it.
    check: str = ""
