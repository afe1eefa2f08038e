"""What a format of tool calls looks like. One file each defines the formats themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Opener:
    """How calls begin and end.

    `is_certain`: the marker means a call whatever its name; else only a known tool's name makes it one.
    """

    marker: str
    closer: str = ""
    is_certain: bool = True


@dataclass(frozen=True)
class CallSyntax:
    """How the model is to write calls when it has to: begin, head call tail, between, head call tail, end.

    A call is `"name": ..., KEY: ...`, or with a `name_end` the name, that, and the arguments.
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
    #: An answer may begin with a call's object, without a marker.
    takes_bare_object: bool = False
    #: Between objects without a new marker.
    separator: str = ""
    #: `marker name[ARGS]{...}`, beside objects.
    takes_named_arguments: bool = False
    #: Ids of 9 letters and digits.
    has_short_ids: bool = False

    @property
    def markers(self) -> tuple[str, ...]:
        """Those that may be tokens of their own."""
        return tuple(m for opener in self.openers for m in (opener.marker, opener.closer) if m)
