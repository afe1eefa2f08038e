"""Sample values of the request types of the OpenAI and Anthropic SDKs: each field, and each alternative of
each union within, once."""

from __future__ import annotations

import collections.abc
import types
import typing
from collections.abc import Iterator
from typing import Any

import typing_extensions

#: Values of fields whose type says too little.
_SAMPLES: dict[str, Any] = {
    "role": "user", "schema": {"type": "object"}, "parameters": {"type": "object"}, "name": "find",
    "input_schema": {"type": "object"}, "arguments": "{}", "definition": 'start: "a"', "logit_bias": {"5": 1},
    "url": "data:,", "command": ["ls"], "commands": ["ls"], "top_p": 0.5, "max_tokens": 4, "tools": [],
    "max_completion_tokens": 4, "max_output_tokens": 4, "n": 1, "best_of": 1, "budget_tokens": 1024,
}  # fmt: skip
_MAX_DEPTH = 7


def samples(kind: Any, depth: int = 0) -> Iterator[Any]:
    """Values of a type, one for each alternative within it; at least one."""
    kind = _plain(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if depth > _MAX_DEPTH:
        yield None
    elif origin in (typing.Union, types.UnionType):
        for one in args:
            if one is not type(None):
                yield from samples(one, depth)
    elif origin is typing.Literal:
        yield args[0]
    elif typing_extensions.is_typeddict(kind):
        yield from _objects(kind, depth)
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
        yield {"5": next(samples(args[1], depth + 1))}
    elif isinstance(origin, type) and issubclass(origin, collections.abc.Iterable):
        yield from ([value] for value in samples(args[0], depth + 1))
    elif getattr(origin, "__name__", kind) == "SequenceNotStr" or (origin is not None and args):
        yield [next(samples(args[0], depth + 1))]
    else:
        yield {bool: True, int: 1, float: 0.5, str: "x"}.get(kind, "x")


def fields(kind: Any) -> dict[str, Any]:
    """The types of a typed dictionary's fields."""
    return typing_extensions.get_type_hints(kind, include_extras=True)


def _plain(kind: Any) -> Any:
    while typing.get_origin(kind) in (
        typing.Annotated,
        typing_extensions.Required,
        typing_extensions.NotRequired,
    ):
        kind = typing.get_args(kind)[0]
    return kind


def _is_required(kind: Any) -> bool:
    while typing.get_origin(kind) is typing.Annotated:
        kind = typing.get_args(kind)[0]
    return typing.get_origin(kind) is typing_extensions.Required


def _objects(kind: Any, depth: int) -> Iterator[dict[str, Any]]:
    """With the required fields alone, and then each alternative of each field."""
    hints = fields(kind)
    least = {
        name: _SAMPLES.get(name, next(samples(hints[name], depth + 1)))
        for name in hints
        if _is_required(hints[name]) or name in ("type", "role")
    }
    if (role := hints.get("role")) is not None:
        least["role"] = next(samples(role))
    yield least
    for name, one in hints.items():
        if name in ("type", "role"):
            continue
        for value in [_SAMPLES[name]] if name in _SAMPLES else samples(one, depth + 1):
            if value != least.get(name):
                yield {**least, name: value}
