"""Parses OpenAI request bodies; names each field that it refuses.

    bytes -> UTF-8? -> JSON of the right types? -> no refused field? -> ChatBody / CompletionBody

fields.py lists refused fields and fields without effect. docs/parameters.md lists the others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, TypeVar, get_type_hints

from pydantic import BaseModel, JsonValue, ValidationError, create_model
from tandem_core.beams import MAX_BEAM_WIDTH, BeamParams, EarlyStopping
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide
from tandem_core.model.conversation import ChatOptions, Message, Turn
from tandem_core.sampling import SamplingParams
from tandem_proto.v1 import answers_pb2
from tandem_service.validation import reason

from tandem_gateway.dialects.fields import CHAT, COMPLETION, FieldTable, Ignored, shown
from tandem_gateway.dialects.openai_guides import ResponseFormat, StructuredOutputs, only_guide
from tandem_gateway.dialects.openai_messages import Body, ChatTurn, to_messages, to_tool_choice
from tandem_gateway.dialects.reasoning_hints import reasoning_arguments
from tandem_gateway.errors import UnsupportedFieldError
from tandem_gateway.request import MAX_CHOICES, check_cache_salt, check_call, check_request_id
from tandem_gateway.tools.choice import ToolChoice, check_levels

#: Choices, or beams, of all prompts of a call.
MAX_SEQUENCES = 128
#: By the names in transformers.
_EARLY_STOPPING: Mapping[bool | str, EarlyStopping] = MappingProxyType(
    {False: EarlyStopping.HEURISTIC, True: EarlyStopping.WHEN_FULL, "never": EarlyStopping.NEVER}
)
#: Digits of 2^32 - 1.
_MAX_TOKEN_ID_DIGITS = 10
#: OpenAI's default of max_tokens in completions; a chat's answer may be as long as the context allows.
_COMPLETION_TOKENS = 16


class StreamOptions(Body):
    include_usage: bool | None = None
    """A last chunk without choices has the usage, with the receipt."""
    continuous_usage_stats: bool | None = None
    """With include_usage: each chunk has the usage of its choice so far, as in vLLM."""


BodyT = TypeVar("BodyT", bound=BaseModel)

#: Guides and beam search have other fields here; for guides see openai_guides.py.
_SAMPLING_TYPES = {
    name: kind
    for name, kind in get_type_hints(SamplingParams).items()
    if name not in ("guide", "beam_search")
}
if TYPE_CHECKING:
    _SamplingBody = Body
else:
    #: The fields of SamplingParams with their names and types; null means the default, as in OpenAI's API.
    _SamplingBody = create_model(
        "_SamplingBody",
        __base__=Body,
        **{name: (kind | None, None) for name, kind in _SAMPLING_TYPES.items()},
    )


class _CommonBody(_SamplingBody):
    """Fields of both endpoints: sampling, with OpenAI's types where they differ, and Tandem's own. Fields of
    gRPC's messages have their descriptions in the .proto files."""

    model: str | None = None
    stream: bool | None = None
    """The answer comes as server-sent events."""
    stream_options: StreamOptions | None = None
    """Only with stream."""
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | Literal[False] | None = None
    bad_words: list[str | list[int]] | None = None
    truncate_prompt_tokens: int | None = None
    """Uses this many of the prompt's last tokens; -1: as many as leave room for max_tokens."""
    add_special_tokens: bool | None = None
    """For completions: false adds no token before the prompt."""
    detokenize: bool | None = None
    return_token_ids: bool | None = None
    """The answer has the token ids of prompt and output."""
    return_tokens_as_token_ids: bool | None = None
    """Log probabilities name tokens as token_id:5."""
    n: int | None = None
    best_of: int | None = None
    """Computes this many choices and returns the n with the highest mean log probability; not streamed."""
    use_beam_search: bool | None = None
    """The best texts of a beam search instead of sampled ones."""
    beam_width: int | None = None
    """Beams, 1 to 16; default: best_of, else n."""
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    """When the search ends, as in transformers: false, true or never."""
    request_id: str | None = None
    cache_salt: str | None = None
    slo_class: str | None = None
    speculation: str | None = None
    response_format: ResponseFormat | None = None
    """text, json_object, or json_schema with a schema that the answer matches."""
    structured_outputs: StructuredOutputs | None = None
    """What the answer must match: a JSON schema, a regex, one of several texts, or a grammar of Lark."""
    guided_json: dict[str, Any] | str | None = None
    """The older name of structured_outputs.json."""
    guided_regex: str | None = None
    """The older name of structured_outputs.regex."""
    guided_choice: list[str] | None = None
    """The older name of structured_outputs.choice."""
    guided_grammar: str | None = None
    """The older name of structured_outputs.grammar."""

    #: How errors name the fields of this API, by patterns of their beginnings, where they differ.
    field_names: ClassVar[Mapping[str, str]] = {}

    #: Table of the fields that this model does not declare.
    field_table: ClassVar[FieldTable]

    def checked(self, ignored: Ignored) -> Self:
        """Raises InvalidRequestError for values that do not go together, and UnsupportedFieldError for
        refused fields. Adds the names of ignored ones."""
        self.field_table.check(self.model_extra or {})
        ignored.unknown("", self.model_extra, self.field_table)
        ignored.within("", self)
        if self.shows_prompt_logprobs and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs", "cannot be streamed; send stream: false, or use gRPC"
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError("stream_options", "is only allowed with stream: true")
        if self.best_of is not None and not 1 <= self.best_of <= MAX_CHOICES:
            raise InvalidRequestError("best_of", f"is {self.best_of}; it must be between 1 and {MAX_CHOICES}")
        if self.compares_choices and self.stream:
            raise InvalidRequestError(
                "best_of",
                "cannot be streamed, since the best choices are known at the end; send stream: false",
            )
        if (self.best_of or self.n or 1) < (self.n or 1):
            raise InvalidRequestError("best_of", f"is {self.best_of}, less than n ({self.n})")
        self._check_beams()
        check_call(
            1 if self.n is None else self.n,
            beam_width=self._beam_width[1] if self.use_beam_search else None,
            echoes=self.echoes,
            detokenizes=self.detokenize is not False,
        )
        limit = self.truncate_prompt_tokens
        if limit is not None and limit != -1 and limit < 1:
            raise InvalidRequestError(
                "truncate_prompt_tokens", f"is {limit}; it must be at least 1, or -1 for as many as fit"
            )
        check_request_id(self.request_id or "")
        check_cache_salt(self.cache_salt or "")
        return self

    @property
    def sent_names(self) -> Mapping[str, str]:
        """Names in the body of fields of `given_sampling`, if they differ."""
        return {}

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def given_sampling(self) -> dict[str, Any]:
        """The fields that the body sets, by name, as SamplingParams takes them."""
        given = self.model_dump(include=set(_SAMPLING_TYPES), exclude_none=True)
        if self.stop is not None:
            given["stop"] = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if self.logit_bias is not None:
            given["logit_bias"] = _token_ids_as_keys(self.logit_bias)
        if (guide := self._guide()) is not None:
            given["guide"] = guide
        if self.use_beam_search:
            given["beam_search"] = BeamParams(
                self._beam_width[1],
                1.0 if self.length_penalty is None else self.length_penalty,
                _EARLY_STOPPING[self.early_stopping or False],
            )
        if given.get("top_k") == -1:  # vLLM's clients send -1 for "all"
            given["top_k"] = 0
        if given.get("seed") == -1:  # and for "any"
            del given["seed"]
        if not self.shows_prompt_logprobs:
            given["prompt_logprobs"] = None
        given["bad_words"] = tuple(tuple(word) for word in self.bad_words or () if not isinstance(word, str))
        return given

    @property
    def num_choices(self) -> int:
        """Choices to compute for each prompt; a beam search selects the best ones itself."""
        return (not self.use_beam_search and self.best_of) or self.n or 1

    @property
    def num_sequences(self) -> int:
        """Sequences computed at once for each prompt."""
        return self._beam_width[1] if self.use_beam_search else self.num_choices

    @property
    def _beam_width(self) -> tuple[str, int]:
        """The field that sets the width, Tandem's or vLLM's, and the width."""
        if self.beam_width is not None:
            return "beam_width", self.beam_width
        return ("n", self.n or 1) if self.best_of is None else ("best_of", self.best_of)

    def _check_beams(self) -> None:
        if not self.use_beam_search:
            if self.beam_width:
                raise InvalidRequestError("beam_width", "is only allowed with use_beam_search: true")
            return
        field, width = self._beam_width
        if not 1 <= width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                field, f"is {width}; with beam search it must be between 1 and {MAX_BEAM_WIDTH}"
            )
        if self.best_of is not None and self.best_of != width:
            raise InvalidRequestError("best_of", f"is {self.best_of}, but beam_width is {width}; send one")

    @property
    def compares_choices(self) -> bool:
        return self.num_choices > (self.n or 1)

    def shown(self) -> answers_pb2.ShownAs:
        """How to show the answer."""
        return answers_pb2.ShownAs(
            token_ids=bool(self.return_token_ids),
            tokens_as_ids=bool(self.return_tokens_as_token_ids),
            num_best=(self.n or 1) if self.compares_choices else 0,
            hides_logprobs=self.compares_choices and not self.wants_logprobs,
            continuous_usage=bool(self.stream_options and self.stream_options.continuous_usage_stats),
            prompt_logprobs=self.prompt_logprobs if self.shows_prompt_logprobs else None,
        )

    @property
    def shows_prompt_logprobs(self) -> bool:
        return self.prompt_logprobs is not None and self.prompt_logprobs is not False

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def echoes(self) -> bool:
        return False

    @property
    def bad_texts(self) -> tuple[str, ...]:
        """The texts among bad_words."""
        return tuple(word for word in self.bad_words or () if isinstance(word, str))

    def _guide(self) -> Guide | None:
        older = {"json": self.guided_json, "regex": self.guided_regex, "choice": self.guided_choice}
        return only_guide(
            [
                self.response_format.guide() if self.response_format is not None else None,
                self.structured_outputs.guide() if self.structured_outputs is not None else None,
                StructuredOutputs.model_validate(older | {"grammar": self.guided_grammar}).guide("guided_"),
            ]
        )


