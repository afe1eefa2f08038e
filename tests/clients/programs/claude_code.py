"""Requests of Claude Code: a turn, the results of its tools, and the small request for a title."""

from __future__ import annotations

import json
from typing import Any

from harness import feature
from recorded import Application

SNIPPET = """
# snippet sh
export ANTHROPIC_BASE_URL=$URL ANTHROPIC_AUTH_TOKEN=none
export ANTHROPIC_MODEL=$MODEL ANTHROPIC_SMALL_FAST_MODEL=$MODEL
claude
# end
"""
claude = Application("claude_code")
TURN, TITLE = claude.requests["turn"], claude.requests["title"]
RESULTS = [*TURN["messages"], *claude.requests["tool_results"]]


def text_of(body: dict[str, Any]) -> str:
    """The text of a streamed message, whose events are checked."""
    start, *events, delta, stop = (
        event for event in claude.stream("/v1/messages?beta=true", body) if event["type"] != "ping"
    )
    assert (start["type"], delta["type"], stop["type"]) == ("message_start", "message_delta", "message_stop")
    assert delta["delta"]["stop_reason"] in ("end_turn", "max_tokens")
    assert delta["usage"]["output_tokens"] > 0
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    return "".join(part["text"] for part in deltas if part["type"] == "text_delta")


@feature("messages")
def _() -> None:
    text_of(TURN)


@feature("tools")
def _() -> None:
    text_of({**TURN, "messages": RESULTS})


@feature("schema")
def _() -> None:
    assert isinstance(json.loads(text_of(TITLE))["isNewTopic"], bool)


@feature("count_tokens")
def _() -> None:
    asked = {key: TURN[key] for key in ("system", "tools", "thinking")}
    short, long = (
        claude.post("/v1/messages/count_tokens?beta=true", {**asked, "messages": messages})["input_tokens"]
        for messages in (TURN["messages"], RESULTS)
    )
    assert 0 < short < long
