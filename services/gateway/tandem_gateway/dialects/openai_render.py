"""Renders events as OpenAI's JSON: answers, stream chunks, usage with the receipt, logprobs, errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from google.protobuf.message import Message
from tandem_core.errors import InvalidRequestError, TandemError
from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2

from tandem_gateway.dialects import prompt_logprobs
from tandem_gateway.dialects.sse import SSE_DONE, sse
from tandem_gateway.errors import presentation
from tandem_gateway.request import Event
from tandem_gateway.tools.answer_parser import AnswerDelta, CallDelta, parsers_of

Json = Mapping[str, "JsonValue"]
JsonValue = str | int | float | bool | None | Sequence["JsonValue"] | Json

#: Log probabilities, chosen tokens and alternatives, that take some ms to render and encode.
_MANY_VALUES = 4096
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


def usage_json(receipts: Sequence[common_pb2.Receipt], num_choices: int) -> Json:
    """Of so many choices per prompt, by number. A prompt counts once, the tokens of all choices count."""
    prompts = receipts[::num_choices]
    num_prompt = sum(receipt.prompt_tokens for receipt in prompts)
    num_output = sum(receipt.output_tokens for receipt in receipts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": sum(receipt.cached_tokens for receipt in prompts)},
        "tandem_receipt": message_json(receipts[0]),
        **({"tandem_receipts": list(map(message_json, receipts))} if len(receipts) > 1 else {}),
    }


def message_json(message: Message) -> Json:
    """All fields under their .proto names; unlike in protobuf's own JSON, 64-bit numbers stay numbers."""

    def value_json(value: Any) -> JsonValue:
        if isinstance(value, Message):
            return message_json(value)
        if isinstance(value, MutableSequence):
            return list(value)
        return dict(value) if isinstance(value, Mapping) else cast(JsonValue, value)

    return {field.name: value_json(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


@dataclass
class _Choice:
    """A whole answer's choice."""

    number: int
    chunks: list[decode_pb2.DecodeChunk]
    logprobs: list[common_pb2.PositionLogprobs]
    end: decode_pb2.DecodeFinished = field(default_factory=decode_pb2.DecodeFinished)

    @property
    def mean_logprob(self) -> float:
        chosen = [position.chosen.logprob for position in self.logprobs]
        return sum(chosen) / len(chosen) if chosen else -math.inf


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
        self._wants_logprobs = (
            record.request.sampling.HasField("logprobs") and not record.shown.hides_logprobs
        )
        self._token_bytes = token_bytes
        self._prompts = [request.prompt_token_ids for request in (record.request, *record.more_requests)]
        self._num_choices = record.num_choices or 1
        self._num_best = record.shown.num_best or self._num_choices
        self.shows_token_ids = record.shown.token_ids
        self._names_are_ids = record.shown.tokens_as_ids
        #: By prompt; empty: not shown.
        self._echoed_texts = list(record.shown.echoed_texts)
        self._hides_output = record.shown.hides_output
        #: Alternatives shown for each token of a prompt in `prompt_logprobs`; None: there is no such field.
        self._num_prompt_top = (
            record.shown.prompt_logprobs if record.shown.HasField("prompt_logprobs") else None
        )
        self._num_top = record.request.sampling.logprobs
        #: By prompt.
        self._prompt_logprobs: dict[int, common_pb2.PromptLogprobs] = {}
        self._has_prompt_logprobs = record.request.sampling.HasField("prompt_logprobs")
        #: Choices of which something was rendered.
        self._begun: set[int] = set()
        #: By choice, of those that have ended.
        self._receipts: dict[int, common_pb2.Receipt] = {}

    def is_large(self, events: Sequence[Event]) -> bool:
        """Whether rendering and encoding may take so long that it needs a thread."""
        chunks = [event for event in events if isinstance(event, decode_pb2.DecodeChunk)]
        num_values = sum(len(chunk.logprobs) for chunk in chunks) * (1 + self._num_top)
        return num_values > _MANY_VALUES or (self._has_prompt_logprobs and any(map(self.is_first, chunks)))

    def encode(self, body: Json, event_id: str = "", *, in_steps: bool = False) -> bytes:
        """What `chunk`, `finish` or `usage_chunk` returned, as server-sent events; `in_steps` for a thread,
        as in json_bytes."""
        return sse(body, event_id, in_steps=in_steps)

    def encode_error(self, error: TandemError) -> bytes:
        return sse(error_json(error))

    def encode_end(self) -> bytes:
        """Follows the last event of a complete stream."""
        return SSE_DONE

    def chunk(self, chunk: decode_pb2.DecodeChunk, *, with_usage_field: bool) -> Json | None:
        """None: there is nothing to show yet, for example while a character is incomplete."""
        is_first = self.is_first(chunk)
        shown = self._shown(chunk)
        part = self._part(chunk.choice, (self._echoed_text(chunk.choice) if is_first else "") + shown.text)
        if not (part or shown.logprobs or self.shows_token_ids or (is_first and self._echoed_texts)):
            return None
        self._begun.add(chunk.choice)
        logprobs = self._logprobs(chunk.choice, shown.logprobs, is_first=is_first)
        delta = self._delta(part, is_first=is_first)
        choice = {"index": chunk.choice, **delta, "logprobs": logprobs, "finish_reason": None}
        if not self.shows_token_ids:
            return self._stream_object([choice], with_usage_field)
        choice["token_ids"] = list(shown.token_ids)
        # The prompt's are in the first chunk, as in vLLM.
        prompt = self._prompt_of(chunk.choice) if is_first else None
        return self._with_prompt(self._stream_object([choice], with_usage_field), [prompt])

    def is_first(self, chunk: decode_pb2.DecodeChunk) -> bool:
        """Whether nothing of its choice was rendered before."""
        return chunk.choice not in self._begun

    def finish(self, end: decode_pb2.DecodeFinished, *, with_usage_field: bool) -> Json:
        self._receipts[end.choice] = end.receipt
        is_first = end.choice not in self._begun
        self._begun.add(end.choice)
        choice = {
            "index": end.choice,
            **self._delta(self._last_part(end.choice), is_first=is_first),
            "logprobs": None,
            "finish_reason": self._finish_reason(end),
            "stop_reason": self._stop_reason(end),
        }
        return self._stream_object([choice], with_usage_field)

    def usage_chunk(self) -> Json:
        """After the last choice's end."""
        return {**self._stream_object([], False), "usage": self._usage()}

    def whole(self, events: Sequence[Event]) -> Json:
        choices = [_Choice(number, [], []) for number in range(len(self._prompts) * self._num_choices)]
        for event in events:
            if isinstance(event, decode_pb2.DecodeFinished):
                choices[event.choice].end = event
                self._receipts[event.choice] = event.receipt
            else:
                part = self._shown(event)
                choices[event.choice].chunks.append(part)
                choices[event.choice].logprobs.extend(part.logprobs)
        shown = []
        for first in range(0, len(choices), self._num_choices):
            of_prompt = choices[first : first + self._num_choices]
            if self._num_best < self._num_choices:
                of_prompt = sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[: self._num_best]
            shown += of_prompt
        body: Json = {
            **self._head,
            "object": self._whole_object,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(shown)],
            "usage": self._usage(),
        }
        if self._num_prompt_top is not None:
            # Choices of a prompt share its list.
            lists = {n: self._prompt_logprobs_json(n, self._num_prompt_top) for n in self._prompt_logprobs}
            of_choices = [lists[choice.number // self._num_choices] for choice in shown]
            body = self._with_prompt_logprobs(body, of_choices)
        prompts = [self._prompt_of(choice.number) for choice in shown]
        return self._with_prompt(body, prompts) if self.shows_token_ids else body

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        text = self._echoed_text(choice.number) + "".join(chunk.text for chunk in choice.chunks)
        body: dict[str, JsonValue] = {
            "index": index,
            **self._whole_text(choice.number, text),
            "logprobs": self._logprobs(choice.number, choice.logprobs, is_first=True),
            "finish_reason": self._finish_reason(choice.end),
            "stop_reason": self._stop_reason(choice.end),
        }
        if self.shows_token_ids:
            body["token_ids"] = [token_id for chunk in choice.chunks for token_id in chunk.token_ids]
        return body

    def _usage(self) -> Json:
        usage = usage_json([self._receipts[number] for number in sorted(self._receipts)], self._num_choices)
        if self._hides_output:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _shown(self, chunk: decode_pb2.DecodeChunk) -> decode_pb2.DecodeChunk:
        """The part of the chunk that the caller gets; keeps the prompt's log probabilities."""
        if chunk.HasField("prompt_logprobs"):
            self._prompt_logprobs[chunk.choice // self._num_choices] = chunk.prompt_logprobs
        return decode_pb2.DecodeChunk(choice=chunk.choice) if self._hides_output else chunk

    def _stop_reason(self, end: decode_pb2.DecodeFinished) -> str | int | None:
        """As in vLLM: the stop string, or the stop token's id; None at a plain end token."""
        if self._hides_output:
            return None
        return end.stop_token_id if end.HasField("stop_token_id") else end.stop_reason or None

    def _echoed_text(self, choice: int) -> str:
        return self._echoed_texts[choice // self._num_choices] if self._echoed_texts else ""

    def _prompt_logprobs_json(self, prompt: int, num_top: int) -> Sequence[JsonValue]:
        return prompt_logprobs.to_json(
            self._prompt_logprobs[prompt], self._prompts[prompt], num_top, self._token_bytes
        )

    def _prompt_of(self, choice: int) -> list[int]:
        return list(self._prompts[choice // self._num_choices])

    def _stream_object(self, choices: Sequence[Json], with_usage_field: bool) -> Json:
        body = {**self._head, "object": self._chunk_object, "choices": choices}
        return {**body, "usage": None} if with_usage_field else body

    def _logprobs(
        self, choice: int, positions: Sequence[common_pb2.PositionLogprobs], *, is_first: bool
    ) -> Json | None:
        """is_first: of a choice's first chunk, or of a whole answer."""
        if not self._wants_logprobs:
            return None
        return self._logprobs_object(choice, positions, with_prompt=is_first and bool(self._echoed_texts))

    def _with_prompt(self, body: Json, prompts: Sequence[list[int] | None]) -> Json:
        """Adds the prompt's token ids, one list for each choice in the body, where vLLM has them."""
        return {**body, "prompt_token_ids": prompts[0]}

    def _with_prompt_logprobs(self, body: Json, lists: Sequence[Sequence[JsonValue]]) -> Json:
        """Adds `prompt_logprobs`, one list for each choice in the body, where vLLM has them."""
        return {**body, "prompt_logprobs": lists[0]}

    def _id_name(self, token: common_pb2.TokenLogprob) -> str:
        return f"token_id:{token.token_id}"

    def _bytes_of(self, token: common_pb2.TokenLogprob) -> bytes:
        return token.token_bytes or self._token_bytes(token.token_id)

    @abstractmethod
    def _part(self, choice: int, text: str) -> AnswerDelta:
        """What the text adds to the answer; false: nothing yet."""

    @abstractmethod
    def _last_part(self, choice: int) -> AnswerDelta:
        """What was held back, when no more text comes."""

    def _finish_reason(self, end: decode_pb2.DecodeFinished) -> str:
        """After the last part."""
        return "length" if self._hides_output else _FINISH_REASONS[end.reason]

    @abstractmethod
    def _delta(self, part: AnswerDelta, *, is_first: bool) -> Json:
        """The part of a stream chunk's choice that holds the text."""

    @abstractmethod
    def _whole_text(self, choice: int, text: str) -> Json:
        """The part of a whole answer's choice that holds the text."""

    @abstractmethod
    def _logprobs_object(
        self, choice: int, positions: Sequence[common_pb2.PositionLogprobs], *, with_prompt: bool
    ) -> Json:
        """with_prompt: the prompt's tokens come first."""


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
        #: By choice.
        self._parsers = parsers_of(record)
        self._as_function_call = record.form.as_function_call

    def _part(self, choice: int, text: str) -> AnswerDelta:
        return self._parsers[choice].push(text)

    def _last_part(self, choice: int) -> AnswerDelta:
        return self._parsers[choice].finish()

    def _finish_reason(self, end: decode_pb2.DecodeFinished) -> str:
        if end.reason == common_pb2.FINISH_REASON_STOP and self._parsers[end.choice].has_calls:
            return "function_call" if self._as_function_call else "tool_calls"
        return super()._finish_reason(end)

    def _delta(self, part: AnswerDelta, *, is_first: bool) -> Json:
        delta: dict[str, JsonValue] = {"role": "assistant", "content": ""} if is_first else {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        delta |= self._calls_json(part, with_index=True)
        return {"delta": delta}

    def _whole_text(self, choice: int, text: str) -> Json:
        part = self._part(choice, text) + self._last_part(choice)
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

    def _logprobs_object(
        self, choice: int, positions: Sequence[common_pb2.PositionLogprobs], *, with_prompt: bool
    ) -> Json:
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
        #: By choice.
        self._text_offsets: Counter[int] = Counter()

    def _part(self, choice: int, text: str) -> AnswerDelta:
        return AnswerDelta(text)

    def _last_part(self, choice: int) -> AnswerDelta:
        return AnswerDelta()

    def _delta(self, part: AnswerDelta, *, is_first: bool) -> Json:
        return {"text": part.content}

    def _whole_text(self, choice: int, text: str) -> Json:
        return {"text": text}

    def _logprobs_object(
        self, choice: int, positions: Sequence[common_pb2.PositionLogprobs], *, with_prompt: bool
    ) -> Json:
        before: list[common_pb2.PositionLogprobs] = []
        offsets: list[int] = []
        if with_prompt:
            prompt, text = choice // self._num_choices, self._echoed_text(choice)
            token_ids = self._prompts[prompt]
            before = prompt_logprobs.to_positions(self._prompt_logprobs[prompt], token_ids, self._num_top)
            offsets = prompt_logprobs.text_offsets(text, [self._token_bytes(i) for i in token_ids])
            self._text_offsets[choice] = len(text)
        tokens = [self._name(position.chosen) for position in (*before, *positions)]
        for token in tokens[len(before) :]:
            offsets.append(self._text_offsets[choice])
            self._text_offsets[choice] += len(token)
        logprobs: list[JsonValue] = []
        top: list[JsonValue] = []
        for position in (*before, *positions):
            logprobs.append(position.chosen.logprob)
            top.append({self._name(token): token.logprob for token in position.top})
        if before:
            logprobs[0] = top[0] = None  # nothing comes before the first token
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _with_prompt(self, body: Json, prompts: Sequence[list[int] | None]) -> Json:
        choices = zip(cast(Sequence[Json], body["choices"]), prompts, strict=True)
        return {**body, "choices": [{**choice, "prompt_token_ids": prompt} for choice, prompt in choices]}

    def _with_prompt_logprobs(self, body: Json, lists: Sequence[Sequence[JsonValue]]) -> Json:
        choices = zip(cast(Sequence[Json], body["choices"]), lists, strict=True)
        return {**body, "choices": [{**choice, "prompt_logprobs": shown} for choice, shown in choices]}

    def _name(self, token: common_pb2.TokenLogprob) -> str:
        """The token's text; a part of a character as OpenAI writes it, so that names do not collide."""
        if self._names_are_ids:
            return self._id_name(token)
        raw = self._bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
