"""Dialogues for prompts, read from JSON lines.

Lines have one of two forms, which a file may mix:

    {"messages_display": "user: ...\\nassistant: ...\\ntool: ..."}      as tau-bench publishes its dialogues
    {"id": "...", "group": "...", "turns": [{"role": "user", "content": "..."}, ...]}
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from tandem_cli.bench import BenchError

ROLES = ("system", "user", "assistant", "tool")

_DISPLAY_TURN = re.compile(r"^(user|assistant|tool|system): ", flags=re.MULTILINE)
_SURROGATE = re.compile("[\ud800-\udfff]")
#: tau-bench's simulated user ends with this mark.
_STOP_MARK = "###STOP###"


class DatasetError(BenchError):
    """The file cannot be used; names file, line and what is wrong."""


@dataclass(frozen=True)
class Turn:
    role: str
    content: str


@dataclass(frozen=True)
class Dialogue:
    """A conversation with at least one user turn. `group` names related dialogues."""

    id: str
    group: str
    turns: tuple[Turn, ...]

    def as_text(self) -> str:
        return "\n".join(f"{turn.role}: {turn.content}" for turn in self.turns)


def load_dialogues(path: Path | None) -> list[Dialogue]:
    """Reads a file, or the built-in sample. Raises DatasetError."""
    if path is None:
        return sample_dialogues()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error
    return parse_dialogues(text, str(path))


def sample_dialogues() -> list[Dialogue]:
    """The short customer-service dialogues that come with Tandem."""
    data = resources.files(__package__) / "data" / "dialogues.jsonl"
    return parse_dialogues(data.read_text(encoding="utf-8"), "built-in sample")


def sample_policy() -> str:
    """The policy that the built-in dialogues follow; a ready system prompt."""
    return (resources.files(__package__) / "data" / "policy.md").read_text(encoding="utf-8")


def parse_dialogues(text: str, origin: str) -> list[Dialogue]:
    """Dialogues of JSON lines; `origin` names them in errors. Raises DatasetError."""
    dialogues = [
        _parse_line(line, number, origin)
        # Not splitlines(), which also splits at U+2028 and the like, which JSON strings may contain.
        for number, line in enumerate(text.split("\n"), start=1)
        if line.strip()
    ]
    if not dialogues:
        raise DatasetError(f"{origin} holds no dialogue")
    return dialogues


def _parse_line(line: str, number: int, origin: str) -> Dialogue:
    where = f"{origin}:{number}"
    try:
        raw = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DatasetError(f"{where}: expected an object")
    if isinstance(raw.get("messages_display"), str):
        identity, group, turns = str(number), "", _parse_display(raw["messages_display"])
    elif isinstance(raw.get("turns"), list):
        identity = str(number if raw.get("id") is None else raw["id"])
        group = "" if raw.get("group") is None else str(raw["group"])
        turns = tuple(_parse_turn(turn, where) for turn in raw["turns"])
    else:
        raise DatasetError(f"{where}: expected a key messages_display (text) or turns (list)")
    if not any(turn.role == "user" for turn in turns):
        raise DatasetError(f"{where}: the dialogue has no user's turn")
    if any(_SURROGATE.search(turn.content) for turn in turns):
        raise DatasetError(f"{where}: a turn holds half of a surrogate pair; write the whole pair")
    return Dialogue(identity, group, turns)


def _parse_turn(raw: object, where: str) -> Turn:
    if not isinstance(raw, dict) or raw.get("role") not in ROLES or not isinstance(raw.get("content"), str):
        raise DatasetError(f"{where}: a turn needs a role ({', '.join(ROLES)}) and a text content")
    return Turn(raw["role"], raw["content"])


def _parse_display(text: str) -> tuple[Turn, ...]:
    """Splits a text at lines that begin with a role."""
    _, *parts = _DISPLAY_TURN.split(text)
    turns = (
        Turn(role, content.replace(_STOP_MARK, "").strip())
        for role, content in zip(parts[::2], parts[1::2], strict=True)
    )
    # "None" is an assistant turn that only calls a tool.
    return tuple(
        turn for turn in turns if turn.content and not (turn.role == "assistant" and turn.content == "None")
    )
