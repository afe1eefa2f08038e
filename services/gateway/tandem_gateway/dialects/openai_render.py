"""Renders events as OpenAI's JSON: answers, stream chunks, usage with the receipt, logprobs, errors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

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

#: Rendering and encoding this many log probabilities takes milliseconds.
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
    """Usage over receipts by choice number, `num_choices` per prompt. Each prompt counts once."""
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


EventT = TypeVar("EventT", bound=Event)


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

    #: Kind of the rendered answers, as in AnswerRecord.
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
            "model": record.shown.model or model,
        }
        sampling = record.request.sampling
        self._shown_as = record.shown
        self._wants_logprobs = sampling.HasField("logprobs") and not record.shown.hides_logprobs
        self._num_top = sampling.logprobs
        self._token_bytes = token_bytes
        self._prompts = [request.prompt_token_ids for request in (record.request, *record.more_requests)]
        self._num_choices = record.num_choices or 1
        self._with_usage = record.with_usage
        #: Tokens so far, by choice.
        self._num_tokens: Counter[int] = Counter()
        #: By choice.
        self._parsers = parsers_of(record)
        self._as_function_call = record.form.as_function_call
        #: By prompt.
        self._prompt_logprobs: dict[int, common_pb2.PromptLogprobs] = {}
        self._has_prompt_logprobs = sampling.HasField("prompt_logprobs")
        #: Choices with rendered output.
        self._begun: set[int] = set()
        #: Receipts of ended choices, by choice.
        self._receipts: dict[int, common_pb2.Receipt] = {}

    def is_large(self, events: Sequence[Event]) -> bool:
        """Whether rendering and encoding take long enough to need a thread."""
        chunks = [event for event in events if isinstance(event, decode_pb2.DecodeChunk)]
        num_values = sum(len(chunk.logprobs) for chunk in chunks) * (1 + self._num_top)
        return num_values > _MANY_VALUES or (self._has_prompt_logprobs and any(map(self.is_first, chunks)))

    def encode(self, body: Json, event_id: str = "", *, in_steps: bool = False) -> bytes:
        """Encodes the result of `chunk`, `finish` or `usage_chunk` as server-sent events; `in_steps` as in
        json_bytes, for use in a thread."""
        return sse(body, event_id, in_steps=in_steps)

    def encode_error(self, error: TandemError) -> bytes:
        return sse(error_json(error))

    def ping(self, *, has_ids: bool) -> bytes:
        """Sent while there are no events. Clients that parse each line or block as JSON (sglang's benchmark
        and its copies) skip empty lines, but fail at a comment. Clients that store ids (OpenAI's and
        httpx-sse) read an empty line as an event without data, so streams with ids get a comment."""
        return b": ping\n" if has_ids else b"\n\n"

    def encode_end(self) -> bytes:
        """The bytes after the last event of a complete stream."""
        return SSE_DONE

    def chunk(self, chunk: decode_pb2.DecodeChunk) -> Json | None:
        """Renders a chunk; None: nothing to show yet, for example an incomplete character."""
        is_first = self.is_first(chunk)
        shown = self._shown(chunk)
        self._num_tokens[chunk.choice] += len(shown.token_ids)
        echoed = self._echoed_text(chunk.choice) if is_first else ""
        part = self._parsers[chunk.choice].push(echoed + shown.text)
        shows_ids, is_echo = self._shown_as.token_ids, is_first and bool(self._shown_as.echoed_texts)
        if not (part or shown.logprobs or shows_ids or is_echo):
            return None
        self._begun.add(chunk.choice)
        logprobs = self._logprobs(chunk.choice, shown.logprobs, is_first=is_first)
        delta = self._delta(part, is_first=is_first)
        choice = {"index": chunk.choice, **delta, "logprobs": logprobs, "finish_reason": None}
        if not shows_ids:
            return self._stream_object([choice])
        choice["token_ids"] = list(shown.token_ids)
        # The prompt's token ids are in the first chunk, as in vLLM.
        prompt = list(self._prompts[chunk.choice // self._num_choices]) if is_first else None
        return self._of_prompts(self._stream_object([choice]), "prompt_token_ids", [prompt])

    def is_first(self, chunk: decode_pb2.DecodeChunk) -> bool:
        """Whether it is the first rendered chunk of its choice."""
        return chunk.choice not in self._begun

    def finish(self, end: decode_pb2.DecodeFinished) -> Json:
        end = self._shown(end)
        is_first = end.choice not in self._begun
        self._begun.add(end.choice)
        choice = {
            "index": end.choice,
            **self._delta(self._parsers[end.choice].finish(end), is_first=is_first),
            "logprobs": None,
            "finish_reason": self._finish_reason(end),
            "stop_reason": self._stop_reason(end),
        }
        return self._stream_object([choice])

    def usage_chunk(self) -> Json:
        """The chunk after the last choice's end."""
        return {**self._stream_object([]), "usage": self._usage()}

    def whole(self, events: Sequence[Event]) -> Json:
        choices = [_Choice(number, [], []) for number in range(len(self._prompts) * self._num_choices)]
        for event in events:
            choice, part = choices[event.choice], self._shown(event)
            if isinstance(part, decode_pb2.DecodeFinished):
                choice.end = part
            else:
                choice.chunks.append(part)
                choice.logprobs.extend(part.logprobs)
        shown = []
        for first in range(0, len(choices), self._num_choices):
            of_prompt = choices[first : first + self._num_choices]
            num_best = self._shown_as.num_best or self._num_choices
            if num_best < self._num_choices:
                of_prompt = sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[:num_best]
            shown += of_prompt
        body: Json = {
            **self._head,
            "object": self._whole_object,
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(shown)],
            "usage": self._usage(),
        }
        of_choices = [choice.number // self._num_choices for choice in shown]
        if self._shown_as.HasField("prompt_logprobs"):
            # Choices of a prompt share its list.
            lists = {
                n: prompt_logprobs.to_json(
                    found, self._prompts[n], self._shown_as.prompt_logprobs, self._token_bytes
                )
                for n, found in self._prompt_logprobs.items()
            }
            body = self._of_prompts(body, "prompt_logprobs", [lists[prompt] for prompt in of_choices])
        if self._shown_as.token_ids:
            prompts = [list(self._prompts[prompt]) for prompt in of_choices]
            body = self._of_prompts(body, "prompt_token_ids", prompts)
        return body

    def _whole_choice(self, index: int, choice: _Choice) -> Json:
        text = self._echoed_text(choice.number) + "".join(chunk.text for chunk in choice.chunks)
        parser = self._parsers[choice.number]
        body: dict[str, JsonValue] = {
            "index": index,
            **self._whole_part(parser.push(text) + parser.finish(choice.end)),
            "logprobs": self._logprobs(choice.number, choice.logprobs, is_first=True),
            "finish_reason": self._finish_reason(choice.end),
            "stop_reason": self._stop_reason(choice.end),
        }
        if self._shown_as.token_ids:
            body["token_ids"] = [token_id for chunk in choice.chunks for token_id in chunk.token_ids]
        return body

    def _usage(self) -> Json:
        usage = usage_json([self._receipts[number] for number in sorted(self._receipts)], self._num_choices)
        if self._shown_as.hides_output:
            usage = {**usage, "completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _shown(self, event: EventT) -> EventT:
        """The visible part of the event; stores receipts and prompts' log probabilities."""
        if isinstance(event, decode_pb2.DecodeFinished):
            self._receipts[event.choice] = event.receipt
        elif event.HasField("prompt_logprobs"):
            self._prompt_logprobs[event.choice // self._num_choices] = event.prompt_logprobs
        return cast(EventT, prompt_logprobs.without_output(event)) if self._shown_as.hides_output else event

    def _stop_reason(self, end: decode_pb2.DecodeFinished) -> str | int | None:
        """vLLM's field: the stop string, or the stop token's id; None at a plain end token."""
        return end.stop_token_id if end.HasField("stop_token_id") else end.stop_reason or None

    def _echoed_text(self, choice: int) -> str:
        texts = self._shown_as.echoed_texts
        return texts[choice // self._num_choices] if texts else ""

    def _stream_object(self, choices: Sequence[Json]) -> Json:
        body = {**self._head, "object": self._chunk_object, "choices": choices}
        return {**body, "usage": self._usage_so_far(choices)} if self._with_usage else body

    def _usage_so_far(self, choices: Sequence[Json]) -> Json | None:
        """The usage in the chunk of a choice; None unless the caller requested it in each chunk, as in
        vLLM."""
        if not (choices and self._shown_as.continuous_usage):
            return None
        number = cast(int, choices[0]["index"])
        num_prompt, num_output = len(self._prompts[number // self._num_choices]), self._num_tokens[number]
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
        }

    def _logprobs(
        self, choice: int, positions: Sequence[common_pb2.PositionLogprobs], *, is_first: bool
    ) -> Json | None:
        """`is_first`: for the first chunk of a choice, or a whole answer."""
        if not self._wants_logprobs:
            return None
        with_prompt = is_first and bool(self._shown_as.echoed_texts)
        return self._logprobs_object(choice, positions, with_prompt=with_prompt)

    def _of_prompts(self, body: Json, name: str, values: Sequence[JsonValue]) -> Json:
        """Adds a field about prompts, one value for each choice in the body, where vLLM has it."""
        return {**body, name: values[0]}

    def _finish_reason(self, end: decode_pb2.DecodeFinished) -> str:
        """Call it after the choice's last part."""
        if self._parsers[end.choice].ends_with_calls:
            return "function_call" if self._as_function_call else "tool_calls"
        return _FINISH_REASONS[end.reason]

    def _id_name(self, token: common_pb2.TokenLogprob) -> str:
        return f"token_id:{token.token_id}"

    def _bytes_of(self, token: common_pb2.TokenLogprob) -> bytes:
        return token.token_bytes or self._token_bytes(token.token_id)

    @abstractmethod
    def _delta(self, part: AnswerDelta, *, is_first: bool) -> Json:
        """The part of a stream chunk's choice that holds the text."""

    @abstractmethod
    def _whole_part(self, part: AnswerDelta) -> Json:
        """The part of a whole answer's choice that holds the text."""

    @abstractmethod
    def _logprobs_object(
        self, choice: int, positions: Sequence[common_pb2.PositionLogprobs], *, with_prompt: bool
    ) -> Json:
        """`with_prompt`: the prompt's tokens come first."""


def _call_json(call: CallDelta) -> dict[str, JsonValue]:
    """The first part of a call, or a later part without id and name."""
    if not call.name:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


class ChatRenderer(Renderer):
    answer_kind = "chat"
    _id_prefix = "chatcmpl-"
    _whole_object = "chat.completion"
    _chunk_object = "chat.completion.chunk"

    def _delta(self, part: AnswerDelta, *, is_first: bool) -> Json:
        delta: dict[str, JsonValue] = {"role": "assistant", "content": ""} if is_first else {}
        if part.content:
            delta["content"] = part.content
        if part.reasoning:
            delta["reasoning_content"] = part.reasoning
        delta |= self._calls_json(part, with_index=True)
        return {"delta": delta}

    def _whole_part(self, part: AnswerDelta) -> Json:
        message: dict[str, JsonValue] = {
            "role": "assistant",
            "content": None if part.calls and not part.content else part.content,
            "refusal": None,
        }
        if part.reasoning:
            message["reasoning_content"] = part.reasoning
        return {"message": message | self._calls_json(part, with_index=False)}

    def _calls_json(self, part: AnswerDelta, *, with_index: bool) -> dict[str, JsonValue]:
        """The field for the calls; {} without calls."""
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
        name = self._id_name(token) if self._shown_as.tokens_as_ids else raw.decode("utf-8", "replace")
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

    def _delta(self, part: AnswerDelta, *, is_first: bool) -> Json:
        return {"text": part.content}

    def _whole_part(self, part: AnswerDelta) -> Json:
        return {"text": part.content}

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
            logprobs[0] = top[0] = None  # the first token has no log probability
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}

    def _of_prompts(self, body: Json, name: str, values: Sequence[JsonValue]) -> Json:
        choices = zip(cast(Sequence[Json], body["choices"]), values, strict=True)
        return {**body, "choices": [{**choice, name: value} for choice, value in choices]}

    def _name(self, token: common_pb2.TokenLogprob) -> str:
        """The token's text; parts of a character are written as in OpenAI's API, so names do not collide."""
        if self._shown_as.tokens_as_ids:
            return self._id_name(token)
        raw = self._bytes_of(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
