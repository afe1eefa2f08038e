"""Requests with tools through both APIs: refusals, and the prompt that the pod gets."""

import json
from pathlib import Path

import grpc
import pytest
from tandem_core.model.tokenizer import Tokenizer
from tandem_proto.v1 import gateway_pb2
from tool_models import make_tool_folder

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Where is order 5?"}]
PARAMETERS = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
FIND = {"type": "function", "function": {"name": "find", "description": "Finds", "parameters": PARAMETERS}}
CANCEL = {"type": "function", "function": {"name": "cancel"}}
CALLED = [
    *USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "find", "arguments": '{"id": "5"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "sent"},
]


@pytest.fixture(scope="module", params=["qwen2.5", "smollm2"])
def template(request) -> str:
    """A template with tools, and one without."""
    return request.param


@pytest.fixture(scope="module")
def folder(template, tmp_path_factory) -> Path:
    return make_tool_folder(tmp_path_factory.mktemp("model"), template)


@pytest.fixture
async def ask(folder, pods, gateway):
    """Sends a body; returns the prompt that the pod got."""
    pod = await pods()
    front = await gateway(pod, model=folder)
    tokenizer = Tokenizer(folder)

    async def send(**body: object) -> str:
        response = await front.http.post(CHAT, json={"messages": USER, **body})
        assert response.status_code == 200, response.text
        return tokenizer.decode(pod.requests[-1].prompt_token_ids, skip_special_tokens=False)

    send.front, send.prompt = (
        front,
        lambda: tokenizer.decode(pod.requests[-1].prompt_token_ids, skip_special_tokens=False),
    )
    return send


async def test_tools_and_a_history_of_calls_reach_the_prompt(ask):
    prompt = await ask(messages=CALLED, tools=[FIND, CANCEL])
    assert json.dumps(FIND) in prompt
    assert json.dumps(CANCEL) in prompt
    assert '<tool_call>\n{"name": "find", "arguments": {"id": "5"}}\n</tool_call>' in prompt
    assert "<|im_start|>user\n<tool_response>\nsent\n</tool_response><|im_end|>" in prompt


async def test_without_tools_or_with_the_choice_none_the_prompt_has_none(ask):
    plain = await ask()
    for body in (
        {"tool_choice": "none"},
        {"tools": [FIND], "tool_choice": "none"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True},
        {"tools": None, "tool_choice": None, "functions": []},
    ):
        assert await ask(**body) == plain
    prompt = await ask(messages=CALLED, tool_choice="none")
    assert "# Tools" not in prompt
    assert "sent" in prompt


async def test_a_named_tool_is_the_only_one_in_the_prompt(ask):
    choice = {"type": "function", "function": {"name": "cancel"}}
    assert json.dumps(FIND) not in await ask(tools=[FIND, CANCEL], tool_choice=choice)


async def test_the_older_functions_are_tools(ask):
    messages = [
        *USER,
        {"role": "assistant", "content": None, "function_call": {"name": "find", "arguments": '{"id": "5"}'}},
        {"role": "function", "name": "find", "content": "sent"},
    ]
    old = await ask(messages=messages, functions=[FIND["function"], CANCEL["function"]])
    assert old == await ask(messages=CALLED, tools=[FIND, CANCEL])


async def test_the_last_message_can_be_continued(ask):
    messages = [*USER, {"role": "assistant", "content": "It is"}]
    prompt = await ask(messages=messages, continue_final_message=True, add_generation_prompt=False)
    assert prompt.endswith("<|im_start|>assistant\nIt is")
    prompt = await ask(messages=messages, add_generation_prompt=False)
    assert prompt.endswith("It is<|im_end|>\n")


async def test_grpc_accepts_tools_and_a_history_of_calls(ask):
    def message(turn):
        calls = [
            gateway_pb2.ToolCall(id=call["id"], **call["function"]) for call in turn.get("tool_calls", [])
        ]
        return gateway_pb2.ChatMessage(
            role=turn["role"],
            content=turn["content"],
            tool_calls=calls,
            tool_call_id=turn.get("tool_call_id"),
        )

    expected = await ask(messages=CALLED, tools=[FIND, CANCEL])
    find = gateway_pb2.Tool(name="find", description="Finds", parameters=json.dumps(PARAMETERS))
    request = gateway_pb2.ChatRequest(
        messages=[message(turn) for turn in CALLED], tools=[find, gateway_pb2.Tool(name="cancel")]
    )
    async for _ in ask.front.grpc.Chat(request):
        pass
    assert ask.prompt() == expected
    request.tools[0].parameters = "{"
    with pytest.raises(grpc.aio.AioRpcError, match=r"tools\[0\]\.function\.parameters: is not valid JSON"):
        await ask.front.grpc.Chat(request).read()
    request.tools[0].parameters = "{}"
    request.tool_choice = "any"
    with pytest.raises(grpc.aio.AioRpcError, match="tool_choice: is 'any'"):
        await ask.front.grpc.Chat(request).read()