class ChatBody(_CommonBody):
    field_table = CHAT

    messages: list[ChatTurn]
    """The conversation: system or developer, user, assistant and tool messages."""
    max_completion_tokens: int | None = None
    """OpenAI's newer name of max_tokens."""
    logprobs: bool | None = None
    """The log probability of each token."""
    top_logprobs: int | None = None
    """With logprobs: those of this many most likely tokens too, 0 to 20."""
    tools: list[dict[str, JsonValue]] | None = None
    """Functions that the model may call; at most 128."""
    tool_choice: JsonValue = None
    """auto, none, required, or a function that must be called."""
    parallel_tool_calls: bool | None = None
    """false: at most one call in the answer."""
    functions: list[dict[str, JsonValue]] | None = None
    """The older form of tools."""
    function_call: JsonValue = None
    """The older form of tool_choice."""
    chat_template_kwargs: dict[str, JsonValue] | None = None
    """Variables of the chat template, such as enable_thinking."""
    add_generation_prompt: bool | None = None
    """false: the prompt does not end with the beginning of an answer."""
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None
    """A hint about reasoning, in OpenAI's form."""
    reasoning: JsonValue = None
    """A hint about reasoning, in OpenRouter's form."""
    thinking: JsonValue = None
    """A hint about reasoning, in Anthropic's and DeepSeek's form."""
    enable_thinking: bool | None = None
    """A hint about reasoning, in Qwen's form."""

    def given_sampling(self) -> dict[str, Any]:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequestError("top_logprobs", "is only allowed with logprobs: true")
        given = super().given_sampling()
        if self.wants_logprobs or self.compares_choices:
            given["logprobs"] = self.top_logprobs or 0
        else:
            given["logprobs"] = None
        if self.max_completion_tokens is not None:
            given["max_tokens"] = self.max_completion_tokens
        return given

    def checked(self, ignored: Ignored) -> Self:
        if self.add_special_tokens:
            raise UnsupportedFieldError(
                "add_special_tokens", "is not supported in chats, whose template has them; leave it out"
            )
        return super().checked(ignored)

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def sent_names(self) -> Mapping[str, str]:
        names = {"max_tokens": self.max_completion_tokens, "logprobs": self.top_logprobs}
        sent = {"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"}
        return {name: sent[name] for name, value in names.items() if value is not None}

    @classmethod
    def of(cls, fields: Mapping[str, Any], ignored: Ignored) -> Self:
        """A checked chat. Raises InvalidRequestError."""
        try:
            body = cls.model_validate({name: value for name, value in fields.items() if value is not None})
        except ValidationError as error:
            raise _invalid_body(error) from error
        return body.checked(ignored)

    def chat_messages(self) -> tuple[Message, ...]:
        return to_messages(self.messages)

    def chosen_tools(self, ignored: Ignored) -> ToolChoice:
        return to_tool_choice(
            self.tools,
            self.tool_choice,
            ignored,
            is_parallel=self.parallel_tool_calls is not False,
            functions=self.functions,
            function_call=self.function_call,
        )

    def chat_options(self, variables: Collection[str], ignored: Ignored) -> ChatOptions:
        """The options apart from tools. `variables`: of the model's chat template."""
        hints = {
            "reasoning_effort": self.reasoning_effort,
            "reasoning": self.reasoning,
            "thinking": self.thinking,
            "enable_thinking": self.enable_thinking,
        }
        arguments = {**reasoning_arguments(hints, variables, ignored), **(self.chat_template_kwargs or {})}
        check_levels("chat_template_kwargs", arguments)
        if not self.continue_final_message:
            turn: Turn = "none" if self.add_generation_prompt is False else "new"
        elif self.add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message", "cannot be true with add_generation_prompt: true; send one of them"
            )
        else:
            turn = "continued"
        return ChatOptions(template_arguments=arguments, turn=turn)


