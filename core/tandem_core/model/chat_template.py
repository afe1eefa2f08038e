"""Renders chat templates as transformers' `apply_chat_template(sanitize_control_tokens=True)` does.

    messages, tools, template arguments --mark--> template --cut at the marks--> Segment*

A control token such as `<|im_end|>` inside a message, a tool or an argument becomes a quoted segment, which
the tokenizer encodes as plain text. Otherwise a user could close his turn and speak as the system.

Templates take tools in different ways, or not at all. `tool_use` finds out by rendering a small conversation.
A template that knows no tools gets them as text (tool_prompt.py).
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta

from tandem_core.errors import InvalidRequestError, ModelLoadError, quoted
from tandem_core.model.conversation import DEFAULT_OPTIONS, ChatOptions, Json, Message, Tool, ToolCall
from tandem_core.model.template_environment import template_environment
from tandem_core.model.token_pattern import any_of
from tandem_core.model.tool_prompt import uses_tools, with_tools_as_text

#: Variables that callers may not set, because fields of the request or the model define them.
_RESERVED = frozenset({"messages", "tools", "add_generation_prompt", "bos_token", "eos_token"})
#: Mistral's templates refuse tool call ids of another length.
_SHORT_ID_CHARS = 9
#: Maximum size of a template file; templates of models have up to 20 kB.
MAX_TEMPLATE_BYTES = 1 << 20
#: Characters that stay as they are in JSON and in Python's repr, but are in hardly any text.
_MARKS = range(0x20000, 0x2A6D0)


@dataclass(frozen=True)
class Segment:
    """A part of the rendered prompt; `is_quoted` when it is a control token that the caller wrote."""

    text: str
    is_quoted: bool


@dataclass(frozen=True)
class ToolUse:
    """How a template takes tool calls."""

    #: The arguments as an object; else as JSON text.
    has_object_arguments: bool
    #: Ids of 9 letters and digits alone.
    has_short_ids: bool
    #: Content is null in a message with calls; else "".
    has_null_content: bool
    #: Several calls in one message.
    has_parallel_calls: bool = False


class ChatTemplate:
    """One compiled template. `control_tokens` are the strings that must not take effect in a message."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, control_tokens: Iterable[str]) -> None:
        """Raises ModelLoadError when the template is not valid Jinja."""
        environment = template_environment()
        try:
            self._template = environment.from_string(source)
            #: Names that the template reads and does not set itself.
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except (jinja2.TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ModelLoadError(
                f"the model's chat template cannot be compiled ({_fault(error)}); pull a model with a valid "
                "template, or start with --chat-template FILE"
            ) from error
        self._special_tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._control = re.compile(any_of(control_tokens))

    def render(self, messages: Sequence[Message], options: ChatOptions = DEFAULT_OPTIONS) -> list[Segment]:
        """The prompt in order. Raises InvalidRequestError when the template refuses the messages (roles that
        do not alternate, for example)."""
        for name in options.template_arguments:
            if name in _RESERVED:
                raise InvalidRequestError(
                    "chat_template_kwargs",
                    f"sets {quoted(name)}, which the request's own fields or the model set; leave it out",
                )
        tools: Sequence[Tool] = options.tools
        use = None
        if uses_tools(messages, tools):
            use = self.tool_use
            if use is None:
                messages = with_tools_as_text(messages, tools, knows_system=self._knows_system)
                tools = ()
        variables = {
            "documents": None,
            **options.template_arguments,
            "messages": [_as_dict(message, use) for message in messages],
            "tools": [tool.definition for tool in tools] or None,
            "add_generation_prompt": options.turn == "new",
        }
        is_marked = any(self._control.search(text) for text in _strings(variables))
        if not is_marked and options.turn != "continued":
            text = self._render(variables)
            return [Segment(text, is_quoted=False)] if text else []
        opening, closing, end = _unused_characters(variables)
        if is_marked:
            mark = functools.partial(self._control.sub, rf"{opening}\g<0>{closing}")
            variables = {name: _mapped(value, mark) for name, value in variables.items()}
        if options.turn == "continued":
            text = self._render_continued(variables, end)
        else:
            text = self._render(variables)
        # Odd pieces are quoted control tokens. A template may cut between a pair of marks (split, slices).
        # A lone mark is dropped but still separates the text, so the parts cannot join to a control token.
        begin, stop = (f"(?:{mark}|{re.escape(json.dumps(mark)[1:-1])})" for mark in (opening, closing))
        pieces = re.split(f"{begin}({self._control.pattern}){stop}|{begin}|{stop}", text)
        return [Segment(piece, is_quoted=index % 2 == 1) for index, piece in enumerate(pieces) if piece]

    @staticmethod
    def check_file(path: Path, bos_token: str, eos_token: str) -> str:
        """Reads a template and checks that it compiles and shows the user's message. Raises ModelLoadError
        with file and line."""

        def refuse(what: object, cause: Exception | None = None) -> NoReturn:
            raise ModelLoadError(f"--chat-template {path}: {what}; give a Jinja template of chats") from cause

        try:
            with path.open("rb") as file:
                content = file.read(MAX_TEMPLATE_BYTES + 1)
            source = content.decode("utf-8-sig")
        except (OSError, ValueError) as error:
            refuse(f"cannot be read as UTF-8 text ({error})", error)
        if len(content) > MAX_TEMPLATE_BYTES:
            refuse(f"has more than {MAX_TEMPLATE_BYTES:,} bytes")
        probe = {"role": "user", "content": "probed question"}
        try:
            text = template_environment().from_string(source).render(
                messages=[probe], tools=None, documents=None, add_generation_prompt=True,
                bos_token=bos_token, eos_token=eos_token,
            )  # fmt: skip
        except Exception as error:  # a template is a program, so it can raise anything
            refuse(_fault(error), error)
        if probe["content"] not in text:
            refuse("does not show the user's message")
        return source

    @functools.cached_property
    def tool_use(self) -> ToolUse | None:
        """How the template takes tools; None if it does not show tools, calls or results."""
        for null, is_object, short in itertools.product((True, False), (True, False), (False, True)):
            use = ToolUse(has_object_arguments=is_object, has_short_ids=short, has_null_content=null)
            if self._shows(use, num_calls=1):
                return ToolUse(is_object, short, null, has_parallel_calls=self._shows(use, num_calls=2))
        return None

    def _shows(self, use: ToolUse, *, num_calls: int) -> bool:
        """Whether a conversation with these calls is rendered, with all that the model has to see."""
        names = [f"probed_tool_{number}" for number in range(num_calls)]
        calls = tuple(
            ToolCall(f"call{number}", name, json.dumps({"key": f"value of {name}"}))
            for number, name in enumerate(names)
        )
        conversation = [
            Message("user", "probed question"),
            Message("assistant", None, tool_calls=calls),
            *(
                Message("tool", f"result of {call.name}", tool_call_id=call.id, name=call.name)
                for call in calls
            ),
        ]
        parameters = {"type": "object", "properties": {"key": {"type": "string"}}}
        tools = [
            {"type": "function", "function": {"name": name, "description": f"what {name} does",
                                              "parameters": parameters}}
            for name in names
        ]  # fmt: skip
        try:
            text = self._render(
                {
                    "documents": None,
                    "messages": [_as_dict(message, use) for message in conversation],
                    "tools": tools,
                    "add_generation_prompt": True,
                }
            )
        except InvalidRequestError:
            return False
        shown = ("what {}", "result of {}", '"value of {}"')
        return all(form.format(name) in text for form in shown for name in names)

    @functools.cached_property
    def _knows_system(self) -> bool:
        conversation = [Message("system", "probed instruction"), Message("user", "probed question")]
        try:
            text = self._render(
                {"messages": [_as_dict(message, None) for message in conversation], "tools": None,
                 "documents": None, "add_generation_prompt": True}
            )  # fmt: skip
        except InvalidRequestError:
            return False
        return "probed instruction" in text

    def _render_continued(self, variables: dict[str, Any], end: str) -> str:
        """Up to the end of the last message's content. As in transformers, a template that trims the content
        trims the mark's space, too."""
        last = variables["messages"][-1]
        last["content"] = f"{last['content'] or ''}{end} "
        text = self._render(variables)
        before, mark, after = text.rpartition(end)
        if not mark:
            raise InvalidRequestError(
                "continue_final_message",
                "cannot be used with these messages: the model's chat template does not show the last one",
            )
        return before if after.startswith(" ") else before.rstrip()

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            return self._template.render(**{**self._special_tokens, **variables})
        except Exception as error:  # a template is a program, so it can raise anything
            raise InvalidRequestError(
                "messages", f"the model's chat template refuses them: {error}"
            ) from error


def _fault(error: Exception) -> str:
    """The error, after the template line where it occurred if that is known."""
    line = getattr(error, "lineno", None)
    for frame in traceback.extract_tb(error.__traceback__):
        line = frame.lineno if frame.filename == "<template>" else line
    return f"line {line}: {error}" if line else str(error) or type(error).__name__


def _as_dict(message: Message, use: ToolUse | None) -> dict[str, Json]:
    """The message as templates take it; without tools `use` is None."""
    result: dict[str, Json] = {"role": message.role, "content": message.content}
    if message.content is None and not (use is not None and use.has_null_content and message.tool_calls):
        result["content"] = ""
    if message.tool_calls and use is not None:
        result["tool_calls"] = [
            {
                "id": _call_id(call.id, use),
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.parsed_arguments() if use.has_object_arguments else call.arguments,
                },
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        result["tool_call_id"] = _call_id(message.tool_call_id, use)
    if message.name:
        result["name"] = message.name
    if message.reasoning:
        result["reasoning_content"] = result["thinking"] = message.reasoning
    return result


def _call_id(call_id: str, use: ToolUse | None) -> str:
    """The id, or nine letters and digits of it, the same in a call and in its result."""
    if use is None or not use.has_short_ids:
        return call_id
    if len(call_id) == _SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:_SHORT_ID_CHARS]


def _strings(value: Any) -> Iterator[str]:
    """Every text in a JSON value, keys included."""
    if isinstance(value, str):
        yield value
    elif value is None or isinstance(value, int | float):
        return  # first, since the checks below are slow for these
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """The JSON value with every text changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_mapped(item, change) for item in value]
    return value


def _unused_characters(variables: Mapping[str, Any]) -> tuple[str, str, str]:
    """Three characters that are nowhere in these values: two marks around quoted control tokens, and one
    behind a message that is continued."""
    used = set().union(*_strings(variables))
    free = (chr(code) for code in _MARKS if chr(code) not in used)
    try:
        return next(free), next(free), next(free)
    except StopIteration:
        raise InvalidRequestError(
            "messages", "use every character of Unicode's CJK Extension B; remove one"
        ) from None
