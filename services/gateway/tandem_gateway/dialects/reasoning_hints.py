"""Converts the reasoning hints of several APIs to variables of the chat template.

reasoning_effort "low"                          OpenAI's
reasoning {"effort": "low"}, {"enabled": true}  the Responses API, OpenRouter
thinking {"type": "disabled"}                   Anthropic's: enabled, adaptive, between_tools, disabled
enable_thinking false                           Qwen's

A template that reads a level gets the effort. A template that reads a switch gets true or false. For other
templates the hints are ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pydantic import JsonValue

from tandem_gateway.dialects.fields import Ignored

#: Variables of templates: a level (gpt-oss), and switches (Qwen3, SmolLM3, GLM; DeepSeek, Granite).
_LEVEL, _SWITCHES = "reasoning_effort", ("enable_thinking", "thinking")
#: Efforts that turn reasoning off in a template with a switch.
_WITHOUT = ("none", "minimal", "disabled")


def reasoning_arguments(
    hints: Mapping[str, JsonValue], variables: Collection[str], ignored: Ignored
) -> dict[str, JsonValue]:
    """Variables of the template for `hints`, which are by field. A hint that disables reasoning takes
    precedence, then the first hint. Adds hints that the template does not read to `ignored`."""
    efforts = {field: effort for field, value in hints.items() if (effort := _effort(value))}
    known = [name for name in (_LEVEL, *_SWITCHES) if name in variables]
    if not efforts or not known:
        for field in efforts:
            ignored.add(field)
        return {}
    effort = next((one for one in efforts.values() if one in _WITHOUT), next(iter(efforts.values())))
    arguments: dict[str, JsonValue] = {name: effort not in _WITHOUT for name in known if name in _SWITCHES}
    if _LEVEL in known and effort not in ("enabled", "disabled"):
        arguments[_LEVEL] = effort
    return arguments


def _effort(hint: JsonValue) -> str:
    """The effort of a hint, "enabled" or "disabled"; "": it has none."""
    if isinstance(hint, dict):
        for name in ("effort", "enabled", "type"):
            if effort := _effort(hint.get(name)):
                return effort
        return ""
    if isinstance(hint, bool):
        return "enabled" if hint else "disabled"
    if not isinstance(hint, str):
        return ""
    return "enabled" if hint in ("adaptive", "between_tools", "auto") else hint