class CompletionBody(_CommonBody):
    field_table = COMPLETION

    prompt: str | list[int] | list[str | list[int]]
    """A text, token ids, or a list of these, each of which is answered."""
    logprobs: int | Literal[False] | None = None
    """The log probability of each token, and those of this many most likely ones, 0 to 20."""
    echo: bool | None = None
    """The text begins with the prompt; with logprobs the prompt's tokens come first."""
    max_tokens: int | None = None

    def given_sampling(self) -> dict[str, Any]:
        given = super().given_sampling()
        if not self.wants_logprobs:
            given["logprobs"] = 0 if self.compares_choices else None
        elif self.echoes:
            given["prompt_logprobs"] = max(given["logprobs"], given["prompt_logprobs"] or 0)
        given.setdefault("max_tokens", _COMPLETION_TOKENS)
        if self.wants_only_prompt:
            given["max_tokens"] = 1
        return given

    def shown(self) -> answers_pb2.ShownAs:
        shown = super().shown()
        shown.hides_output = self.wants_only_prompt
        return shown

    @property
    def echoes(self) -> bool:
        return bool(self.echo)

    @property
    def wants_only_prompt(self) -> bool:
        return self.echoes and self.max_tokens == 0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each as a text or as token ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt", "is empty; send a text or token ids")
        if isinstance(prompt[0], int):
            return [[token for token in prompt if isinstance(token, int)]]
        prompts = [one for one in prompt if not isinstance(one, int)]
        if len(prompts) * self.num_sequences > MAX_SEQUENCES:
            raise InvalidRequestError(
                "prompt",
                f"holds {len(prompts)} prompts with {self.num_sequences} choices each; the limit is "
                f"{MAX_SEQUENCES} choices in all: send fewer at once",
            )
        return prompts


