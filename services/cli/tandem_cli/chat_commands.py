"""The commands of `tandem chat`: lines that begin with a slash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tandem_cli.chat import Conversation


HELP = """\
/clear          forget the conversation, keep the system prompt
/system TEXT    set the system prompt; without TEXT: show it; /system none: remove it
/save FILE      write the conversation to FILE, as JSON that /v1/chat/completions takes as messages
/exit, /quit    leave; so do Ctrl-D and Ctrl-C"""


def run(conversation: Conversation, line: str) -> str | None:
    """Returns the reply to show; None: exit."""
    name, _, rest = line.partition(" ")
    rest = rest.strip()
    match name:
        case "/help" | "/?":
            return HELP
        case "/exit" | "/quit":
            return None
        case "/clear":
            conversation.clear()
            return "The conversation is forgotten."
        case "/system":
            return _system(conversation, rest)
        case "/save":
            return _save(conversation, rest)
    return f"{name} is no command; /help lists them. To send a text with a slash, begin it with a space."


def _system(conversation: Conversation, text: str) -> str:
    if text:
        conversation.system = "" if text == "none" else text
    return f"system prompt: {conversation.system or 'none'}"


def _save(conversation: Conversation, name: str) -> str:
    if not name:
        return "/save needs a file name."
    path = Path(name).expanduser()
    messages = [{"role": message.role, "content": message.content} for message in conversation.messages]
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(messages, file, indent=2, ensure_ascii=False)
            file.write("\n")
    except FileExistsError:
        return f"{path} exists already; choose another name."
    except OSError as error:
        return f"{path} cannot be written ({error.strerror})."
    return f"{len(messages)} messages saved to {path}"
