"""Requests of Open WebUI: the list of models, a chat, and the task that names it."""

from __future__ import annotations

from harness import MODEL, feature
from recorded import Application

webui = Application("open_webui")


@feature("models")
def _() -> None:
    (model,) = webui.get("/v1/models")["data"]
    assert model["id"] == MODEL


@feature("stream")
def _() -> None:
    chunks = webui.stream("/v1/chat/completions", webui.requests["chat"])
    assert any(chunk["choices"][0]["delta"].get("content") for chunk in chunks if chunk["choices"])
    assert chunks[-1]["usage"]["completion_tokens"] > 0


@feature("chat")
def _() -> None:
    title = webui.post("/v1/chat/completions", webui.requests["title"])
    assert isinstance(title["choices"][0]["message"]["content"], str)