def parse_json(kind: type[BodyT], body: bytes) -> BodyT:
    """Raises InvalidRequestError naming the field (or the byte) that is wrong."""
    try:
        body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            "body", f"is not valid UTF-8 at byte {error.start} ({error.reason}); encode the JSON as UTF-8"
        ) from error
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _invalid_body(error) from error


def _invalid_body(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False)[0]
    if first["type"] == "json_invalid":
        return InvalidRequestError("body", f"is not valid JSON: {first['ctx']['error']}")
    field = ""
    for part in first["loc"]:
        if isinstance(part, int):
            field += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):  # not a union's branch
            field += f".{part}" if field else part
    if first["type"] == "missing":
        return InvalidRequestError(field, "is required; add it")
    return InvalidRequestError(field or "body", f"is {shown(first['input'])}: {reason(first)}")


def _token_ids_as_keys(logit_bias: Mapping[str, float]) -> Mapping[int, float]:
    for key in logit_bias:
        if not (key.isascii() and key.isdigit() and len(key) <= _MAX_TOKEN_ID_DIGITS):
            raise InvalidRequestError(
                "logit_bias", f"key {key[:32]!r} is not a token id; use whole numbers below 2^32 as keys"
            )
    return MappingProxyType({int(key): bias for key, bias in logit_bias.items()})
