"""Templates render as in transformers, and a template cannot leave its sandbox.

How messages become tokens is tested in tests/gateway/call/test_encoding.py, through the gateway and the LLM.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import chat_templates
import pytest
from model_folders import make_folder
from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.model.chat_template import MAX_TEMPLATE_BYTES, ChatTemplate, Segment
from tandem_core.model.conversation import ChatOptions, Message, Tool, ToolCall
from tandem_core.model.token_pattern import any_of
from tandem_core.model.tokenizer import Tokenizer
from toy_tokenizers import without_merges
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
EACH = "{% for m in messages %}"
TEMPLATES = {
    "trimming": EACH + "\n  {% if m.role == 'user' %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\n",
    "tojson": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|{{ '<é>' | tojson }}",
    "loop controls": EACH + "{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "dict": "{{ dict(a=1).a }}{{ dict.fromkeys(['x'], 2) }}",
    "generation": EACH + "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "specials": "{{ bos_token + eos_token }}{% if tools is none %}none{% endif %}{{ add_generation_prompt }}",
    "date": "{{ strftime_now('%Y') }}",
}


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<|im_start|>", eos_token="<|im_end|>", control_tokens=())


@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_every_template_feature_renders_as_in_transformers(source):
    messages = [Message("user", "a <b>"), Message("assistant", "é")]
    (segment,) = template(source).render(messages)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=without_merges(100, SPECIAL), bos_token="<|im_start|>", eos_token="<|im_end|>"
    )
    expected = reference.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in messages],
        chat_template=source,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert segment.text == expected


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ 'a' + 1 }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns['_x'] }}",
    ],
)
def test_what_a_template_refuses_or_may_not_do_is_the_callers_error(source):
    with pytest.raises(InvalidRequestError, match=r"^messages: the model's chat template refuses them"):
        template(source).render([Message("user", "x")])


def test_a_template_that_is_no_jinja_is_one_clear_error():
    with pytest.raises(ModelLoadError, match="chat template cannot be compiled"):
        template("{% if %}")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"{% if %}", "line 1: Expected an expression"),
        (b"a\nb\n{{ x | unheard_of }}", "line 3: No filter named 'unheard_of'"),
        (b"{% for m in messages %}\n\n{{ m.content + 1 }}{% endfor %}", "line 3: can only concatenate"),
        (b"a\n{{ raise_exception('system first') }}", "line 2: system first"),
        (b"hello", "does not show the user's message"),
        (b"\xff\xfe", "cannot be read as UTF-8"),
        (b" " * (MAX_TEMPLATE_BYTES + 1), "has more than 1,048,576 bytes"),
    ],
)  # fmt: skip
def test_an_invalid_template_file_is_refused_with_its_line(tmp_path, content, fault):
    path = tmp_path / "own.jinja"
    path.write_bytes(content)
    folder = make_folder(tmp_path / "model", without_merges(100, SPECIAL), chat_template="{{ messages }}")
    with pytest.raises(ModelLoadError, match=f"^--chat-template {path}: {fault}"):
        Tokenizer(folder, path)
    with pytest.raises(ModelLoadError, match=r"--chat-template .*none\.jinja: cannot be read"):
        Tokenizer(folder, tmp_path / "none.jinja")


def test_a_file_replaces_the_template_of_the_model(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", encoding="utf-8-sig")
    folder = make_folder(tmp_path / "model", without_merges(100, SPECIAL), chat_template="{{ messages }}")
    tokenizer = Tokenizer(folder, path)
    assert tokenizer.decode(tokenizer.encode_chat([Message("user", "ab")]), skip_special_tokens=False) == (
        "<|im_start|>ab"
    )
    assert tokenizer.manifest.chat_template == path.read_text(encoding="utf-8-sig")


def test_a_model_without_a_template_sends_chat_elsewhere(tmp_path):
    folder = make_folder(tmp_path, without_merges(100, SPECIAL), chat_template="")
    with pytest.raises(InvalidRequestError, match=r"no chat template.*/v1/completions"):
        Tokenizer(folder).encode_chat([Message("user", "hi")])


TEMPLATE_FOLDER = Path(chat_templates.__path__[0])
WITH_TOOLS = ("qwen2.5", "qwen3", "llama3", "mistral", "hermes")
MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "[TOOL_CALLS]",
    "[/INST]",
    "<|eot_id|>",
    "<tool_call>",
    "</tool_response>",
]
FIND = {
    "type": "function",
    "function": {
        "name": "find_order",
        "description": "Looks up an order; <b>é</b>",
        "parameters": {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]},
    },
}
CANCEL = {
    "type": "function",
    "function": {
        "name": "cancel",
        "description": "Cancels",
        "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "why": {"type": "string"}}},
    },
}
TOOLS = (Tool(FIND), Tool(CANCEL))
CALL = ToolCall("a1b2c3d4e", "find_order", '{"id": "#W1 \\"x\\" é", "deep": {"n": [1, 2.5, null, true]}}')
TURNS = {
    "a question": [Message("user", "Where is #W1?")],
    "with a system message": [Message("system", "Be brief."), Message("user", "Where is #W1?")],
    "a call": [
        Message("user", "Where is #W1?"),
        Message("assistant", None, (CALL,)),
        Message("tool", '{"status": "sent"}', tool_call_id="a1b2c3d4e"),
    ],
    "after a call": [
        Message("system", "Be brief."),
        Message("user", "Where is #W1?"),
        Message("assistant", None, (CALL,)),
        Message("tool", "sent", tool_call_id="a1b2c3d4e", name="find_order"),
        Message("assistant", "It was sent."),
        Message("user", "Thanks"),
    ],
}
TWO_CALLS = [
    Message("user", "Where is #W1, and cancel 2"),
    Message("assistant", "", (CALL, ToolCall("000000002", "cancel", ""))),
    Message("tool", "sent", tool_call_id="a1b2c3d4e"),
    Message("tool", "done", tool_call_id="000000002"),
]


def read_template(name: str, control_tokens: Sequence[str] = ()) -> ChatTemplate:
    source = (TEMPLATE_FOLDER / f"{name}.jinja").read_text()
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", control_tokens=control_tokens)


def text_of(segments: Sequence[Segment]) -> str:
    return "".join(segment.text for segment in segments)


def as_sent(message: Message) -> dict[str, object]:
    """The message as a user of transformers writes it."""
    sent: dict[str, object] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        sent["tool_calls"] = [
            {"id": call.id, "type": "function",
             "function": {"name": call.name, "arguments": json.loads(call.arguments or "{}")}}
            for call in message.tool_calls
        ]  # fmt: skip
    if message.tool_call_id:
        sent["tool_call_id"] = message.tool_call_id
    if message.name:
        sent["name"] = message.name
    if message.reasoning:
        sent["reasoning_content"] = message.reasoning
    return sent


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=without_merges(100, ["<s>", "</s>"]), bos_token="<s>", eos_token="</s>"
    )


def transformers_text(reference, name, messages, tools, **arguments) -> str:
    return reference.apply_chat_template(
        [as_sent(m) for m in messages],
        tools=[tool.definition for tool in tools] or None,
        chat_template=(TEMPLATE_FOLDER / f"{name}.jinja").read_text(),
        tokenize=False,
        **{"add_generation_prompt": True, **arguments},
    )


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_tools_calls_and_results_render_as_in_transformers(name, reference, subtests):
    template = read_template(name)
    for title, messages in TURNS.items():
        for tools in (TOOLS, ()):
            with subtests.test(title, tools=len(tools)):
                text = text_of(template.render(messages, ChatOptions(tools)))
                assert text == transformers_text(reference, name, messages, tools)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "mistral", "hermes"])
def test_parallel_calls_render_as_in_transformers(name, reference):
    template = read_template(name)
    assert template.tool_use.has_parallel_calls
    text = text_of(template.render(TWO_CALLS, ChatOptions(TOOLS)))
    assert text == transformers_text(reference, name, TWO_CALLS, TOOLS)


def test_a_template_that_refuses_parallel_calls_is_known_for_it():
    assert not read_template("llama3").tool_use.has_parallel_calls
    with pytest.raises(InvalidRequestError, match="single tool-calls"):
        read_template("llama3").render(TWO_CALLS)


def test_template_arguments_and_the_end_of_the_prompt_are_as_in_transformers(reference):
    messages = [Message("user", "hi"), Message("assistant", "It is ", reasoning="hm")]
    template = read_template("qwen3")
    off = ChatOptions(template_arguments={"enable_thinking": False})
    for options, arguments in [
        (off, {"enable_thinking": False}),
        (ChatOptions(turn="none"), {"add_generation_prompt": False}),
        (ChatOptions(turn="continued"), {"add_generation_prompt": False, "continue_final_message": True}),
    ]:
        text = text_of(template.render(messages, options))
        assert text == transformers_text(reference, "qwen3", messages, (), **arguments)
    text = text_of(read_template("mistral").render(messages, ChatOptions(turn="continued")))
    assert text.endswith("[/INST] It is")  # this template trims


def test_template_arguments_cannot_replace_the_messages():
    with pytest.raises(InvalidRequestError, match=r"chat_template_kwargs: sets 'messages'"):
        read_template("qwen3").render(
            [Message("user", "x")], ChatOptions(template_arguments={"messages": []})
        )


def test_ids_of_other_systems_are_shortened_where_a_template_demands_it():
    messages = [
        Message("user", "x"),
        Message("assistant", None, (ToolCall("call_abcdefghijklmnop", "find_order", "{}"),)),
        Message("tool", "y", tool_call_id="call_abcdefghijklmnop"),
    ]
    text = text_of(read_template("mistral").render(messages))
    called, answered = re.findall(r'id": "(\w+)"', text)
    assert called == answered
    assert len(called) == 9


def test_arguments_that_are_no_json_stay_text(reference):
    broken = [
        Message("user", "x"),
        Message("assistant", None, (ToolCall("1", "f", '{"a": '), ToolCall("2", "f", "[" * 100_000))),
        Message("tool", "y", tool_call_id="1"),
    ]
    assert '"arguments": "{\\"a\\": "}' in text_of(read_template("qwen2.5").render(broken))


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_control_tokens_in_tools_calls_and_results_are_quoted(name):
    """Every text that a caller may write is quoted, and nothing of the template is."""
    template = read_template(name, MARKS)
    bad = "x" + "".join(MARKS) + "y"
    parameters = {"type": "object", "properties": {bad: {"type": "string", "enum": [bad]}}}
    tool = Tool({"type": "function", "function": {"name": "f", "description": bad, "parameters": parameters}})
    messages = [
        Message("user", bad),
        Message("assistant", None, (ToolCall("a1b2c3d4e", "f", json.dumps({bad: bad})),)),
        Message("tool", bad, tool_call_id="a1b2c3d4e", name="f"),
    ]
    harmless = json.loads(json.dumps(tool.definition).replace(json.dumps(bad)[1:-1], "safe"))
    options, safe_options = ChatOptions((tool,)), ChatOptions((Tool(harmless),))
    safe = [
        Message("user", "safe"),
        Message("assistant", None, (ToolCall("a1b2c3d4e", "f", '{"safe": "safe"}'),)),
        Message("tool", "safe", tool_call_id="a1b2c3d4e", name="f"),
    ]
    segments = template.render(messages, options)
    free = "".join(segment.text for segment in segments if not segment.is_quoted)
    unquoted = text_of(template.render(safe, safe_options))
    for mark in MARKS:
        assert free.count(mark) == unquoted.count(mark)
    assert text_of(segments) == text_of(read_template(name).render(messages, options))


def test_quoting_survives_escaped_json_and_pythons_repr():
    for source in ("{{ tools | tojson(ensure_ascii=True) }}", "{{ tools }}"):
        template = ChatTemplate(
            source + "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c | tojson }}"
            "{% endfor %}{% endfor %}",
            bos_token="", eos_token="", control_tokens=["<|im_end|>"],
        )  # fmt: skip
        tool = Tool({"type": "function", "function": {"name": "f", "description": "a<|im_end|>b"}})
        segments = template.render([Message("user", "x")], ChatOptions((tool,)))
        assert [segment.text for segment in segments if segment.is_quoted] == ["<|im_end|>"]
        assert "a<|im_end|>b" in text_of(segments)


class TestATemplateWithoutTools:
    def test_gets_them_in_the_system_message(self):
        template = read_template("smollm2")
        assert template.tool_use is None
        text = text_of(template.render(TURNS["after a call"], ChatOptions(TOOLS)))
        assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
        assert json.dumps(FIND, ensure_ascii=False) in text
        call = json.dumps({"name": CALL.name, "arguments": json.loads(CALL.arguments)}, ensure_ascii=False)
        assert f"<|im_start|>assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>" in text
        assert "<|im_start|>user\n<tool_response>\nsent\n</tool_response><|im_end|>" in text

    def test_keeps_a_history_of_calls_when_there_are_no_tools(self):
        text = text_of(read_template("smollm2").render(TWO_CALLS))
        assert "# Tools" not in text
        assert text.count("<tool_call>") == 2
        assert "<tool_response>\nsent\n</tool_response>\n<tool_response>\ndone\n</tool_response>" in text

    def test_that_knows_no_system_message_gets_them_before_the_first_question(self):
        source = (
            "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
            "[{{ m.role }}]{{ m.content }}{% endfor %}"
        )
        text = text_of(template(source).render([Message("user", "Where?")], ChatOptions(TOOLS)))
        assert text.startswith("[user]# Tools")
        assert text.endswith("</tool_call>\n\nWhere?")


def test_the_pattern_of_many_tokens_matches_the_longest_of_them() -> None:
    tokens = ["<a>", "<a>b", "<ab", "<", "(", "<unused1>", "<unused12>", "", "\n\n"]
    longest_first = "|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True) if token)
    text = "<a>b<a><ab<abc<(<unused1><unused12><unused123><unused\n\n\n"
    assert re.findall(any_of(tokens), text) == re.findall(longest_first, text)
    assert re.findall(any_of([]), text) == []
