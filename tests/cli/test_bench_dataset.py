"""Dialogues from JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tandem_cli.bench.dataset import (
    DatasetError,
    Dialogue,
    Turn,
    load_dialogues,
    parse_dialogues,
    sample_dialogues,
    sample_policy,
)

DISPLAY = (
    "user: Hi, two things:\n1. my order\n2. user: is no turn here"
    "\nassistant: None"
    '\ntool: {"a": 1}'
    "\nassistant: Done: yes\n\n- really"
    "\nuser: Thanks ###STOP###"
    "\nuser: ###STOP###"
)


def test_displayed_messages_split_where_a_line_begins_with_a_role() -> None:
    (dialogue,) = parse_dialogues(json.dumps({"messages_display": DISPLAY}), "x")
    assert dialogue.turns == (
        Turn("user", "Hi, two things:\n1. my order\n2. user: is no turn here"),
        Turn("tool", '{"a": 1}'),
        Turn("assistant", "Done: yes\n\n- really"),
        Turn("user", "Thanks"),
    )


def test_turns_are_unchanged_and_blank_lines_skipped(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}]
    path = tmp_path / "d.jsonl"
    path.write_text("\n" + json.dumps({"id": "a", "group": "g", "turns": turns}) + "\n\n")
    assert load_dialogues(path) == [Dialogue("a", "g", (Turn("user", "Hello"), Turn("assistant", "Hi")))]


def test_any_line_of_the_format_is_read(tmp_path: Path) -> None:
    """A byte-order mark, Windows line ends, no id or group, and line separators within JSON strings."""
    turns = '[{"role": "user", "content": "a\u2028b\u0085c"}]'
    path = tmp_path / "d.jsonl"
    path.write_bytes(
        b"\xef\xbb\xbf"
        + f'{{"id": null, "group": null, "turns": {turns}}}\r\n{{"id": 7, "turns": {turns}}}\r\n'.encode()
    )
    one, other = load_dialogues(path)
    assert (one.id, one.group, other.id, other.group) == ("1", "", "7", "")
    assert one.turns == other.turns == (Turn("user", "a\u2028b\u0085c"),)


def test_a_malformed_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"turns": [{"role": "user", "content": "x"}]}\n\n{"turns": 3}\n')
    with pytest.raises(DatasetError, match=r"d\.jsonl:3: expected a key") as error:
        load_dialogues(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "d:1: no JSON"),
        ("[]", "d:1: expected an object"),
        ('{"text": "x"}', "d:1: expected a key messages_display"),
        ('{"turns": [{"role": "chef", "content": "x"}]}', "d:1: a turn needs a role"),
        ('{"turns": [{"role": "user"}]}', "d:1: a turn needs a role"),
        ('{"messages_display": "assistant: x"}', "d:1: the dialogue has no user's turn"),
        ("[" * 100_000, "d:1: no JSON"),
        (r'{"turns": [{"role": "user", "content": "\ud800"}]}', "d:1: a turn holds half of a surrogate pair"),
        ("", "d holds no dialogue"),
    ],
)
def test_a_line_without_a_dialogue_is_named(line: str, complaint: str) -> None:
    with pytest.raises(DatasetError, match=complaint):
        parse_dialogues(line, "d")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="nowhere"):
        load_dialogues(tmp_path / "nowhere.jsonl")


def test_the_built_in_sample_is_usable() -> None:
    dialogues = sample_dialogues()
    assert len(dialogues) == 12
    assert len({dialogue.id for dialogue in dialogues}) == 12
    assert all(dialogue.turns[-1].role == "assistant" for dialogue in dialogues)
    assert "Returns" in sample_policy()
