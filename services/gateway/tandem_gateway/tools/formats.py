"""The formats in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace

#: Characters held back while they may be whitespace next to a marker; earlier ones are shown.
MAX_HELD_CHARS = 64


@dataclass(frozen=True)
class Opener:
    """How calls begin and end.

    `is_certain`: text after the marker is a call whatever its name; otherwise only if the name is a known
    tool's.
    """

    marker: str
    closer: str = ""
    is_certain: bool = True


@dataclass(frozen=True)
class CallSyntax:
    """How a grammar makes the model write calls: begin, head call tail, between, head call tail, end.

    A call is `"name": ..., KEY: ...`, or with a `name_end` the name, the `name_end`, and the arguments.
    """

    head: str
    tail: str
    between: str = ""
    begin: str = ""
    end: str = ""
    arguments_key: str = "arguments"
    name_end: str = ""


@dataclass(frozen=True)
class ToolFormat:
    name: str
    openers: tuple[Opener, ...]
    syntax: CallSyntax
    #: Whether an answer may begin with a call's object, without a marker.
    takes_bare_object: bool = False
    #: Separates objects without a new marker.
    separator: str = ""
    #: Whether `marker name[ARGS]{...}` is a call in addition to objects.
    takes_named_arguments: bool = False
    #: Whether ids have 9 letters and digits.
    has_short_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Markers that may be single tokens."""
        return tuple(m for opener in self.openers for m in (opener.marker, opener.closer) if m)


#: Hermes, Qwen2.5, Qwen3, SmolLM2 and SmolLM3, and models without tools in their template:
#:
#:     <tool_call>
#:     {"name": "find_order", "arguments": {"id": "#W1"}}
#:     </tool_call>
#:
#: SmolLM2's larger models put a list of such objects between the markers. Small models sometimes forget the
#: markers, or write others; then only a tool that the request offers counts as a call.
HERMES = ToolFormat(
    "hermes",
    openers=(
        Opener("<tool_call>", "</tool_call>"),
        Opener("<tools>", "</tools>", is_certain=False),
        Opener("```json", "```", is_certain=False),
        Opener("```xml", "```", is_certain=False),
    ),
    syntax=CallSyntax(head="<tool_call>\n{", tail="}\n</tool_call>", between="\n"),
    takes_bare_object=True,
)


#: Llama 3.1 and later: an object as the whole answer, or after a special token; several are joined by `;`.
#:
#: {"name": "find_order", "parameters": {"id": "#W1"}}
#: <|python_tag|>{"name": "find_order", "parameters": {"id": "#W1"}}
LLAMA3 = ToolFormat(
    "llama3",
    openers=(Opener("<|python_tag|>"),),
    syntax=CallSyntax(head="{", tail="}", between="; ", arguments_key="parameters"),
    takes_bare_object=True,
    separator=";",
)


#: Mistral: a list after a special token, or in newer models a token before each call.
#:
#: [TOOL_CALLS] [{"name": "find_order", "arguments": {"id": "#W1"}}]
#: [TOOL_CALLS]find_order[ARGS]{"id": "#W1"}[TOOL_CALLS]cancel[CALL_ID]a1b2c3d4e[ARGS]{}
MISTRAL = ToolFormat(
    "mistral",
    openers=(Opener("[TOOL_CALLS]"),),
    syntax=CallSyntax(head="{", tail="}", between=", ", begin="[TOOL_CALLS] [", end="]"),
    takes_named_arguments=True,
    has_short_ids=True,
)
#: The newer format; the parser reads both in the same way.
MISTRAL_ARGS = replace(
    MISTRAL, name="mistral-args", syntax=CallSyntax(head="[TOOL_CALLS]", tail="", name_end="[ARGS]")
)

FORMATS = {one.name: one for one in (HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS)}
