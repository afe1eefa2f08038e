"""The form of the served model's answers, and its consequences for sampling."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from tandem_core.guide import Guide
from tandem_core.model.tokenizer import Tokenizer
from tandem_proto.v1 import answers_pb2

from tandem_gateway.request import ReceivedRequest
from tandem_gateway.tools import detect
from tandem_gateway.tools.choice import Mode, ToolChoice
from tandem_gateway.tools.detect import FormatSetting
from tandem_gateway.tools.grammar import Thinking, enforced_schemas, tool_guide
from tandem_gateway.tools.reasoning import CLOSE, OPEN


class AnswerForms:
    """The forms of one model's answers."""

    def __init__(self, tokenizer: Tokenizer, setting: FormatSetting, *, splits_reasoning: bool) -> None:
        self._tokenizer = tokenizer
        self._format = detect.tool_format_of(tokenizer, setting)
        self._has_reasoning = splits_reasoning and detect.has_reasoning(tokenizer)
        use = tokenizer.tool_use
        #: Whether the template refuses two calls in a message, so that an answer must not have two.
        self._is_single = use is not None and not use.has_parallel_calls

    def of(
        self, choice: ToolChoice, prompt: Sequence[int], *, is_guided: bool
    ) -> answers_pb2.AnswerForm | None:
        """None: everything is content. `is_guided`: a grammar from `guide` constrains the answer."""
        if not choice.tools and not self._has_reasoning:
            return None
        return answers_pb2.AnswerForm(
            tool_format=self._format.name if choice.tools else "",
            tool_names=[tool.name for tool in choice.tools],
            single_call=self._is_single or not choice.is_parallel,
            reasoning=self._has_reasoning,
            starts_in_reasoning=self._has_reasoning and detect.opens_reasoning(self._tokenizer, prompt),
            as_function_call=choice.as_function_call,
            guided=is_guided,
            required=choice.mode is Mode.REQUIRED,
        )

    async def guide(
        self,
        choice: ToolChoice,
        content: Guide | None,
        prompt: Sequence[int],
        fault: Callable[[Guide], Awaitable[str]],
    ) -> Guide | None:
        """The answer's grammar, if it needs one. `content`: the request's guide for an answer without calls;
        `fault`: why a guide cannot be used, or "". Raises InvalidRequestError."""
        is_required = choice.mode is Mode.REQUIRED
        if not choice.tools or not (is_required or content or any(tool.is_strict for tool in choice.tools)):
            return content
        schemas = await enforced_schemas(choice.tools, fault, is_required=is_required)
        thinking = None
        if self._has_reasoning:
            opens = detect.opens_reasoning(self._tokenizer, prompt)
            thinking = Thinking.OPENED if opens else Thinking.POSSIBLE
        return tool_guide(
            self._format,
            choice.tools,
            schemas,
            self._tokenizer.added_token_id,
            is_required=is_required,
            is_single=self._is_single or not choice.is_parallel,
            content=content,
            thinking=thinking,
        )

    def with_sampling(self, received: ReceivedRequest, choice: ToolChoice) -> ReceivedRequest:
        """Keeps special tokens in the text if markers are among them. An answer of required calls has no stop
        strings, which would cut the calls."""
        if choice.mode is Mode.REQUIRED and received.sampling.get("stop"):
            received = dataclasses.replace(received, sampling={**received.sampling, "stop": ()})
        markers = (
            *(self._format.markers if choice.tools else ()),
            *((OPEN, CLOSE) if self._has_reasoning else ()),
        )
        ids = (self._tokenizer.added_token_id(marker) for marker in markers)
        if not any(token_id is not None and self._tokenizer.is_special(token_id) for token_id in ids):
            return received
        return dataclasses.replace(received, sampling={**received.sampling, "skip_special_tokens": False})
