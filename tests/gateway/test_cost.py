"""Time of the functions that read texts of callers and models: at most linear, in each of their states.

All tenants share the event loop, and the pods' watchdogs trust it, so a quadratic function lets a request
stop the others. Add a case for each new function that takes a text, a list or a tree whose size a caller
chooses, unless a limit keeps it small.
"""

from __future__ import annotations

import contextlib
import gc
import json
import time
from collections.abc import Callable

import pytest
import toy_tokenizers
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide
from tandem_core.json_schema import check_enforceable, rewrite
from tandem_core.lark import checked_lark
from tandem_core.model.chat_template import ChatTemplate
from tandem_core.model.conversation import ChatOptions, Json, Message, Tool, json_levels
from tandem_core.model.detokenizer import StreamingDetokenizer
from tandem_core.regex_size import check_class_syntax, check_control_characters, check_size
from tandem_core.sampling import SamplingParams
from tandem_gateway.dialects.chat_dialect import TypedEventsRenderer
from tandem_gateway.dialects.fields import Ignored
from tandem_gateway.dialects.messages_render import MessagesRenderer
from tandem_gateway.dialects.openai_models import ChatBody, parse_json
from tandem_gateway.dialects.openai_render import ChatRenderer
from tandem_gateway.dialects.responses_render import ResponsesRenderer
from tandem_gateway.tools.answer_parser import AnswerParser
from tandem_gateway.tools.choice import check_tools
from tandem_gateway.tools.formats import HERMES, LLAMA3, MISTRAL
from tandem_gateway.tools.grammar import tool_guide
from tandem_proto.v1 import answers_pb2, decode_pb2

#: 2 for a linear function, 4 for a quadratic one.
MAX_RATIO = 2.5
#: Shorter times are too imprecise to compare, and harm no other request.
NEGLIGIBLE_S = 0.002
_ROUNDS = 6

Work = Callable[[], object]


def assert_linear(prepare: Callable[[int], Work], size: int) -> None:
    """`prepare(n)` returns what is measured, with an input of length n, to run once. Both sizes are measured
    in turn, in CPU time of this thread; the best of each counts."""
    best_s = [float("inf")] * 2
    gc.disable()
    try:
        for _ in range(_ROUNDS):
            for index in range(2):
                work = prepare(size << index)
                start = time.thread_time()
                work()
                best_s[index] = min(best_s[index], time.thread_time() - start)
            if best_s[1] <= max(MAX_RATIO * best_s[0], NEGLIGIBLE_S):
                return
    finally:
        gc.enable()
    pytest.fail(f"{best_s[1]:.4f} s for {2 * size}, {best_s[0]:.4f} s for {size}")


