"""The version of this software, as every process reports it."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version


@cache
def software_version() -> str:
    """Reads a file, once."""
    return version("tandem")
