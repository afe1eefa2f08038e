"""The table of all types that can be served: for `tandem model list --families` and docs/models.md."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tandem_engine.models.executors import Executor, module_types
from tandem_engine.models.families import FAMILIES

#: The table in docs/models.md lies between these lines.
BEGIN, END = "<!-- types: benchmarks/decoder_types.py -->", "<!-- end of types -->"
TITLES = ("type", "executor", "P/D", "drafts", "bit-invariant", "proven by")


@dataclass(frozen=True)
class TypeRow:
    model_type: str
    executor: Executor
    #: Whether prefill pods compute its prompts.
    is_disaggregated: bool
    takes_drafts: bool
    #: Where results do not depend on the batch: a native model's, if all its layers are one compiled call.
    is_batch_invariant: str
    #: The tests that compare it with transformers.
    proven_by: str


def type_rows() -> Iterator[TypeRow]:
    """In order of their names."""
    modules = module_types()
    for name in sorted(FAMILIES.keys() | modules.keys()):
        if name in FAMILIES:
            yield TypeRow(name, Executor.NATIVE, True, True, "if compiled", "tests/engine/test_models_*")
        else:
            one = modules[name]
            yield TypeRow(
                name,
                Executor.TRANSFORMERS,
                is_disaggregated=not one.is_recurrent,
                takes_drafts=one.takes_drafts,
                is_batch_invariant="no",
                proven_by="test_module_types.py",
            )


def cells(row: TypeRow) -> tuple[str, ...]:
    flags = ["yes" if flag else "no" for flag in (row.is_disaggregated, row.takes_drafts)]
    return (row.model_type, row.executor.value, *flags, row.is_batch_invariant, row.proven_by)


def rows() -> Iterator[str]:
    """The table in Markdown."""
    yield f"| {' | '.join(TITLES)} |"
    yield "|---" * len(TITLES) + "|"
    for row in type_rows():
        yield f"| {' | '.join(cells(row))} |"