def repeated(unit: str, size: int) -> str:
    return (unit * (size // len(unit) + 1))[:size]


def refused_or_not(work: Callable[[], object]) -> Work:
    def run() -> None:
        with contextlib.suppress(InvalidRequestError):
            work()

    return run


CALL = '<tool_call>{"name": "find", "arguments": {"a": 1}}'
#: Format (with "think": that of a model that reasons), the text that enters the state, what is repeated.
STATES = {
    "text": ("hermes", "", "ab c"),
    "blanks": ("hermes", "", " "),
    "blanks in text": ("llama3", "a", "\n"),
    "parts of a marker": ("hermes", "", "<tool_cal "),
    "many openers": ("hermes", "", "<tool_call>```json<tools>"),
    "opened": ("hermes", "<tool_call>", " "),
    "opened list": ("mistral", "[TOOL_CALLS] [", " "),
    "a bare object": ("hermes", '{"name"', " "),
    "an object without a name": ("hermes", '<tool_call>{"a": "', "x"),
    "a number without a name": ("hermes", '<tool_call>{"a": 1', "1"),
    "objects within each other": ("hermes", '<tool_call>{"k": "<tool_call>{', '", ":1,": ":2,": "'),
    "a name": ("mistral", "", "[TOOL_CALLS]a "),
    "a name with an object": ("mistral", "", "[TOOL_CALLS]a!{"),
    "arguments": ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "', "x\\n"),
    "deep arguments": ("hermes", '<tool_call>{"name": "find", "arguments": {"a": ', "["),
    "blanks in arguments": ("hermes", '<tool_call>{"name": "find", "arguments": {', " "),
    "a number in arguments": ("hermes", '<tool_call>{"name": "find", "arguments": {"a": 1', "1"),
    "arguments before the name": ("hermes", '<tool_call>{"arguments": {"a": "', "x"),
    "arguments in a text": ("hermes", '<tool_call>{"name": "find", "arguments": "', "x"),
    "keys after the arguments": ("hermes", CALL.removesuffix("}"), ', "a": 1'),
    "broken arguments": ("hermes", '<tool_call>{"name": "find", "arguments": {"a": tru!', "</tool"),
    "after a call": ("hermes", CALL, "} "),
    "blanks after a call": ("llama3", '{"name": "find", "parameters": {}}', " "),
    "separators": ("llama3", '{"name": "find", "parameters": {}}', "; "),
    "calls": ("hermes", "", CALL + "</tool_call>"),
    "broken calls": ("hermes", "", '<tool_call>{"name": "find", "arguments": 1!'),
    "blanks before reasoning": ("think", "", " "),
    "reasoning": ("think", "<think>x", "ab </thin"),
    "blanks in reasoning": ("think", "<think>x", " "),
    "blanks at the beginning of reasoning": ("think", "<think>", " "),
    "blanks after reasoning": ("think", "<think>x</think>", " "),
    "text after reasoning": ("think", "<think>x</think>y", " <think>"),
}


def form(tool_format: str) -> answers_pb2.AnswerForm:
    is_thinking = tool_format == "think"
    return answers_pb2.AnswerForm(
        tool_format="hermes" if is_thinking else tool_format, tool_names=["find"], reasoning=is_thinking
    )


@pytest.mark.parametrize("in_pieces", [False, True], ids=["at once", "in pieces"])
@pytest.mark.parametrize("state", STATES)
def test_an_answer_is_parsed_in_linear_time(state: str, in_pieces: bool) -> None:
    tool_format, head, unit = STATES[state]

    def prepare(size: int) -> Work:
        parser = AnswerParser(form(tool_format), "seed")
        parser.push(head)
        text = repeated(unit, size)
        pieces = [text[at : at + 16] for at in range(0, size, 16)] if in_pieces else [text]

        def run() -> None:
            for piece in pieces:
                parser.push(piece)
            parser.finish(decode_pb2.DecodeFinished())

        return run

    assert_linear(prepare, 10_000)


@pytest.mark.parametrize("kind", [ChatRenderer, ResponsesRenderer, MessagesRenderer])
@pytest.mark.parametrize("state", ["text", "arguments", "reasoning"])
def test_a_stream_is_rendered_in_linear_time(kind: type[TypedEventsRenderer], state: str) -> None:
    tool_format, head, unit = STATES[state]
    record = answers_pb2.AnswerRecord(id="a", form=form(tool_format))
    pieces = [repeated(unit, 2000)] * 8

    def prepare(size: int) -> Work:
        renderer = kind(record, "model", lambda token_id: b"")
        chunks = [decode_pb2.DecodeChunk(text=text) for text in (head, *["".join(pieces)] * (size // 64))]

        def run() -> None:
            for chunk in chunks:
                renderer.chunk(chunk)

        return run

    del pieces[1:]
    assert_linear(prepare, 64 * 8)


TOKENIZER = toy_tokenizers.trained(["the order of the customer"] * 20, 300, ["<end>"])
(INVALID_BYTE,) = TOKENIZER.encode("é").ids[-1:]
TOKENS = {
    "words": TOKENIZER.encode("the order ").ids,
    "invalid bytes": [INVALID_BYTE],
    "special tokens": [TOKENIZER.token_to_id("<end>")],
}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("stop", [(), ("e order of the!", "the" * 20), ("\ufffd" * 200 + "!",)])
def test_tokens_become_text_in_linear_time(tokens: str, stop: tuple[str, ...]) -> None:
    def prepare(size: int) -> Work:
        detokenizer = StreamingDetokenizer(TOKENIZER, SamplingParams(stop=stop))
        token_ids = (TOKENS[tokens] * size)[:size]
        return lambda: detokenizer.push(token_ids)

    assert_linear(prepare, 1000)


def tool(parameters: Json, name: str = "find") -> dict[str, Json]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


def deep(num_levels: int, name: str, inner: Json) -> Json:
    for _ in range(num_levels):
        inner = {"type": "object", "properties": {name: inner}}
    return inner


#: JSON schemas of about `size` bytes.
SCHEMAS: dict[str, Callable[[int], Json]] = {
    "properties": lambda size: {
        "type": "object",
        "properties": {f"p{n}": {"type": "string"} for n in range(size // 24)},
        "required": [f"p{n}" for n in range(size // 24)],
    },
    "long names above many properties": lambda size: deep(
        8, "n" * (size // 20), {"properties": {f"p{n}": {"a": 1} for n in range(size // 24)}}
    ),
    "definitions": lambda size: {
        "$ref": "#/$defs/d0",
        "$defs": {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(size // 40)}
        | {f"d{size // 40}": {"type": "null"}},
    },
    "one long definition": lambda size: {
        "$defs": {"n" * size: {"type": "null"}},
        "anyOf": [{"$ref": "#/$defs/" + "n" * size}],
    },
    "references to the whole": lambda size: {
        "type": "object", "properties": {f"p{n}": {"$ref": "#"} for n in range(size // 24)}
    },
    "anchors": lambda size: {
        "anyOf": [{"$anchor": f"a{n}", "$ref": f"#a{n // 2}"} for n in range(size // 32)]
    },
    "definitions that require others": lambda size: {
        "$ref": "#/$defs/d0",
        "$defs": {
            f"d{n}": {"type": "array", "minItems": 2, "prefixItems": [{"$ref": f"#/$defs/d{n // 2}"}, {}]}
            for n in range(size // 80)
        },
    },
    "one that requires a chain": lambda size: {
        "allOf": [{"$ref": f"#/$defs/d{n}"} for n in range(size // 100)],
        "$defs": {f"d{n}": {"anyOf": [{"$ref": f"#/$defs/d{n + 1}"}]} for n in range(size // 100)}
        | {f"d{size // 100}": {"type": "null"}},
    },
    "alternatives": lambda size: {"anyOf": [{"const": n} for n in range(size // 16)]},
    "enum": lambda size: {"enum": [str(n) for n in range(size // 8)]},
    "description": lambda size: {"type": "object", "description": "d" * size},
    "steps": lambda size: {"anyOf": [{"multipleOf": 2} for n in range(size // 20)]},
    "pattern": lambda size: {"type": "string", "pattern": "[" * size},
    "format": lambda size: {"anyOf": [{"format": "date"} for n in range(size // 20)]},
    "deep const": lambda size: {"const": json.loads("[" * 400 + "0" + "]" * 400), "title": "t" * size},
}  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_schema_is_checked_in_linear_time(schema: str) -> None:
    def prepare(size: int) -> Work:
        value = json.loads(json.dumps(SCHEMAS[schema](size)))

        def run() -> None:
            check_enforceable(value)
            rewrite(value)

        return refused_or_not(run)

    assert_linear(prepare, 40_000)


@pytest.mark.parametrize("schema", SCHEMAS)
def test_tools_are_checked_in_linear_time(schema: str) -> None:
    def prepare(size: int) -> Work:
        definition = tool(SCHEMAS[schema](size))
        return refused_or_not(lambda: check_tools([definition]))

    assert_linear(prepare, 150_000)


def test_a_grammar_of_tools_is_written_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        tools = [
            Tool({"type": "function", "function": {"name": f"f{n}", "description": "d" * 100}})
            for n in range(size)
        ]
        return lambda: [
            tool_guide(
                one,
                tools,
                [{"type": "object"}] * size,
                lambda marker: None,
                is_required=True,
                is_single=False,
                content=None,
                thinking=None,
            )
            for one in (HERMES, LLAMA3, MISTRAL)
        ]

    assert_linear(prepare, 100)


UNITS = ["a", "(", ")", "[", "\\", "{9}", "a{9}", "[^]", "\\x{", "\\u0001", "[a-", "&&", "(a{99}", "]"]


@pytest.mark.parametrize("unit", UNITS)
def test_a_pattern_is_checked_in_linear_time(unit: str) -> None:
    def prepare(size: int) -> Work:
        pattern = repeated(unit, size)
        return lambda: (check_size(pattern), check_class_syntax(pattern), check_control_characters(pattern))

    assert_linear(prepare, 12_000)


#: A head and what is repeated after it.
GRAMMARS = [
    *(("", unit) for unit in ["A: B\n", "/", "%json ", "%json {}", '"', '"\\', "/\\", "// ", "A[", "A:\n"]),
    *(("", unit) for unit in ["A: /a/\n", "A: B{9}\n"]),
    *((head, unit) for head in ["A: {", "A: ~", "A:", "A", "%json"] for unit in [" ", "\n", "9", "\n|"]),
    *((head, unit) for head in ['A: "', "A: /"] for unit in ["a", "\\", '\\"', "\\/", "\n"]),
]


@pytest.mark.parametrize(("head", "unit"), GRAMMARS)
def test_a_grammar_is_checked_in_linear_time(head: str, unit: str) -> None:
    def prepare(size: int) -> Work:
        source = head + repeated(unit, size)
        return refused_or_not(lambda: checked_lark(source, {}))

    assert_linear(prepare, 12_000)


def test_choices_become_a_guide_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        choices = [f"choice {n}" for n in range(size)]
        return lambda: Guide.of_choices(choices)

    assert_linear(prepare, 2000)


CONTROL = ("<|im_start|>", "<|im_end|>")
TEMPLATE = ChatTemplate(
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    bos_token="",
    eos_token="",
    control_tokens=CONTROL,
)


@pytest.mark.parametrize("unit", ["a", "<|im_end|>", "<|im_", "<", "\U00020000", "{{ ", "\n"])
@pytest.mark.parametrize("turn", ["new", "continued"])
def test_a_chat_is_rendered_in_linear_time(unit: str, turn: str) -> None:
    def prepare(size: int) -> Work:
        messages = [Message("user", repeated(unit, size))]
        return lambda: TEMPLATE.render(messages, ChatOptions(turn=turn))

    assert_linear(prepare, 100_000)


def test_a_chat_is_rendered_in_linear_time_with_many_control_tokens() -> None:
    def prepare(size: int) -> Work:
        control = [f"<unused{n}>" for n in range(size // 20)]
        template = ChatTemplate(
            "{{ messages[0].content }}", bos_token="", eos_token="", control_tokens=control
        )
        return lambda: template.render([Message("user", repeated("<unused1", size))])

    assert_linear(prepare, 20_000)


def test_many_messages_and_tools_are_rendered_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        messages = [Message("user", "a"), Message("tool", "b")] * size
        tools = tuple(Tool(tool({}, f"f{n}")) for n in range(size))
        return lambda: TEMPLATE.render(messages, ChatOptions(tools))

    assert_linear(prepare, 400)


def test_levels_are_counted_in_linear_time() -> None:
    def prepare(size: int) -> Work:
        value: Json = []
        for _ in range(size):
            value = [value, []]
        return lambda: json_levels(value)

    assert_linear(prepare, 10_000)


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [{"role": "user", "content": "%s"}]}',
        '{"messages": [{"role": "user", "content": "a", "%s": 1}]}',
        '{"messages": [{"role": "user", "content": ["%s"]}]}',
        '{"messages": [], "%s": 1}',
        '{"messages": [], "user": "%s"',
    ],
)
@pytest.mark.parametrize("unit", ["a", "\\u00e9", "\\\\", "<|im_"])
def test_a_body_is_parsed_in_linear_time(body: str, unit: str) -> None:
    def prepare(size: int) -> Work:
        text = (body % (unit * (size // len(unit)))).encode()
        return refused_or_not(lambda: parse_json(ChatBody, text).checked(Ignored()))

    assert_linear(prepare, 400_000)
