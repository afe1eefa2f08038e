"""The compiled kernels of this machine, and the choice of one of them for a block of a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem_kernels import native

#: Instruction sets whose compiled kernels are here and run on this processor.
NATIVE = [
    name
    for name in native.instruction_sets()
    if Path(native.__file__).with_name(f"tandem_{name}.so").exists()
]


@contextmanager
def native_library(name: str | None) -> Iterator[None]:
    """Lets the kernels use one instruction set's library, none of them ("off"), or the chosen one (None)."""
    chosen = native.LIBRARY
    if name is not None:
        native.LIBRARY = None if name == "off" else native.load(name)
    try:
        yield
    finally:
        native.LIBRARY = chosen
