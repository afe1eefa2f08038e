"""The operator's SLO classes, from a JSON file that replaces the default ones:

    {"voice": {"ttft_ms": 800, "tpot_ms": 60, "strict": true}, "chat": {"ttft_ms": 1500}, "batch": {}}

The first class is the one of requests that name none. An objective that is left out is none. `strict`: a
request is refused rather than served late on a machine that could not meet it even without load. `waits`: a
request that would be late waits rather than be refused.
`ttft_slowdown`, `tpot_slowdown` and `e2e_slowdown` are relative objectives: {"ttft_slowdown": 5} is five
times what such a prompt takes without load, and with "ttft_ms" too the longer of both counts.

All gateways of a system get the same file, and `tandem bench` and deploy/observability/generate.py that file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    model_validator,
)
from tandem_core.slo import DEFAULT_SLO_CLASSES, LONGEST_OBJECTIVE_S, SloTarget

from tandem_service.validation import first_problem

#: Each class is a label of many series.
_MAX_CLASSES = 16
_MAX_SLOWDOWN = 10_000.0

_Name = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,31}$")]
_Milliseconds = Annotated[float, Field(gt=0, le=1000 * LONGEST_OBJECTIVE_S, allow_inf_nan=False)]

#: Less than what a request takes without load cannot be kept.
_Slowdown = Annotated[float, Field(ge=1, le=_MAX_SLOWDOWN, allow_inf_nan=False)]


class _Objectives(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    ttft_ms: _Milliseconds | None = None
    tpot_ms: _Milliseconds | None = None
    e2e_ms: _Milliseconds | None = None
    strict: bool = False
    waits: bool = False
    ttft_slowdown: _Slowdown | None = None
    tpot_slowdown: _Slowdown | None = None
    e2e_slowdown: _Slowdown | None = None

    @model_validator(mode="after")
    def _check_what_happens_to_late_requests(self) -> Self:
        if self.strict and self.waits:
            raise ValueError("strict refuses late requests, but waits queues them; set only one")
        return self


_CLASSES = TypeAdapter(Annotated[dict[_Name, _Objectives], Field(min_length=1, max_length=_MAX_CLASSES)])


class SloFileError(ValueError):
    """The file is missing or damaged; the message names the place and the remedy."""


class _DuplicateError(Exception):
    """A name that is twice in one object of JSON."""


def _without_duplicates(pairs: Sequence[tuple[str, object]]) -> None:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise _DuplicateError(name)


def load_slo_classes(path: Path | None) -> Mapping[str, SloTarget]:
    """The classes of a file by name, the default class first; None: Tandem's classes. Raises SloFileError."""
    if path is None:
        return DEFAULT_SLO_CLASSES
    try:
        content = path.read_bytes()
        entries = _CLASSES.validate_json(content)
        json.loads(content, object_pairs_hook=_without_duplicates)
    except OSError as error:
        raise SloFileError(f"the file of SLO classes {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problem = first_problem(error, _Objectives.model_fields, "the file")
        raise SloFileError(
            f'{path}: {problem}; give 1 to {_MAX_CLASSES} classes like {{"chat": {{"ttft_ms": 1000}}, '
            '"batch": {}}'
        ) from error
    except _DuplicateError as error:
        raise SloFileError(f"{path}: {error} is there twice; give each class and objective once") from error
    return {
        name: SloTarget(
            name,
            ttft_s=(entry.ttft_ms or 0.0) / 1000,
            tpot_s=(entry.tpot_ms or 0.0) / 1000,
            e2e_s=(entry.e2e_ms or 0.0) / 1000,
            is_strict=entry.strict,
            waits=entry.waits,
            ttft_slowdown=entry.ttft_slowdown or 0.0,
            tpot_slowdown=entry.tpot_slowdown or 0.0,
            e2e_slowdown=entry.e2e_slowdown or 0.0,
        )
        for name, entry in entries.items()
    }
