"""The grammar of an answer that must call tools, or whose calls must follow their schemas.

    required:  thinking? call (between call)*
    otherwise: thinking? text without markers, or the requested content; then calls, or none

It is one Lark grammar for llguidance, with the tools' schemas inside. Tokens for markers are named by id,
because the model was trained on these tokens, not on their spelling.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from tandem_core.errors import InvalidRequestError
from tandem_core.guide import MAX_GUIDE_BYTES, Guide, GuideKind
from tandem_core.model.conversation import Json, Tool

from tandem_gateway.errors import UnsupportedFieldError
from tandem_gateway.tools.formats import ToolFormat
from tandem_gateway.tools.reasoning import CLOSE, OPEN

_ANY_OBJECT: Mapping[str, Json] = {"type": "object"}


#: The beginning of an object that may be a call without the format's markers.
_NAMED = r'\s*\{\s*"name"\s*:'


class Thinking(enum.Enum):
    """Reasoning before the answer."""

    POSSIBLE = enum.auto()
    #: The prompt ends with the opening marker.
    OPENED = enum.auto()


async def enforced_schemas(
    tools: Sequence[Tool], fault: Callable[[Guide], Awaitable[str]], *, is_required: bool
) -> list[Mapping[str, Json]]:
    """The schema to enforce for each tool's arguments: any object if the tool is not strict and its own
    schema need not or cannot be enforced. `fault`: why a guide cannot be used, or "".

    Raises InvalidRequestError naming the tool whose schema cannot be enforced.
    """
    sources = [
        json.dumps(tool.parameters, ensure_ascii=False) if tool.is_strict or is_required else ""
        for tool in tools
    ]
    num_bytes = sum(len(source.encode()) for source in sources)
    if num_bytes > MAX_GUIDE_BYTES:
        raise InvalidRequestError(
            "tools",
            f"have {num_bytes} bytes of schemas to enforce, over the limit of {MAX_GUIDE_BYTES}; send fewer "
            "or shorter ones, or make fewer strict",
        )
    schemas: list[Mapping[str, Json]] = []
    for index, (tool, source) in enumerate(zip(tools, sources, strict=True)):
        reason = await fault(Guide(GuideKind.JSON_SCHEMA, source)) if source else ""
        if reason and tool.is_strict:
            raise InvalidRequestError(
                f"tools[{index}].function.parameters",
                f"cannot be enforced ({reason}); change it, or leave out strict: true",
            )
        schemas.append({**tool.parameters, "type": "object"} if source and not reason else _ANY_OBJECT)
    return schemas


def tool_guide(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    schemas: Sequence[Mapping[str, Json]],
    token_id: Callable[[str], int | None],
    *,
    is_required: bool,
    is_single: bool,
    content: Guide | None,
    thinking: Thinking | None,
) -> Guide:
    """`schemas`: of the tools' arguments; `token_id`: returns the id of a marker that is a single token;
    `content`: the guide without calls. Raises InvalidRequestError.
    """
    writer = _Writer(tool_format, token_id)
    syntax, marker = tool_format.syntax, tool_format.openers[0].marker
    heads, tail = [], writer.text(syntax.tail)
    for index, tool in enumerate(tools):
        writer.rule(f"arguments_{index}", _json(schemas[index]))
        named = f'"name": {json.dumps(tool.name)}, "{syntax.arguments_key}": '
        heads.append(syntax.head + (tool.name + syntax.name_end if syntax.name_end else named))
    writer.choice("call", [f"{writer.text(h)} arguments_{i} {tail}" for i, h in enumerate(heads)])
    more = "" if is_single else f" ({writer.text(syntax.between)} call)*"
    writer.rule("calls", f"{writer.text(syntax.begin)} call{more} {writer.text(syntax.end)}")
    if is_required:
        answer = "calls"
    elif content is not None:
        writer.rule("content", _content(content))
        answer = "(content | calls)"
    elif syntax.head == "{" and not syntax.begin:
        # Text that begins like a call counts as a call.
        writer.rule("TEXT", rf"{_without(_escaped(marker))} & /\s*([^{{\s](.|\n)*)?/")
        answer = "(TEXT | calls)"
    else:
        loose = writer.loose_calls(tool_format, [tool.name for tool in tools])
        text = " & ".join([_without(_escaped(marker)), *loose.excluded])
        writer.rule("TEXT", text)
        if writer.is_token(marker):
            answer = f"(TEXT calls?{loose.alternative})"
        else:
            # Text up to the marker is one lexeme; the rest of the first call follows it.
            writer.rule("text_and_marker[lazy]", rf"/(.|\n)*{_escaped(marker)}/")
            rests = [(syntax.begin + head).removeprefix(marker) for head in heads]
            writer.choice("rest", [f"{writer.text(r)} arguments_{i} {tail}" for i, r in enumerate(rests)])
            end = writer.text(syntax.end)
            answer = f"(TEXT | text_and_marker rest{more} {end}{loose.alternative})"
    writer.rule("start", f"{writer.thinking(thinking)} {answer}")
    try:
        return Guide(GuideKind.LARK, writer.source(), "tools")
    except InvalidRequestError as error:
        raise InvalidRequestError("tools", f"are too long for a grammar: {error}") from error


def _json(schema: Mapping[str, Json]) -> str:
    return "%json " + json.dumps(schema, ensure_ascii=False)


class _LooseCalls(NamedTuple):
    #: Patterns excluded from text outside of calls.
    excluded: tuple[str, ...]
    alternative: str


class _Writer:
    """Collects rules, and writes texts with markers for them."""

    def __init__(self, tool_format: ToolFormat, token_id: Callable[[str], int | None]) -> None:
        markers = (*tool_format.markers, tool_format.syntax.name_end, OPEN, CLOSE)
        ids = {marker: token_id(marker) for marker in markers if marker}
        self._ids = {marker: number for marker, number in ids.items() if number is not None}
        self._markers = re.compile("(" + "|".join(map(re.escape, self._ids)) + ")" if self._ids else "(?!)")
        self._rules: list[str] = []

    def rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body}")

    def choice(self, name: str, bodies: Sequence[str]) -> None:
        self.rule(name, " | ".join(bodies))

    def is_token(self, marker: str) -> bool:
        return marker in self._ids

    def source(self) -> str:
        return "\n".join(self._rules) + "\n"

    def text(self, text: str) -> str:
        """The exact text, with markers as their tokens."""
        pieces = [piece for piece in self._markers.split(text) if piece]
        return " ".join(
            f"<[{self._ids[piece]}]>" if piece in self._ids else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )

    def loose_calls(self, tool_format: ToolFormat, names: Sequence[str]) -> _LooseCalls:
        """Rules for calls without the format's markers, which small models write; schemas apply to them
        too."""
        openers = [opener for opener in tool_format.openers if not opener.is_certain]
        if not openers:
            return _LooseCalls((), "")
        begin = "|".join(_escaped(opener.marker) for opener in openers)
        end = "|".join(sorted({_escaped(opener.closer) for opener in openers}))
        self.rule("loose[lazy]", rf"/((.|\n)*({begin}))?{_NAMED}/")
        for index, name in enumerate(names):
            self.rule(f"LOOSE_{index}", rf'/\s*"{_escaped(name)}"\s*,\s*"(arguments|parameters)"\s*:\s*/')
        self.choice("loose_call", [f"LOOSE_{index} arguments_{index}" for index in range(len(names))])
        self.rule("LOOSE_END", rf"/\s*\}}\s*({end})?/")
        excluded = (rf"~/(.|\n)*({begin}){_NAMED}(.|\n)*/", rf"~/{_NAMED}(.|\n)*/")
        return _LooseCalls(excluded, " | loose loose_call LOOSE_END")

    def thinking(self, thinking: Thinking | None) -> str:
        if thinking is None:
            return ""
        if self.is_token(CLOSE):
            self.rule("THOUGHT", _without(_escaped(CLOSE)))
            thought = f"THOUGHT {self.text(CLOSE)}"
        else:
            self.rule("thought[lazy]", rf"/(.|\n)*{_escaped(CLOSE)}/")
            thought = "thought"
        self.rule("SPACE", r"/\n*/")
        if thinking is Thinking.OPENED:
            return f"{thought} SPACE"
        return f"({self.text(OPEN)} {thought} SPACE)?"


def _content(content: Guide) -> str:
    if content.kind is not GuideKind.JSON_SCHEMA:
        raise UnsupportedFieldError(
            "tools", "cannot be combined with a regex, choice or grammar; use a JSON schema"
        )
    schema = json.loads(content.source)
    return _json(schema if isinstance(schema, dict) else {})


def _without(pattern: str) -> str:
    """Any text without a match of the pattern."""
    return rf"/(.|\n)*/ & ~/(.|\n)*{pattern}(.|\n)*/"


def _escaped(text: str) -> str:
    """The text as a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")
