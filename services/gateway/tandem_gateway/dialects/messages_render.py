"""Renders a chat's answer for Anthropic's Messages API: one message, or a stream of typed events.

message_start
for each block    content_block_start, content_block_delta ..., content_block_stop
message_delta     stop reason and usage
message_stop
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

from pydantic_core import from_json
from tandem_core.errors import TandemError
from tandem_proto.v1 import answers_pb2

from tandem_gateway.dialects.chat_dialect import Rendered, TypedEventsRenderer
from tandem_gateway.dialects.openai_render import Json, error_json
from tandem_gateway.errors import presentation
from tandem_gateway.request import Event
from tandem_gateway.tools.answer_parser import AnswerDelta, CallDelta

#: Anthropic's types of errors by HTTP status; other statuses are invalid requests, or errors of the server.
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def anthropic_error(body: Json, http_status: int, request_id: str = "") -> Rendered:
    """Converts OpenAI's error object to Anthropic's; keeps `param` and `code`."""
    kind = "api_error" if http_status >= 500 else "invalid_request_error"
    error = {**cast(Rendered, body["error"]), "type": _ERROR_TYPES.get(http_status, kind)}
    if error["param"] == "thread":  # Anthropic's tool_runner then sends the request again without it
        error["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return {"type": "error", "error": error, **({"request_id": request_id} if request_id else {})}


class MessagesRenderer(TypedEventsRenderer):
    answer_kind = "message"
    _id_prefix = "msg_"

    def __init__(
        self, record: answers_pb2.AnswerRecord, model: str, token_bytes: Callable[[int], bytes]
    ) -> None:
        super().__init__(record, model, token_bytes)
        self._num_prompt = len(record.request.prompt_token_ids)
        self._shows_reasoning = record.shown.reasoning
        #: Kind of the open block, and number of blocks including it.
        self._open, self._num_blocks = "", 0
        self._ending: Rendered = {}

    def usage_chunk(self) -> Json:
        usage = _usage(cast(Rendered, super().usage_chunk()["usage"]))
        delta: Json = {"type": "message_delta", "delta": self._ending, "usage": usage}
        stop: Json = {"type": "message_stop"}
        return {"events": [delta, stop]}

    def whole(self, events: Sequence[Event]) -> Json:
        chat = cast(Rendered, super().whole(events))
        choice = chat["choices"][0]
        delta: AnswerDelta = choice["delta"]
        content: list[Rendered] = []
        if self._shows_reasoning and delta.reasoning:
            content.append({"type": "thinking", "thinking": delta.reasoning, "signature": ""})
        content += [
            {"type": "text", "text": part}
            if isinstance(part, str)
            else _tool_use(part, _parsed(part.arguments))
            for part in delta.parts
        ]
        return self._message(content, _stop(choice), _usage(chat["usage"]))

    def ping(self, *, has_ids: bool) -> bytes:
        return self.encode({"events": [{"type": "ping"}]})

    def encode_error(self, error: TandemError) -> bytes:
        return self.encode({"events": [anthropic_error(error_json(error), presentation(error).http_status)]})

    def _start(self) -> list[Rendered]:
        usage = {"input_tokens": self._num_prompt, "output_tokens": 0}
        return [{"type": "message_start", "message": self._message([], {}, usage)}]

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[Rendered]:
        if not text or (kind == "reasoning" and not self._shows_reasoning):
            return []
        if kind == "reasoning":
            events = self._block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*events, self._delta_event({"type": "thinking_delta", "thinking": text})]
        events = self._block("text", {"type": "text", "text": ""})
        return [*events, self._delta_event({"type": "text_delta", "text": text})]

    def _call(self, call: CallDelta) -> list[Rendered]:
        events: list[Rendered] = []
        if call.id:
            events += self._close()
            events += self._block("tool_use", _tool_use(call, {}))
        if call.arguments:
            events.append(self._delta_event({"type": "input_json_delta", "partial_json": call.arguments}))
        return events

    def _end(self, choice: Rendered) -> list[Rendered]:
        self._ending = _stop(choice)
        return self._close()

    def _block(self, kind: str, block: Rendered) -> list[Rendered]:
        """Opens a block, unless one of this kind is open."""
        if self._open == kind:
            return []
        events = self._close()
        self._open, self._num_blocks = kind, self._num_blocks + 1
        start = {"type": "content_block_start", "index": self._num_blocks - 1, "content_block": block}
        return [*events, start]

    def _close(self) -> list[Rendered]:
        if not self._open:
            return []
        self._open = ""
        return [{"type": "content_block_stop", "index": self._num_blocks - 1}]

    def _delta_event(self, delta: Rendered) -> Rendered:
        return {"type": "content_block_delta", "index": self._num_blocks - 1, "delta": delta}

    def _message(self, content: list[Rendered], stop: Rendered, usage: Rendered) -> Rendered:
        return {
            "id": self._head["id"],
            "type": "message",
            "role": "assistant",
            "model": self._head["model"],
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            **stop,
            "usage": usage,
        }


def _stop(choice: Rendered) -> Rendered:
    """Why the message ended; `stop_sequence` is set for a stop string of the caller."""
    sequence = choice.get("stop_reason")
    if isinstance(sequence, str) and choice["finish_reason"] == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": sequence}
    return {"stop_reason": _STOP_REASONS[choice["finish_reason"]], "stop_sequence": None}


def _tool_use(call: CallDelta, arguments: Rendered) -> Rendered:
    return {"type": "tool_use", "id": call.id, "name": call.name, "input": arguments}


def _parsed(arguments: str) -> Rendered:
    """The arguments as an object. Numbers that JSON cannot express become texts. What the token limit has cut
    is shown as far as it goes, as Anthropic's client shows a stream that ends there."""
    try:
        value = json.loads(arguments, parse_float=_number, parse_constant=str)
    except (ValueError, RecursionError):
        try:
            value = from_json(arguments, allow_partial=True, allow_inf_nan=False)
        except ValueError:  # no JSON, or very deep
            return {}
    return value if isinstance(value, dict) else {}


def _number(text: str) -> float | str:
    return value if math.isfinite(value := float(text)) else text


def _usage(chat: Rendered) -> Rendered:
    cached = chat["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": chat["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": chat["completion_tokens"],
        "tandem_receipt": chat["tandem_receipt"],
    }
