"""The tools that a request offers, and whether the model may or must call them."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem_core.errors import InvalidRequestError, quoted
from tandem_core.model.conversation import MAX_JSON_LEVELS, Json, Tool, json_levels

from tandem_gateway.tools.schema import check_well_formed

#: OpenAI's limit.
MAX_TOOLS = 128
#: Anthropic's limit; OpenAI's is 64.
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
#: Limit on all definitions together, as JSON; templates add up to hundreds of spaces per value.
MAX_TOOLS_BYTES = 512 * 1024


class Mode(enum.Enum):
    """`tool_choice` of the OpenAI API. A named tool is REQUIRED with this tool alone."""

    NONE = "none"
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True)
class ToolChoice:
    """`tools`: the tools that the model sees and may call; empty with Mode.NONE."""

    mode: Mode = Mode.NONE
    tools: tuple[Tool, ...] = ()
    #: Whether an answer may have several calls.
    is_parallel: bool = True
    #: Whether calls are shown as the older `function_call`.
    as_function_call: bool = False

    @classmethod
    def of(
        cls, tools: Sequence[Tool], mode: Mode, *, name: str | None = None, is_parallel: bool = True
    ) -> ToolChoice:
        """`name`: the one tool that must be called. Raises InvalidRequestError."""
        offered = {tool.name: tool for tool in tools}
        if name is not None and name not in offered:
            known = ", ".join(list(offered)[:10]) or "none"
            raise InvalidRequestError(
                "tool_choice", f"names {quoted(name)}, which is not in tools ({known}); name one of them"
            )
        if not tools and mode is Mode.REQUIRED:
            raise InvalidRequestError("tool_choice", "is 'required', but tools is empty; send tools")
        if not tools or mode is Mode.NONE:
            return cls()
        if name is not None:
            return cls(Mode.REQUIRED, (offered[name],), is_parallel=False)
        return cls(mode, tuple(tools), is_parallel)


NO_TOOLS = ToolChoice()


def check_tools(definitions: Sequence[Mapping[str, Json] | None], field: str = "tools") -> tuple[Tool, ...]:
    """Checks JSON definitions of tools, {"type": "function", "function": {...}}; None: one that is left out.

    Raises InvalidRequestError naming the field, its limit and the remedy.
    """
    if len(definitions) > MAX_TOOLS:
        raise InvalidRequestError(
            field, f"{len(definitions)} tools are over the limit of {MAX_TOOLS}; send fewer"
        )
    seen: set[str] = set()
    num_bytes = 0
    for index, definition in enumerate(definitions):
        if definition is None:
            continue
        where = f"{field}[{index}]"
        check_levels(where, definition)
        name = _check_tool(where, definition)
        if name in seen:
            raise InvalidRequestError(f"{where}.function.name", f"{quoted(name)} is used twice; rename one")
        seen.add(name)
        num_bytes += len(json.dumps(definition, ensure_ascii=False).encode())
    if num_bytes > MAX_TOOLS_BYTES:
        raise InvalidRequestError(
            field, f"{num_bytes} bytes are over the limit of {MAX_TOOLS_BYTES}; send fewer or shorter ones"
        )
    return tuple(Tool(definition) for definition in definitions if definition is not None)


def check_levels(field: str, value: Json) -> None:
    """Raises InvalidRequestError for a JSON value that is nested too deeply."""
    if (levels := json_levels(value)) > MAX_JSON_LEVELS:
        raise InvalidRequestError(
            field, f"has {levels} levels of JSON, over the limit of {MAX_JSON_LEVELS}; send a flatter value"
        )


def _check_tool(where: str, definition: Mapping[str, Json]) -> str:
    """Returns the tool's name. Raises InvalidRequestError."""
    kind = definition.get("type")
    if kind != "function":
        shown = quoted(kind) if isinstance(kind, str) else "missing"
        raise InvalidRequestError(f"{where}.type", f"is {shown}; only tools of type 'function' are supported")
    function = definition.get("function")
    if not isinstance(function, Mapping):
        raise InvalidRequestError(f"{where}.function", "is missing; send an object with a name")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        shown = quoted(name) if isinstance(name, str) else "missing"
        raise InvalidRequestError(
            f"{where}.function.name", f"is {shown}; use 1 to 128 letters, digits, _ and -"
        )
    if not isinstance(function.get("description"), str | None):
        raise InvalidRequestError(f"{where}.function.description", "is not a string; send one")
    if not isinstance(function.get("strict"), bool | None):
        raise InvalidRequestError(f"{where}.function.strict", "is neither true nor false; send one of them")
    parameters = function.get("parameters")
    if parameters is not None:
        at = f"{where}.function.parameters"
        if not isinstance(parameters, Mapping):
            raise InvalidRequestError(at, "is not a JSON schema; send an object such as {'type': 'object'}")
        if parameters.get("type") not in (None, "object"):
            raise InvalidRequestError(f"{at}.type", "must be 'object', since arguments have names")
        check_well_formed(at, parameters)
    return name
