"""The version of this software, as every process reports it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def software_version() -> str:
    """Reads a file, once; "unknown" where the code runs without an installation."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "unknown"
