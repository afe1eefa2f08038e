"""Renders events as OpenAI's JSON: answers, stream chunks, usage with the receipt, logprobs, errors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from google.protobuf.message import Message
from tandem_core.errors import InvalidRequestError, TandemError
from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2

from tandem_gateway.errors import presentation
from tandem_gateway.http_stream import SSE_DONE, sse
from tandem_gateway.tools.answer_parser import AnswerDelta, AnswerParser, CallDelta

Json = Mapping[str, "JsonValue"]
JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Json

#: OpenAI has no "cancelled"; a cancelled request has no reader.
_FINISH_REASONS: Mapping[common_pb2.FinishReason.ValueType, str] = {
    common_pb2.FINISH_REASON_STOP: "stop",
    common_pb2.FINISH_REASON_LENGTH: "length",
    common_pb2.FINISH_REASON_CANCELLED: "stop",
}


def error_json(error: TandemError) -> Json:
    """OpenAI's error object; `param` names the wrong field."""
    param = error.field if isinstance(error, InvalidRequestError) else None
    shown = presentation(error)
    return {"error": {"message": str(error), "type": shown.kind, "param": param, "code": shown.code}}


def usage_json(receipt: common_pb2.Receipt) -> Json:
    return {
        "prompt_tokens": receipt.prompt_tokens,
        "completion_tokens": receipt.output_tokens,
        "total_tokens": receipt.prompt_tokens + receipt.output_tokens,
        "prompt_tokens_details": {"cached_tokens": receipt.cached_tokens},
        "tandem_receipt": message_json(receipt),
    }