def tool(**function: object) -> dict[str, object]:
    return {"tools": [{"type": "function", "function": {"name": "f", **function}}]}


def nested(levels: int) -> dict[str, object]:
    return {} if levels == 1 else {"not": nested(levels - 1)}


BAD = [
    ({"tools": [{"type": "function"}]}, "tools[0].function", ["missing"]),
    ({"tools": [{"function": {"name": "f"}}]}, "tools[0].type", ["missing", "function"]),
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", ["tools is empty"]),
    ({"tools": ["f"]}, "tools[0]", ["'f'", "object"]),
    (tool(name=""), "tools[0].function.name", ["1 to 128"]),
    (tool(name="x" * 129), "tools[0].function.name", ["1 to 128"]),
    (tool(name="find order"), "tools[0].function.name", ["letters"]),
    (tool(name=5), "tools[0].function.name", ["letters"]),
    (tool(description=5), "tools[0].function.description", ["string"]),
    (tool(strict="yes"), "tools[0].function.strict", ["true nor false"]),
    (tool(parameters="{}"), "tools[0].function.parameters", ["JSON schema"]),
    (tool(parameters={"type": "array"}), "tools[0].function.parameters.type", ["object"]),
    (
        tool(parameters={"properties": {"a": {"type": "strin"}}}),
        "tools[0].function.parameters.properties.a.type",
        ["'strin'", "integer"],
    ),
    (tool(parameters={"properties": []}), "tools[0].function.parameters.properties", ["a list"]),
    (tool(parameters={"properties": {"a": 5}}), "tools[0].function.parameters.properties.a", ["a number"]),
    (tool(parameters={"required": "a"}), "tools[0].function.parameters.required", ["list of names"]),
    (tool(parameters={"anyOf": []}), "tools[0].function.parameters.anyOf", ["at least one"]),
    (tool(parameters={"enum": {}}), "tools[0].function.parameters.enum", ["at least one"]),
    (tool(parameters=nested(70)), "tools[0]", ["72 levels", "limit of 64"]),
    ({"tools": [FIND, FIND]}, "tools[1].function.name", ["'find'", "twice"]),
    ({"tools": [CANCEL] * 129}, "tools", ["129", "limit of 128"]),
    ({"tools": [FIND], "tool_choice": "any"}, "tool_choice", ["'any'", "none, auto, required"]),
    ({"tools": [FIND], "tool_choice": {"type": "function"}}, "tool_choice", ["name"]),
    ({"tools": [FIND], "tool_choice": 5}, "tool_choice", ["not a choice"]),
    (
        {"tools": [FIND], "tool_choice": {"type": "function", "function": {"name": "lose"}}},
        "tool_choice",
        ["'lose'", "find"],
    ),
    ({"tool_choice": "required"}, "tool_choice", ["tools is empty"]),
    ({"tools": [FIND], "tool_choice": {"type": "allowed_tools"}}, "tool_choice", ["mode", "a list of tools"]),
    ({"tools": [FIND], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [
        {"type": "function", "name": "lose"}]}}, "tool_choice", ["'lose'", "not in tools"]),
    ({"tools": [FIND], "parallel_tool_calls": 1}, "parallel_tool_calls", ["true or false"]),
    ({"tools": [FIND], "functions": [FIND["function"]]}, "functions", ["together"]),
    ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages[0].tool_calls", ["assistant"]),
    ({"messages": [{"role": "assistant", "tool_calls": [{"type": "web", "web": {}}]}]},
     "messages[0].tool_calls[0]", ["neither a function call"]),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
     "messages[0].tool_calls[0].function.name", ["required"]),
    ({"messages": [{"role": "tool", "tool_call_id": "1"}]}, "messages[0].content", ["missing"]),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ["'messages'"]),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", ["object"]),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message", ["one of"]),
]  # fmt: skip


async def test_wrong_tools_are_refused_by_name(pods, gateway, model_folder, subtests):
    pod = await pods()
    front = await gateway(pod)
    for body, param, words in BAD:
        with subtests.test(param, body=str(body)[:200]):
            response = await front.http.post(CHAT, json={"messages": USER, **body})
            assert response.status_code == 400, response.text
            error = response.json()["error"]
            assert error["param"] == param
            for word in words:
                assert word in error["message"]
    assert pod.requests == []


async def test_tools_count_toward_the_prompts_limit(pods, gateway):
    """Refused before rendering, and after it if the template lengthens the text."""
    front = await gateway(await pods())
    long = tool(description="x" * 20_000)
    response = await front.http.post(CHAT, json={"messages": USER, **long})
    assert response.json()["error"]["code"] == "context_length_exceeded"
    medium = tool(parameters={"enum": list(range(200))})
    response = await front.http.post(CHAT, json={"messages": USER, **medium})
    assert response.status_code == 400
    assert "256" in response.json()["error"]["message"]
