"""What the Responses API and the Messages API share: their bodies are read as chats, and their answers are
rendered from the stream of a chat, so an answer reads the same through every API."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, cast

from pydantic import ConfigDict, JsonValue
from tandem_core.errors import InvalidRequestError, quoted
from tandem_proto.v1 import answers_pb2, decode_pb2

from tandem_gateway.dialects.fields import FieldTable, Ignored
from tandem_gateway.dialects.json_body import JsonBody
from tandem_gateway.dialects.openai_models import ChatBody
from tandem_gateway.dialects.openai_render import ChatRenderer, Json
from tandem_gateway.dialects.sse import sse
from tandem_gateway.errors import UnsupportedFieldError

JsonObject = dict[str, JsonValue]
#: A rendered event, or a part of a chat's rendered chunk.
Rendered = dict[str, Any]


class ChatDialectBody(JsonBody):
    """Fields that both APIs and a chat have, and those of Tandem (seed, slo_class, ...), pass unchanged."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, frozen=True)

    #: How errors name fields of a chat, by patterns of their beginnings.
    field_names: ClassVar[Mapping[str, str]]
    #: The fields that are not declared here, apart from those of a chat.
    field_table: ClassVar[FieldTable]

    model: str | None = None
    stream: bool | None = None
    """The answer comes as typed server-sent events."""

    def checked(self, ignored: Ignored) -> ChatBody:
        """Raises InvalidRequestError with this API's name of the field. Adds names of ignored fields."""
        own = {
            "model": self.model,
            "stream": self.stream,
            "stream_options": {"include_usage": True} if self.stream else None,
        }
        given, table = self.model_extra or {}, self.field_table
        table.check(given)
        extra = {name: value for name, value in given.items() if name not in table}
        return ChatBody.of({**extra, **own, **self._chat_fields(ignored)}, ignored)

    @abstractmethod
    def _chat_fields(self, ignored: Ignored) -> Mapping[str, Any]:
        """The fields of this API as those of a chat; None: not given."""

    def shown(self) -> answers_pb2.ShownAs:
        """The parts of the request that the answer repeats."""
        return answers_pb2.ShownAs()


def text_of(where: str, content: JsonValue, kinds: Collection[str] = ("text",)) -> str:
    """A text, or a list of parts of these kinds. Raises InvalidRequestError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(where, "is missing; send a text or a list of text parts")
    return "\n".join(part_text(f"{where}[{index}]", part, kinds) for index, part in enumerate(content))


def part_text(where: str, part: JsonValue, kinds: Collection[str] = ("text",)) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
    if kind not in kinds or not isinstance(text, str):
        raise UnsupportedFieldError(where, f"is a part of type {quoted(str(kind))}; only text is supported")
    return text


class TypedEventsRenderer(ChatRenderer):
    """Renders each delta of a chat's stream as server-sent events with a type."""

    _has_started = False

    def chunk(self, chunk: decode_pb2.DecodeChunk) -> Json | None:
        chat = super().chunk(chunk)
        return None if chat is None else {"events": self._events(_only_choice(chat))}

    def finish(self, end: decode_pb2.DecodeFinished) -> Json:
        return {"events": self._events(_only_choice(super().finish(end)))}

    def encode(self, body: Json, event_id: str = "", *, in_steps: bool = False) -> bytes:
        """The last event has the id: a client that has it has the others too."""
        events = cast(Sequence[Rendered], body["events"])
        return b"".join(
            b"event: "
            + event["type"].encode()
            + b"\n"
            + sse(event, event_id if event is events[-1] else "", in_steps=in_steps)
            for event in events
        )

    def encode_end(self) -> bytes:
        return b""  # the last event's type says that it is the last

    def _events(self, choice: Rendered) -> list[Rendered]:
        events = [] if self._has_started else self._start()
        self._has_started = True
        events += self._of_delta(choice["delta"], choice["logprobs"])
        if choice["finish_reason"] is not None:
            events += self._end(choice)
        return events

    def _of_delta(self, delta: Rendered, logprobs: Rendered | None) -> list[Rendered]:
        """Arguments of the open call come first, because text closes it; new calls come last."""
        events: list[Rendered] = []
        calls = delta.get("tool_calls") or ()
        for call in calls:
            if not call.get("id"):
                events += self._call(call)
        if text := delta.get("reasoning_content"):
            events += self._text("reasoning", text, [])
        content, positions = delta.get("content") or "", (logprobs or {}).get("content") or []
        if content or positions:
            events += self._text("message", content, positions)
        for call in calls:
            if call.get("id"):
                events += self._call(call)
        return events

    @abstractmethod
    def _start(self) -> list[Rendered]:
        """The events before the first delta."""

    @abstractmethod
    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[Rendered]:
        """`kind`: "reasoning" or "message"."""

    @abstractmethod
    def _call(self, call: Rendered) -> list[Rendered]:
        """The events of a call's delta; the first one has its id and name, later ones arguments."""

    @abstractmethod
    def _end(self, choice: Rendered) -> list[Rendered]:
        """The events after the last delta."""


def _only_choice(chat: Json) -> Rendered:
    return cast(Sequence[Rendered], chat["choices"])[0]
