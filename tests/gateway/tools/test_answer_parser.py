"""Answers of models are split into content, reasoning and calls, for any pieces of the text."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_gateway.tools.answer_parser import AnswerDelta, AnswerParser
from tandem_gateway.tools.formats import MAX_HELD_CHARS
from tandem_proto.v1 import answers_pb2, common_pb2, decode_pb2

END = decode_pb2.DecodeFinished(reason=common_pb2.FINISH_REASON_STOP)


@dataclass
class Seen:
    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)
    #: With its parts in order.
    whole: AnswerDelta = field(default_factory=AnswerDelta)

    def add(self, delta: AnswerDelta) -> None:
        self.whole += delta
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.name:
                assert call.index == len(self.calls)
                self.calls.append([call.name, ""])
            self.calls[call.index][1] += call.arguments


def form(tool_format: str = "hermes", **fields: object) -> answers_pb2.AnswerForm:
    return answers_pb2.AnswerForm(tool_format=tool_format, tool_names=["find", "cancel"], **fields)


def read(text: str, shape: answers_pb2.AnswerForm, cuts: list[int] | None = None) -> Seen:
    """Parses the whole answer, cut at these positions."""
    parser, seen = AnswerParser(shape, "seed"), Seen()
    places = [0, *sorted(cuts or []), len(text)]
    for begin, end in itertools.pairwise(places):
        seen.add(parser.push(text[begin:end]))
    seen.add(parser.finish(END))
    assert parser.ends_with_calls == bool(seen.calls)
    return seen


FIND = '{"name": "find", "arguments": {"id": "#W1", "deep": {"n": [1, -2.5e3, null, true]}}}'
ARGS = '{"id": "#W1", "deep": {"n": [1, -2.5e3, null, true]}}'
CANCEL = '{"name": "cancel", "arguments": {}}'
#: Format, text, content, calls.
ANSWERS = {
    "no call": ("hermes", "Hello <b> </tool_call> {", "Hello <b> </tool_call> {", []),
    "hermes": ("hermes", f"<tool_call>\n{FIND}\n</tool_call>", "", [["find", ARGS]]),
    "text before": ("hermes", f"I look.\n\n<tool_call>\n{FIND}\n</tool_call>", "I look.", [["find", ARGS]]),
    "text after": ("hermes", f"<tool_call>{FIND}</tool_call>\nDone.", "\nDone.", [["find", ARGS]]),
    "two calls": (
        "hermes",
        f"<tool_call>\n{FIND}\n</tool_call>\n<tool_call>\n{CANCEL}\n</tool_call>",
        "",
        [["find", ARGS], ["cancel", "{}"]],
    ),
    "no closing marker": ("hermes", f"<tool_call>\n{FIND}", "", [["find", ARGS]]),
    "one brace too many": ("hermes", f"<tool_call>\n{FIND}}}\n</tool_call>", "", [["find", ARGS]]),
    "half a marker": ("hermes", "a <tool_cal", "a <tool_cal", []),
    "no JSON": ("hermes", "<tool_call>find(1)</tool_call>", "<tool_call>find(1)</tool_call>", []),
    "no name": ("hermes", '<tool_call>{"arguments": {}}</tool_call>',
                '<tool_call>{"arguments": {}}</tool_call>', []),
    "a call after a broken one": (
        "hermes", f"<tool_call>x<tool_call>{CANCEL}</tool_call>", "<tool_call>x", [["cancel", "{}"]]),
    "arguments before the name": (
        "hermes", '<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call>', "", [["x", '{"a": 1}']]),
    "no arguments": ("hermes", '<tool_call>{"name": "find"}</tool_call>', "", [["find", "{}"]]),
    "null arguments": (
        "hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [["f", "{}"]]),
    "empty arguments": (
        "hermes", '<tool_call>{"name": "f", "arguments": ""}</tool_call>', "", [["f", "{}"]]),
    "arguments as text": (
        "hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "",
        [["f", '{"a": 1}']]),
    "markers inside arguments": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": "</tool_call>}"}}</tool_call>', "",
        [["f", '{"a": "</tool_call>}"}']]),
    "a line break inside a text": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": "x\ny"}}</tool_call>', "",
        [["f", '{"a": "x\\ny"}']]),
    "arguments that break off": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": tru!}</tool_call>b', "b",
        [["f", '{"a": tru!}']]),
    "cut off inside the arguments": (
        "hermes", '<tool_call>{"name": "f", "arguments": {"a": "x', "", [["f", '{"a": "x']]),
    "cut off before the arguments": (
        "hermes", '<tool_call>{"name": "f", "arg', '<tool_call>{"name": "f", "arg', []),
    "a list of objects": ("hermes", f"<tool_call>[{FIND}, {CANCEL}]</tool_call>", "",
                          [["find", ARGS], ["cancel", "{}"]]),
    "a bare object of a known tool": ("hermes", FIND, "", [["find", ARGS]]),
    "a bare object of something else": (
        "hermes", '{"name": "Ada", "age": 5}', '{"name": "Ada", "age": 5}', []),
    "JSON that was asked for": ("hermes", '{"total": 5}', '{"total": 5}', []),
    "a code block of a known tool": ("hermes", f"Sure:\n```json\n{FIND}\n```", "Sure:", [["find", ARGS]]),
    "a code block of something else": ("hermes", '```json\n{"a": 1}\n```', '```json\n{"a": 1}\n```', []),
    "a bare object later": ("hermes", f"See {CANCEL}", f"See {CANCEL}", []),
    "llama": ("llama3", '{"name": "find", "parameters": {"id": "5"}}', "", [["find", '{"id": "5"}']]),
    "llama, two": (
        "llama3", '{"name": "find", "parameters": {}}; {"name": "cancel", "parameters": {"a": 1}}', "",
        [["find", "{}"], ["cancel", '{"a": 1}']]),
    "llama, tag": ("llama3", f"<|python_tag|>{FIND}", "", [["find", ARGS]]),
    "llama, code": ("llama3", "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    "llama, text": ("llama3", "{x} Hello", "{x} Hello", []),
    "mistral": ("mistral", f"[TOOL_CALLS] [{FIND}, {CANCEL}]", "", [["find", ARGS], ["cancel", "{}"]]),
    "mistral, ids of the model": (
        "mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}, "id": "abcdefghi"}]', "",
        [["f", '{"a": 1}']]),
    "mistral, named": (
        "mistral", f"Hm.[TOOL_CALLS]find[ARGS]{ARGS}[TOOL_CALLS]cancel[CALL_ID]a1b2c3d4e[ARGS]{{}}", "Hm.",
        [["find", ARGS], ["cancel", "{}"]]),
    "mistral, text": ("mistral", "[TOOL] [1, 2]", "[TOOL] [1, 2]", []),
}  # fmt: skip


@pytest.mark.parametrize("title", ANSWERS)
def test_an_answer_has_its_content_and_calls(title: str) -> None:
    tool_format, text, content, calls = ANSWERS[title]
    seen = read(text, form(tool_format))
    assert (seen.content, seen.calls) == (content, calls)


@pytest.mark.parametrize("title", ANSWERS)
def test_output_depends_only_on_the_text_so_far(title: str) -> None:
    """So each split of the text gives equal output, also after a stream is resumed."""
    tool_format, text, *_ = ANSWERS[title]
    shape = form(tool_format, reasoning=True)
    by_char, so_far = AnswerParser(shape, "seed"), Seen()
    for end, char in enumerate(text, start=1):
        so_far.add(by_char.push(char))
        at_once = Seen()
        at_once.add(AnswerParser(shape, "seed").push(text[:end]))
        assert at_once == so_far


FLOATS = st.floats(allow_nan=False, allow_infinity=False)
PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "\n", " ", "{", "}", '"', '"name": ', '"find"', ', "arguments": ',
     '{"a": 1}', "[", "]", ",", ";", "[TOOL_CALLS]", "[ARGS]", "find", "<|python_tag|>", "```json", "```",
     "<think>", "</think>", "\\", "x", FIND, CANCEL]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES, max_size=12), st.sampled_from(["hermes", "llama3", "mistral"]), st.data())
def test_random_texts_give_equal_output_for_any_pieces(pieces, tool_format, data) -> None:
    text = "".join(pieces)
    shape = form(tool_format, reasoning=True)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    seen = read(text, shape, cuts)
    assert seen == read(text, shape, list(range(len(text))))
    if not seen.calls and not seen.reasoning and "<think>" not in text:
        assert seen.content == text
    for name, _ in seen.calls:
        assert name in text


@settings(max_examples=50, deadline=None)
@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(st.none() | st.booleans() | st.integers() | FLOATS | st.text(),
                     lambda of: st.lists(of, max_size=3) | st.dictionaries(st.text(), of, max_size=3),
                     max_leaves=8),
        max_size=4,
    ),
    st.booleans(),
)  # fmt: skip
def test_arguments_arrive_as_the_model_wrote_them(arguments, ascii_only) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    text = f'<tool_call>\n{{"name": "find", "arguments": {written}}}\n</tool_call>'
    assert read(text, form()).calls == [["find", written]]


def test_arguments_come_before_the_call_is_complete() -> None:
    parser = AnswerParser(form(), "seed")
    assert not parser.push('<tool_call>\n{"name": "find", "argu')
    delta = parser.push('ments": {"id"')
    (call,) = delta.calls
    assert (call.name, call.arguments) == ("find", '{"id"')
    assert call.id.startswith("call_")
    (more,) = parser.push(': "5').calls
    assert (more.index, more.id, more.name, more.arguments) == (0, "", "", ': "5')


def test_only_the_first_call_is_shown_if_one_is_allowed() -> None:
    text = f"<tool_call>{CANCEL}</tool_call><tool_call>{FIND}</tool_call>"
    assert read(text, form(single_call=True)).calls == [["cancel", "{}"]]


def test_ids_differ_within_and_between_answers_and_are_equal_for_each_reader() -> None:
    text = f"<tool_call>{CANCEL}</tool_call><tool_call>{FIND}</tool_call>"

    def ids(tool_format: str, seed: str) -> list[str]:
        parser = AnswerParser(form(tool_format), seed)
        return [call.id for call in parser.push(text).calls]

    assert ids("hermes", "a") == ids("hermes", "a")
    assert len({*ids("hermes", "a"), *ids("hermes", "b")}) == 4
    parser = AnswerParser(form("mistral"), "a")
    (call,) = parser.push("[TOOL_CALLS]find[ARGS]{}").calls
    assert len(call.id) == 9


class TestReasoning:
    def read(self, text: str, **fields: object) -> tuple[str, str]:
        seen = read(text, answers_pb2.AnswerForm(reasoning=True, **fields))
        assert seen == read(text, answers_pb2.AnswerForm(reasoning=True, **fields), list(range(len(text))))
        return seen.reasoning, seen.content

    def test_reasoning_is_the_text_in_think_at_the_beginning(self) -> None:
        assert self.read("<think>\na  b\n\nc\n</think>\n\nHello\n") == ("a  b\n\nc", "Hello\n")
        assert self.read("\n<think></think>x") == ("", "x")

    def test_reasoning_excludes_later_think_blocks(self) -> None:
        assert self.read("Hi <think>x</think>") == ("", "Hi <think>x</think>")
        assert self.read("<thin") == ("", "<thin")

    def test_reasoning_can_be_opened_by_the_prompt(self) -> None:
        assert self.read("a </thin b</think>c", starts_in_reasoning=True) == ("a </thin b", "c")

    def test_reasoning_is_the_whole_text_without_a_closing_marker(self) -> None:
        assert self.read("<think>\na b ") == ("a b", "")

    def test_calls_are_found_only_after_reasoning(self) -> None:
        text = f"<think>maybe <tool_call>{FIND}</tool_call></think>\n<tool_call>{CANCEL}</tool_call>"
        seen = read(text, form(reasoning=True))
        assert seen.reasoning == f"maybe <tool_call>{FIND}</tool_call>"
        assert (seen.content, seen.calls) == ("", [["cancel", "{}"]])


@pytest.mark.parametrize("value", ["1" * 5000, '"' + "[" * 5000 + '"'], ids=["digits", "levels"])
def test_arguments_that_are_too_long_or_deep_for_a_parser_are_shown_as_they_are(value: str) -> None:
    text = f'<tool_call>{{"name": "find", "arguments": {value}}}</tool_call>'
    assert read(text, form()).calls == [["find", value]]


@pytest.mark.parametrize(
    "tail", [" " * 1000, "} " * 500, "\n" * 1000 + "x"], ids=["blanks", "braces", "blanks and text"]
)
def test_a_long_tail_of_a_call_is_content(tail: str) -> None:
    seen = read(f"<tool_call>{CANCEL}{tail}", form())
    assert seen.calls == [["cancel", "{}"]]
    assert seen.content == tail[: len(seen.content)]
    assert len(tail) - len(seen.content) <= MAX_HELD_CHARS


def test_whitespace_is_held_back_only_near_a_marker() -> None:
    text = "a" + " " * 1000
    assert len(AnswerParser(form(), "seed").push(text).content) == len(text) - MAX_HELD_CHARS
    thinking = answers_pb2.AnswerForm(reasoning=True, starts_in_reasoning=True)
    assert len(AnswerParser(thinking, "seed").push(text).reasoning) == len(text) - MAX_HELD_CHARS


def test_an_object_that_is_long_without_a_name_is_no_call() -> None:
    text = '<tool_call>{"a": "' + "x" * 200_000
    delta = AnswerParser(form(), "seed").push(text)
    assert delta.content.startswith('<tool_call>{"a": "xxx')
