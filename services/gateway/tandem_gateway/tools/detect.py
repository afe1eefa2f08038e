"""Detects the format of tool calls, and reasoning, in a model's chat template."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from tandem_core.model.tokenizer import Tokenizer

from tandem_gateway.tools.formats import FORMATS, HERMES, LLAMA3, MISTRAL, MISTRAL_ARGS, ToolFormat
from tandem_gateway.tools.reasoning import CLOSE, OPEN


class FormatSetting(enum.StrEnum):
    """The setting `--tool-format`."""

    AUTO = "auto"
    HERMES = "hermes"
    LLAMA3 = "llama3"
    MISTRAL = "mistral"
    MISTRAL_ARGS = "mistral-args"


def tool_format_of(tokenizer: Tokenizer, setting: FormatSetting = FormatSetting.AUTO) -> ToolFormat:
    """The format as set, or as detected in the template. Templates without tools use Hermes's format."""
    if setting is not FormatSetting.AUTO:
        return FORMATS[setting.value]
    template = tokenizer.manifest.chat_template
    if tokenizer.tool_use is None or "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    is_llama = tokenizer.added_token_id("<|python_tag|>") is not None or '"parameters": ' in template
    return LLAMA3 if is_llama else HERMES


def has_reasoning(tokenizer: Tokenizer) -> bool:
    return CLOSE in tokenizer.manifest.chat_template


def opens_reasoning(tokenizer: Tokenizer, prompt: Sequence[int]) -> bool:
    """Whether the prompt ends with the opening marker."""
    return tokenizer.decode(prompt[-16:], skip_special_tokens=False).rstrip().endswith(OPEN)
