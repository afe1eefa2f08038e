"""Requests of LibreChat: a chat, and the title by a tool."""

from __future__ import annotations

import json

from harness import MODEL, feature
from recorded import Application

librechat = Application("librechat")


@feature("models")
def _() -> None:
    assert [model["id"] for model in librechat.get("/v1/models")["data"]] == [MODEL]


@feature("stream")
def _() -> None:
    chunks = librechat.stream("/v1/chat/completions", librechat.requests["chat"])
    assert any(chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@feature("tools")
def _() -> None:
    title = librechat.post("/v1/chat/completions", librechat.requests["title"])
    (call,) = title["choices"][0]["message"]["tool_calls"]
    assert isinstance(json.loads(call["function"]["arguments"])["title"], str)
