"""Tool calls through the Responses and Messages APIs, whole and streamed."""

import json

import pytest
from tool_models import make_tool_folder

PARAMETERS = {"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id"]}
#: As a model writes it, cut in the middle of markers, names and arguments.
WORDS = (
    "I ",
    "look.",
    "\n<tool",
    '_call>\n{"name": "find", "argu',
    'ments": {"id": ',
    '"#W5"}',
    "}\n</tool_call>",
)


@pytest.fixture
async def front(pods, gateway, tmp_path):
    return await gateway(await pods(words=WORDS), model=make_tool_folder(tmp_path, "qwen2.5"))


async def test_a_response_has_an_item_for_the_call(front):
    tools = [{"type": "function", "name": "find", "parameters": PARAMETERS, "strict": False}]
    asked = {"model": "tiny-chat", "input": "Where is it?", "tools": tools}
    whole = await front.openai.responses.create(**asked)
    text, call = whole.output
    assert text.content[0].text.strip() == "I look."
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "find", {"id": "#W5"})
    async with front.openai.responses.stream(**asked) as stream:
        events = [event async for event in stream]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"id": "#W5"}
    assert [item.type for item in events[-1].response.output] == ["message", "function_call"]
    answer = [
        *(item.model_dump(exclude_none=True) for item in whole.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "lost"},
    ]
    assert (await front.openai.responses.create(**{**asked, "input": answer})).status == "completed"


async def test_a_message_has_a_block_for_the_call(front):
    asked = {
        "max_tokens": 99,
        "messages": [{"role": "user", "content": "Where is it?"}],
        "tools": [{"name": "find", "input_schema": PARAMETERS}],
        "tool_choice": {"type": "auto"},
    }
    whole = (await front.http.post("/v1/messages", json=asked)).json()
    assert [block["type"] for block in whole["content"]] == ["text", "tool_use"]
    assert whole["content"][1]["input"] == {"id": "#W5"} and whole["stop_reason"] == "tool_use"
    answer = await front.http.post("/v1/messages", json={**asked, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
    pieces = [
        e["delta"]["partial_json"] for e in events if e.get("delta", {}).get("type") == "input_json_delta"
    ]
    assert json.loads("".join(pieces)) == {"id": "#W5"}
    starts = [e["content_block"]["type"] for e in events if e["type"] == "content_block_start"]
    assert starts == ["text", "tool_use"]
    assert [e["index"] for e in events if e["type"] == "content_block_stop"] == [0, 1]