def message_json(message: Message) -> Json:
    """All fields under their .proto names; unlike in protobuf's own JSON, 64-bit numbers stay numbers."""

    def value_json(value: Any) -> JsonValue:
        if isinstance(value, Message):
            return message_json(value)
        return dict(value) if isinstance(value, Mapping) else cast(JsonValue, value)

    return {field.name: value_json(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _stop_reason(end: decode_pb2.DecodeFinished) -> str | int | None:
    """As in vLLM: the stop string, or the stop token's id; None at a plain end token."""
    return end.stop_token_id if end.HasField("stop_token_id") else end.stop_reason or None


class Renderer(ABC):
    """Renders one answer. Chat and plain completions differ in names, shapes and logprobs only."""

    #: The answers that it renders, as in AnswerRecord.
    answer_kind: str
    _id_prefix: str
    _whole_object: str
    _chunk_object: str

    def __init__(
        self, record: answers_pb2.AnswerRecord, model: str, token_bytes: Callable[[int], bytes]
    ) -> None:
        self._head: Json = {
            "id": self._id_prefix + record.request.request_id,
            "created": record.created_seconds,
            "model": model,
        }
        self._wants_logprobs = record.request.sampling.HasField("logprobs")
        self._token_bytes = token_bytes
        self._prompt_token_ids = record.request.prompt_token_ids
        self.shows_token_ids = record.shown.token_ids
        self._names_are_ids = record.shown.tokens_as_ids
        self._has_begun = False

    def encode(self, body: Json, event_id: str = "") -> bytes:
        """What `chunk`, `finish` or `usage_chunk` returned, as server-sent events."""
        return sse(body, event_id)

    def encode_error(self, error: TandemError) -> bytes:
        return sse(error_json(error))

    def encode_end(self) -> bytes:
        """Follows the last event of a complete stream."""
        return SSE_DONE

    def chunk(self, chunk: decode_pb2.DecodeChunk, *, with_usage_field: bool) -> Json | None:
        """None: there is nothing to show yet, for example while a character is incomplete."""
        part = self._part(chunk.text)
        if not (part or chunk.logprobs or self.shows_token_ids):
            return None
        choice = dict(self._delta(part, self._logprobs(chunk.logprobs)))
        if not self.shows_token_ids:
            return self._stream_object([choice], with_usage_field)
        choice["token_ids"] = list(chunk.token_ids)
        # The prompt's are in the first chunk, as in vLLM.
        prompt = None if self._has_begun else list(self._prompt_token_ids)
        self._has_begun = True
        return self._with_prompt(self._stream_object([choice], with_usage_field), prompt)

    def finish(self, end: decode_pb2.DecodeFinished, *, with_usage_field: bool) -> Json:
        choice = {
            **self._delta(self._last_part(), None),
            "finish_reason": self._finish_reason(end),
            "stop_reason": _stop_reason(end),
        }
        return self._stream_object([choice], with_usage_field)

    def usage_chunk(self, end: decode_pb2.DecodeFinished) -> Json:
        return {**self._stream_object([], False), "usage": usage_json(end.receipt)}

    def whole(self, chunks: Sequence[decode_pb2.DecodeChunk], end: decode_pb2.DecodeFinished) -> Json:
        text = "".join(chunk.text for chunk in chunks)
        positions = [position for chunk in chunks for position in chunk.logprobs]
        choice: dict[str, JsonValue] = {
            "index": 0,
            **self._whole_text(text),
            "logprobs": self._logprobs(positions),
            "finish_reason": self._finish_reason(end),
            "stop_reason": _stop_reason(end),
        }
        usage = usage_json(end.receipt)
        if self.shows_token_ids:
            choice["token_ids"] = [token_id for chunk in chunks for token_id in chunk.token_ids]
        whole: Json = {**self._head, "object": self._whole_object, "choices": [choice], "usage": usage}
        return self._with_prompt(whole, list(self._prompt_token_ids)) if self.shows_token_ids else whole

    def _stream_object(self, choices: Sequence[Json], with_usage_field: bool) -> Json:
        body = {**self._head, "object": self._chunk_object, "choices": choices}
        return {**body, "usage": None} if with_usage_field else body

    def _logprobs(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Json | None:
        return self._logprobs_object(positions) if self._wants_logprobs else None

    def _with_prompt(self, body: Json, prompt_token_ids: list[int] | None) -> Json:
        """Adds the prompt's token ids where vLLM has them."""
        return {**body, "prompt_token_ids": prompt_token_ids}

    def _id_name(self, token: common_pb2.TokenLogprob) -> str:
        return f"token_id:{token.token_id}"

    def _bytes_of(self, token: common_pb2.TokenLogprob) -> bytes:
        return token.token_bytes or self._token_bytes(token.token_id)

    @abstractmethod
    def _part(self, text: str) -> AnswerDelta:
        """What the text adds to the answer; false: nothing yet."""

    @abstractmethod
    def _last_part(self) -> AnswerDelta:
        """What was held back, when no more text comes."""

    def _finish_reason(self, end: decode_pb2.DecodeFinished) -> str:
        """After the last part."""
        return _FINISH_REASONS[end.reason]

    @abstractmethod
    def _delta(self, part: AnswerDelta, logprobs: Json | None) -> Json:
        """The choice of a stream chunk."""

    @abstractmethod
    def _whole_text(self, text: str) -> Json:
        """The part of a whole answer's choice that holds the text."""

    @abstractmethod
    def _logprobs_object(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Json: ...


def _call_json(call: CallDelta) -> dict[str, JsonValue]:
    """A call, or the part of one that is not its first."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatRenderer(Renderer):
    answer_kind = "chat"
    _id_prefix = "chatcmpl-"
    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def __init__(
        self, record: answers_pb2.AnswerRecord, model: str, token_bytes: Callable[[int], bytes]
    ) -> None:
        super().__init__(record, model, token_bytes)
        self._sent_role = False
        self._parser = AnswerParser(record.form, seed=record.id)
        self._as_function_call = record.form.as_function_call

    def _part(self, text: str) -> AnswerDelta:
        return self._parser.push(text)

    def _last_part(self) -> AnswerDelta:
        return self._parser.finish()

    def _finish_reason(self, end: decode_pb2.DecodeFinished) -> str:
        if end.reason == common_pb2.FINISH_REASON_STOP and self._parser.has_calls:
            return "function_call" if self._as_function_call else "tool_calls"
        return super()._finish_reason(end)

    def _delta(self, part: AnswerDelta, logprobs: Json | None) -> Json:
        delta: dict[str, JsonValue] = {} if self._sent_role else {"role": "assistant", "content": ""}
        self._sent_role = True
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        delta |= self._calls_json(part, with_index=True)
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _whole_text(self, text: str) -> Json:
        part = self._part(text) + self._last_part()
        message: dict[str, JsonValue] = {
            "role": "assistant",
            "content": None if part.calls and not part.content else part.content,
            "refusal": None,
        }
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        return {"message": message | self._calls_json(part, with_index=False)}

    def _calls_json(self, part: AnswerDelta, *, with_index: bool) -> dict[str, JsonValue]:
        """The field for the calls, if there are any."""
        calls = [_call_json(call) for call in part.calls]
        if not calls:
            return {}
        if self._as_function_call:
            return {"function_call": calls[0]["function"]}
        if with_index:
            calls = [{"index": call.index, **shown} for call, shown in zip(part.calls, calls, strict=True)]
        return {"tool_calls": calls}

    def _logprobs_object(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Json:
        content = [
            {**self._token(position.chosen), "top_logprobs": [self._token(token) for token in position.top]}
            for position in positions
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: common_pb2.TokenLogprob) -> Json:
        raw = self._bytes_of(token)
        name = self._id_name(token) if self._names_are_ids else raw.decode("utf-8", "replace")
        return {"token": name, "logprob": token.logprob, "bytes": list(raw)}


class CompletionRenderer(Renderer):
    answer_kind = "completion"
    _id_prefix = "cmpl-"
    _whole_object = "text_completion"
    _chunk_object = "text_completion"

    def __init__(
        self, record: answers_pb2.AnswerRecord, model: str, token_bytes: Callable[[int], bytes]
    ) -> None:
        super().__init__(record, model, token_bytes)
        self._text_offset = 0

    def _part(self, text: str) -> AnswerDelta:
        return AnswerDelta(text)

    def _last_part(self) -> AnswerDelta:
        return AnswerDelta()

    def _delta(self, part: AnswerDelta, logprobs: Json | None) -> Json:
        return {"index": 0, "text": part.content, "logprobs": logprobs, "finish_reason": None}

    def _whole_text(self, text: str) -> Json:
        return {"text": text}

    def _logprobs_object(self, positions: Sequence[common_pb2.PositionLogprobs]) -> Json:
        tokens = [self._name(position.chosen) for position in positions]
        offsets = []
        for token in tokens:
            offsets.append(self._text_offset)
            self._text_offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [position.chosen.logprob for position in positions],
            "top_logprobs": [
                {self._name(token): token.logprob for token in position.top} for position in positions
            ],
            "text_offset": offsets,
        }

    def _with_prompt(self, body: Json, prompt_token_ids: list[int] | None) -> Json:
        choices = cast(Sequence[Json], body["choices"])
        return {**body, "choices": [{**choice, "prompt_token_ids": prompt_token_ids} for choice in choices]}

    def _name(self, token: common_pb2.TokenLogprob) -> str:
        """The token's text; a part of a character as OpenAI writes it, so that names do not collide."""
        if self._names_are_ids:
            return self._id_name(token)
        raw = self._bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
