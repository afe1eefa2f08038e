"""The slash commands of `tandem chat` change the conversation."""

from __future__ import annotations

import json
from pathlib import Path

import grpc
import pytest
from tandem_cli.chat import ChatOptions, Conversation, open_stub
from tandem_cli.chat_commands import run
from tandem_proto.v1 import gateway_pb2


@pytest.fixture
def conversation() -> Conversation:
    options = ChatOptions("127.0.0.1:1", "Be brief.", 0.0, 8, None, "interactive", "", None)
    conversation = Conversation(options, open_stub(grpc.insecure_channel("127.0.0.1:1")))
    conversation.messages.append(gateway_pb2.ChatMessage(role="user", content="Hi ✓"))
    conversation.messages.append(gateway_pb2.ChatMessage(role="assistant", content="Hello."))
    return conversation


def test_help_names_every_command(conversation: Conversation) -> None:
    shown = run(conversation, "/help")
    assert shown is not None
    assert all(f"/{name}" in shown for name in ("clear", "system", "save", "exit"))


def test_clear_forgets_all_but_the_system_prompt(conversation: Conversation) -> None:
    run(conversation, "/clear")
    assert [(m.role, m.content) for m in conversation.messages] == [("system", "Be brief.")]


def test_system_shows_replaces_and_removes_the_prompt(conversation: Conversation) -> None:
    assert run(conversation, "/system") == "system prompt: Be brief."
    assert run(conversation, "/system Be kind.") == "system prompt: Be kind."
    assert [m.role for m in conversation.messages] == ["system", "user", "assistant"]
    assert run(conversation, "/system none") == "system prompt: none"
    assert [m.role for m in conversation.messages] == ["user", "assistant"]
    run(conversation, "/clear")
    assert conversation.messages == []


def test_save_writes_messages_that_the_api_takes_and_overwrites_nothing(
    conversation: Conversation, tmp_path: Path
) -> None:
    path = tmp_path / "talk.json"
    assert run(conversation, f"/save {path}") == f"3 messages saved to {path}"
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written[:2] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi ✓"},
    ]
    assert run(conversation, f"/save {path}") == f"{path} exists already; choose another name."
    assert "cannot be written" in (run(conversation, f"/save {tmp_path}/no/such/folder") or "")
    assert "needs a file name" in (run(conversation, "/save") or "")


def test_exit_ends_the_chat_and_a_misspelling_is_named(conversation: Conversation) -> None:
    assert run(conversation, "/exit") is None
    assert "/sytem is no command" in (run(conversation, "/sytem x") or "")
    assert len(conversation.messages) == 3
