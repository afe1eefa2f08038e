"""What the Responses API and the Messages API share: their bodies are read as chats, and their answers are
rendered from the stream of a chat, so an answer reads the same through every API."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
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
from tandem_gateway.tools.answer_parser import AnswerDelta, CallDelta

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

    def __init__(
        self, record: answers_pb2.AnswerRecord, model: str, token_bytes: Callable[[int], bytes]
    ) -> None:
        super().__init__(record, model, token_bytes)
        self._logprobs_held: list[Any] = []

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

    def _of_delta(self, part: AnswerDelta, logprobs: Rendered | None) -> list[Rendered]:
        """Log probabilities of tokens without text belong to the next text, unless a call precedes it."""
        events = self._text("reasoning", part.reasoning, []) if part.reasoning else []
        self._logprobs_held += (logprobs or {}).get("content") or []
        for piece in part.parts:
            held, self._logprobs_held = self._logprobs_held, []
            events += self._text("message", piece, held) if isinstance(piece, str) else self._call(piece)
        return events

    def _delta(self, part: AnswerDelta, *, is_first: bool) -> Json:
        return cast(Json, {"delta": part})

    def _whole_part(self, part: AnswerDelta) -> Json:
        return cast(Json, {"delta": part})

    @abstractmethod
    def _start(self) -> list[Rendered]:
        """The events before the first delta."""

    @abstractmethod
    def _text(self, kind: str, text: str, logprobs: list[Any]) -> list[Rendered]:
        """`kind`: "reasoning" or "message"."""

    @abstractmethod
    def _call(self, call: CallDelta) -> list[Rendered]:
        """The events of a call's delta; the first one has its id and name, later ones arguments."""

    @abstractmethod
    def _end(self, choice: Rendered) -> list[Rendered]:
        """The events after the last delta."""


def _only_choice(chat: Json) -> Rendered:
    return cast(Sequence[Rendered], chat["choices"])[0]
