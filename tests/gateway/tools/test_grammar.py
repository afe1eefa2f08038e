"""Which answers the grammar of a request with tools allows, in every format, token by token."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.conversation import Tool
from tandem_core.model.guides import GuideCompiler, check_guide
from tandem_core.model.tokenizer import Tokenizer
from tandem_gateway.tools.detect import FORMATS
from tandem_gateway.tools.grammar import Thinking, enforced_schemas, tool_guide
from tool_models import make_tool_folder

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Where is order 5?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"id": {"type": "string"}, "n": {"$ref": "#/$defs/n"}},
    "required": ["id", "n"],
    "additionalProperties": False,
    "$defs": {"n": {"type": "integer"}},
}
STRICT = {"type": "function", "function": {"name": "find", "strict": True, "parameters": PARAMETERS}}
LOOSE = {"type": "function", "function": {"name": "cancel"}}
TOOLS = [Tool(STRICT), Tool(LOOSE)]

FIND = '<tool_call>\n{"name": "find", "arguments": {"id": "5", "n": 3}}\n</tool_call>'
CANCEL = '<tool_call>\n{"name": "cancel", "arguments": {}}\n</tool_call>'
CANCEL_ANY = '<tool_call>\n{"name": "cancel", "arguments": {"x": [1]}}\n</tool_call>'
#: Without the markers.
LOOSE_FIND = '{\n  "name": "find",\n  "arguments": {"id": "5", "n": 3}\n}'
LLAMA = '{"name": "find", "parameters": {"id": "5", "n": 3}}'
MISTRAL = '{"name": "find", "arguments": {"id": "5", "n": 3}}'
#: Format and options -> what is allowed, what is not.
CASES = [
    ("hermes", {},
     ["", "hello <tool> x", "x <tool_call", FIND, f"Hm.\n{FIND}", f"{FIND}\n{CANCEL_ANY}\n{FIND}",
      LOOSE_FIND, f"Sure:\n```json\n{LOOSE_FIND}\n```", '{"id": 5}', '```json\n{"id": 5}\n```'],
     ["a <tool_call>x", f"{FIND} x", LOOSE_FIND.replace("3", "x"),
      '{"name": "Ada"}', '```json\n{"name": "find", "x": 1}', f"{LOOSE_FIND} and more",
      FIND.replace("3", '"3"'), FIND.replace(', "n": 3', "")]),
    ("hermes", {"is_required": True}, [FIND, f"{FIND}\n{CANCEL}"], ["", "x", f"{FIND}\n{CANCEL_ANY}"]),
    ("hermes", {"is_required": True, "is_single": True}, [FIND], [f"{FIND}\n{CANCEL}"]),
    ("hermes", {"content": Guide(GuideKind.JSON_SCHEMA, '{"type": "object"}')},
     [FIND, '{"a": 1}'], ["hi", '{"a": 1}' + FIND]),
    ("hermes", {"is_required": True, "thinking": Thinking.POSSIBLE},
     [FIND, f"<think>\nhm\n</think>\n\n{FIND}"], ["<think>x", "<think>x</think>y"]),
    ("hermes", {"is_required": True, "thinking": Thinking.OPENED}, [f"hm\n</think>\n\n{FIND}"], [FIND]),
    ("llama3", {}, ["", "Hi {", LLAMA, f"{LLAMA}; {LLAMA}"], ["{x", LLAMA.replace("3", "x")]),
    ("llama3", {"is_required": True}, [LLAMA], ["Hi"]),
    ("mistral", {}, ["Hi", f"[TOOL_CALLS] [{MISTRAL}, {MISTRAL}]", f"Hi[TOOL_CALLS] [{MISTRAL}]"],
     ["Hi[TOOL_CALLS]x"]),
    ("mistral-args", {}, ["Hi", '[TOOL_CALLS]find[ARGS]{"id": "5", "n": 3}[TOOL_CALLS]cancel[ARGS]{}'],
     ["[TOOL_CALLS]find[ARGS]{}"]),
]  # fmt: skip
MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


@pytest.fixture(scope="module", params=["markers are tokens", "markers are text"])
def model(request, tmp_path_factory) -> tuple[Tokenizer, GuideCompiler]:
    special = MARKERS if request.param == "markers are tokens" else []
    folder: Path = make_tool_folder(tmp_path_factory.mktemp("model"), "qwen2.5", special)
    tokenizer = Tokenizer(folder)
    return tokenizer, GuideCompiler(folder, tokenizer.manifest)


async def fault(guide: Guide) -> str:
    try:
        check_guide(guide)
    except InvalidRequestError as error:
        return error.message
    return ""


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {' '.join(case[1])}")
async def test_the_grammar_allows_only_calls_of_the_format(case, model, subtests):
    tool_format, options, allowed, forbidden = case
    tokenizer, compiler = model
    defaults = {"is_required": False, "is_single": False, "content": None, "thinking": None}
    schemas = await enforced_schemas(TOOLS, fault, is_required=bool(options.get("is_required")))
    guide = tool_guide(
        FORMATS[tool_format], TOOLS, schemas, tokenizer.added_token_id, **{**defaults, **options}
    )

    def is_allowed(text: str) -> bool:
        matcher, _ = compiler.matcher(guide)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    for texts, wanted in ((allowed, True), (forbidden, False)):
        for text in texts:
            with subtests.test(text, wanted=wanted):
                assert is_allowed(text) is wanted


async def test_an_unenforceable_schema_is_refused_only_for_strict_tools():
    parameters = {"type": "object", "properties": {"a": {"type": "string", "maxLenght": 5}}}

    def tools(*, strict: bool) -> list[Tool]:
        function = {"name": "f", "strict": strict, "parameters": parameters}
        return [Tool(LOOSE), Tool({"type": "function", "function": function})]

    with pytest.raises(InvalidRequestError, match=r"tools\[1\].function.parameters: .*'maxLenght'.*strict"):
        await enforced_schemas(tools(strict=True), fault, is_required=True)
    loose, other = await enforced_schemas(tools(strict=False), fault, is_required=True)
    assert loose["additionalProperties"] is False
    assert other == {"type": "object"}


async def test_too_many_bytes_of_schemas_are_refused_before_any_is_compiled():
    async def fail(guide: Guide) -> str:
        raise AssertionError("was compiled")

    parameters = {"type": "object", "description": "d" * 70_000}
    tools = [
        Tool({"type": "function", "function": {"name": name, "strict": True, "parameters": parameters}})
        for name in ("a", "b")
    ]
    with pytest.raises(InvalidRequestError, match=r"tools: have 14\d{4} bytes of schemas to enforce.*131072"):
        await enforced_schemas(tools, fail, is_required=False)


async def test_the_pod_gets_a_grammar_if_the_request_needs_one(pods, gateway, tmp_path):
    pod = await pods(words=(FIND,))
    front = await gateway(pod, model=make_tool_folder(tmp_path, "qwen2.5"))
    named = {"type": "function", "function": {"name": "cancel"}}
    for extra, is_guided in [
        ({"tools": [LOOSE]}, False),
        ({"tools": [LOOSE, STRICT]}, True),
        ({"tools": [LOOSE], "tool_choice": "required"}, True),
        ({"tools": [LOOSE, STRICT], "tool_choice": named}, True),
        ({"tools": [LOOSE], "response_format": {"type": "json_object"}}, True),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
    ]:
        response = await front.http.post(CHAT, json={"messages": USER, **extra})
        assert response.status_code == 200, response.text
        sampling = pod.requests[-1].sampling
        assert bool(sampling.guide.lark) is is_guided
        if "tool_choice" in extra and is_guided:
            assert '\\"find\\"' not in sampling.guide.lark
    bad = json.loads(json.dumps(STRICT).replace('"integer"', '"integer", "odd": true'))
    response = await front.http.post(CHAT, json={"messages": USER, "tools": [bad]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools[0].function.parameters"
    assert "'odd'" in response.json()["error"]["message"]
    regex = {"tools": [STRICT], "guided_regex": "a"}
    response = await front.http.post(CHAT, json={"messages": USER, **regex})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
