"""Renders a chat's answer for OpenAI's Responses API: one object, or a stream of typed events.

    response.created, response.in_progress
    for each item    response.output_item.added
                     a message: response.content_part.added, response.output_text.delta ..., .done,
                                response.content_part.done
                     a tool call: response.function_call_arguments.delta ..., .done
                     of a custom tool: response.custom_tool_call_input.delta, .done
                     response.output_item.done
    response.completed, or response.incomplete at the limit of tokens

A resumed stream also renders what the client has seen, and continues with the same ids and sequence numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from tandem_core.errors import TandemError
from tandem_proto.v1 import answers_pb2

from tandem_gateway.dialects.chat_dialect import Rendered, TypedEventsRenderer
from tandem_gateway.dialects.openai_messages import CUSTOM_INPUT
from tandem_gateway.dialects.openai_render import Json, JsonValue, error_json
from tandem_gateway.dialects.responses_models import IN_NAMESPACE
from tandem_gateway.request import Event
from tandem_gateway.tools.answer_parser import CallDelta

#: Maximum positions with log probabilities that the last events of a stream repeat (four times). For longer
#: texts only the deltas have them: 20,000 positions with 20 alternatives took 160 MB, and two seconds of the
#: event loop at the end.
_MAX_REPEATED = 128


@dataclass
class _Item:
    """An output item that is open."""

    kind: str
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    namespace: str = ""
    texts: list[str] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    #: Whether there are more than `logprobs`, which is then empty.
    has_more_logprobs: bool = False

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def shown(self, status: str) -> Rendered:
        if self.kind == "custom_tool_call":
            return {
                "type": "custom_tool_call", "id": self.id, "call_id": self.call_id, "name": self.name,
                "input": self.custom_input, "status": status, **self._in_namespace(),
            }  # fmt: skip
        if self.kind == "function_call":
            return {
                "type": "function_call", "id": self.id, "call_id": self.call_id, "name": self.name,
                "arguments": self.text, "status": status, **self._in_namespace(),
            }  # fmt: skip
        content = [self.part()] if self.texts or status != "in_progress" else []
        if self.kind == "reasoning":
            return {"type": "reasoning", "id": self.id, "summary": [], "content": content, "status": status}
        return {
            "type": "message", "id": self.id, "role": "assistant", "status": status, "content": content,
        }  # fmt: skip

    def _in_namespace(self) -> Rendered:
        return {"namespace": self.namespace} if self.namespace else {}

    @property
    def custom_input(self) -> str:
        """The text in the arguments of a custom tool, or the arguments as the model wrote them."""
        try:
            text = json.loads(self.text)[CUSTOM_INPUT]
        except (ValueError, RecursionError, LookupError, TypeError):  # incomplete, or not as the schema says
            return self.text
        return text if isinstance(text, str) else self.text

    def part(self) -> Rendered:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": self.logprobs}


#: Names of the events for text, by kind of item.
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_CALLS = ("function_call", "custom_tool_call")


class ResponsesRenderer(TypedEventsRenderer):
    answer_kind = "response"
    _id_prefix = "resp_"

    def __init__(
        self, record: answers_pb2.AnswerRecord, model: str, token_bytes: Callable[[int], bytes]
    ) -> None:
        super().__init__(record, model, token_bytes)
        self._sampling = record.request.sampling
        self._fields: Rendered = json.loads(record.shown.response_fields or "{}")
        self._custom_tools = frozenset(record.shown.custom_tools)
        self._namespaces = dict(record.shown.namespaces)
        self._number = 0
        self._output: list[Rendered] = []
        self._open: _Item | None = None
        self._finished_by: str | None = None
        self._is_whole = False

    def usage_chunk(self) -> Json:
        usage = cast(Rendered, super().usage_chunk()["usage"])
        response = self._response(usage)
        return {"events": [self._event(f"response.{response['status']}", {"response": response})]}

    def whole(self, events: Sequence[Event]) -> Json:
        chat = cast(Rendered, super().whole(events))
        choice = chat["choices"][0]
        self._is_whole = True
        self._of_delta(choice["delta"], choice["logprobs"])
        self._end(choice)
        return self._response(chat["usage"])

    def encode_error(self, error: TandemError) -> bytes:
        inner = cast(Rendered, error_json(error)["error"])
        event = self._event("error", {**inner, "type": "error", "error": inner})
        return self.encode({"events": [event]})

    def _start(self) -> list[Rendered]:
        names = ("response.created", "response.in_progress")
        return [self._event(name, {"response": self._response(None)}) for name in names]

    def _end(self, choice: Rendered) -> list[Rendered]:
        self._finished_by = choice["finish_reason"]
        is_empty = not self._output and self._open is None  # an empty answer has an empty message
        events = self._add("message", "") if is_empty else []
        if self._logprobs_held and self._open is not None and self._open.kind == "message":
            events += self._text("message", "", self._logprobs_held)
        return [*events, *self._close()]

    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[Rendered]:
        events = [] if self._open is not None and self._open.kind == kind else self._add(kind, "")
        item = cast(_Item, self._open)
        item.texts.append(text)
        if not item.has_more_logprobs:
            item.logprobs += logprobs
        if not self._is_whole and len(item.logprobs) > _MAX_REPEATED:
            item.logprobs, item.has_more_logprobs = [], True
        more: Rendered = {"content_index": 0, "delta": text}
        if kind == "message":
            more["logprobs"] = logprobs
        return [*events, self._of_item(f"{_TEXT_EVENTS[kind]}.delta", item, more)]

    def _call(self, call: CallDelta) -> list[Rendered]:
        events: list[Rendered] = []
        if call.id:
            kind = "custom_tool_call" if call.name in self._custom_tools else "function_call"
            events += self._add(kind, call.id, call.name)
        item = cast(_Item, self._open)
        if call.arguments:
            item.texts.append(call.arguments)
            if item.kind == "function_call":  # the input of a custom tool is shown when it is complete
                name = "response.function_call_arguments.delta"
                events.append(self._of_item(name, item, {"delta": call.arguments}))
        return events

    def _add(self, kind: str, call_id: str, name: str = "") -> list[Rendered]:
        """Closes the open item and opens another one."""
        events = self._close()
        number = len(self._output)
        base = str(self._head["id"]).removeprefix(self._id_prefix)
        namespace = self._namespaces.get(name, "")
        name = name.removeprefix(f"{namespace}{IN_NAMESPACE}" if namespace else "")
        item_id = f"{_ID_PREFIXES[kind]}_{base}-{number}"
        item = self._open = _Item(kind, item_id, number, name, call_id, namespace)
        events.append(
            self._event(
                "response.output_item.added", {"output_index": number, "item": item.shown("in_progress")}
            )
        )
        if kind not in _CALLS:
            events.append(
                self._of_item("response.content_part.added", item, {"content_index": 0, "part": item.part()})
            )
        return events

    def _close(self) -> list[Rendered]:
        item, self._open = self._open, None
        if item is None:
            return []
        if item.kind == "function_call":
            name = "response.function_call_arguments.done"
            events = [self._of_item(name, item, {"name": item.name, "arguments": item.text})]
        elif item.kind == "custom_tool_call":
            name, text = "response.custom_tool_call_input", item.custom_input
            events = [
                self._of_item(f"{name}.delta", item, {"delta": text}),
                self._of_item(f"{name}.done", item, {"input": text}),
            ]
        else:
            more: Rendered = {"content_index": 0, "text": item.text}
            if item.kind == "message":
                more["logprobs"] = item.logprobs
            part = {"content_index": 0, "part": item.part()}
            events = [
                self._of_item(f"{_TEXT_EVENTS[item.kind]}.done", item, more),
                self._of_item("response.content_part.done", item, part),
            ]
        shown = item.shown("incomplete" if self._finished_by == "length" else "completed")
        self._output.append(shown)
        return [
            *events,
            self._event("response.output_item.done", {"output_index": item.index, "item": shown}),
        ]

    def _of_item(self, name: str, item: _Item, more: Rendered) -> Rendered:
        return self._event(name, {"item_id": item.id, "output_index": item.index, **more})

    def _event(self, name: str, fields: Rendered) -> Rendered:
        event = {**fields, "type": name, "sequence_number": self._number}
        self._number += 1
        return event

    def _response(self, usage: Rendered | None) -> Rendered:
        """The response so far; `usage` when it has ended."""
        status = "in_progress" if usage is None else "completed"
        if usage is not None and self._finished_by == "length":
            status = "incomplete"
        sampling = self._sampling
        return {
            "id": self._head["id"],
            "object": "response",
            "created_at": self._head["created"],
            "model": self._head["model"],
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": self._output if usage is not None else [],
            "usage": None if usage is None else _usage(usage),
            # They were sent to the pod as float32.
            "temperature": round(sampling.temperature, 6),
            "top_p": round(sampling.top_p, 6),
            "max_output_tokens": sampling.max_tokens,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            **self._fields,
        }


def _usage(chat: Rendered) -> dict[str, JsonValue]:
    return {
        "input_tokens": chat["prompt_tokens"],
        "input_tokens_details": chat["prompt_tokens_details"],
        "output_tokens": chat["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": chat["total_tokens"],
        "tandem_receipt": chat["tandem_receipt"],
    }
