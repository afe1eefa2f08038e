"""Anthropic's Messages API: one message, typed events, refusals."""

import asyncio
import json

import pytest
from tandem_proto.v1 import common_pb2
from tool_models import make_tool_folder

ASKED = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def front(pods, gateway):
    return await gateway(await pods())


async def test_a_message_has_the_text_and_usage_of_a_chat(front):
    body = {**ASKED, "model": "tiny-chat", "system": [{"type": "text", "text": "You help."}]}
    message = (await front.http.post("/v1/messages", json=body)).json()
    messages = [{"role": "system", "content": "You help."}, {"role": "user", "content": "hi"}]
    chat = (await front.http.post("/v1/chat/completions", json={"messages": messages})).json()
    assert message["content"] == [{"type": "text", "text": "Hello there!"}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny-chat")
    assert message["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    assert message["usage"]["output_tokens"] == chat["usage"]["completion_tokens"]


async def test_a_stream_has_anthropics_events_in_their_order(front):
    answer = await front.http.post("/v1/messages", json={**ASKED, "stream": True})
    blocks = [block.splitlines() for block in answer.text.strip().split("\n\n")]
    events = [json.loads(lines[-1].removeprefix("data: ")) for lines in blocks]
    names = [next(line for line in lines if line.startswith("event: "))[7:] for lines in blocks]
    assert (
        names
        == [event["type"] for event in events]
        == [
            "message_start",
            "content_block_start",
            *["content_block_delta"] * 3,
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
    )
    assert "".join(event["delta"]["text"] for event in events[2:5]) == "Hello there!"
    assert events[0]["message"]["usage"]["input_tokens"] > 0
    assert events[-2]["usage"]["output_tokens"] == 3


async def test_tools_in_the_history_become_those_of_a_chat(front):
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "b"}, {"type": "tool_use", "id": "c1", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "r"}]},
            {"type": "text", "text": "d"},
        ]},
    ]  # fmt: skip
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    chat = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
        {"role": "user", "content": "d"},
    ]
    answer = (await front.http.post("/v1/messages", json={**ASKED, "messages": messages})).json()
    counted = (await front.http.post("/tokenize", json={"messages": chat})).json()
    assert answer["usage"]["input_tokens"] == counted["count"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"stop": ["a"]}, "stop"),
        (
            {
                "tool_choice": {"type": "tool", "name": "w"},
                "tools": [{"type": "web_search_20250305", "name": "w"}],
            },
            "tool_choice",
        ),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"stop_sequences": ["a" * 9000]}, "stop_sequences"),
        ({"tools": [{"name": "f", "input_schema": {"type": "objekt"}}]}, "tools[0].input_schema.type"),
    ],
)
async def test_unsupported_fields_are_refused_by_name_in_anthropics_format(front, fields, param):
    answer = await front.http.post("/v1/messages", json={**ASKED, **fields})
    assert answer.status_code == 400, answer.text
    assert answer.json()["type"] == "error"
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert answer.json()["error"]["param"] == param


async def test_anthropics_key_header_is_accepted(pods, gateway, keys_file):
    front = await gateway(await pods(), api_keys_file=keys_file)
    for key, status in (("acme-key", 200), ("wrong", 401)):
        answer = await front.http.post("/v1/messages", json=ASKED, headers={"x-api-key": key})
        assert answer.status_code == status


#: As Claude Code sends it, with the header `anthropic-beta` and ?beta=true.
CLAUDE_CODE = {
    "model": "claude-sonnet-4-5-20250929",
    "max_tokens": 32000,
    "system": [{"type": "text", "text": "You are Claude Code.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>a</system-reminder>"},
            {"type": "text", "text": "List the files.", "cache_control": {"type": "ephemeral"}},
        ]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "I list them.", "signature": "s"},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "tool_use", "id": "toolu_1", "name": "Bash", "input": {"command": "ls"}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no such folder", "is_error": True}
        ]},
        {"role": "system", "content": "The user has opened a file."},
        {"role": "user", "content": "Go on."},
    ],
    "tools": [
        {"name": "Bash", "description": "Runs a command.", "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object",
            "properties": {"command": {"type": "string"}}, "required": ["command"],
            "additionalProperties": False,
        }, "eager_input_streaming": True},
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    ],
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "enabled", "budget_tokens": 31999},
    "output_config": {"effort": "medium"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "stream": True,
}  # fmt: skip


async def test_claude_codes_request_is_answered_under_its_models_name(pods, gateway, tmp_path):
    model = make_tool_folder(tmp_path, "qwen2.5")
    front = await gateway(await pods(), model=model, model_alias=("claude-*",))
    answer = await front.http.post(
        "/v1/messages?beta=true", json=CLAUDE_CODE, headers={"anthropic-beta": "claude-code-20250219"}
    )
    assert answer.status_code == 200, answer.text
    events = _events(answer)
    assert events[0]["message"]["model"] == CLAUDE_CODE["model"]
    assert [e["delta"]["text"] for e in events if e["type"] == "content_block_delta"]
    assert answer.headers["x-tandem-ignored"] == (
        "context_management, output_config.effort, thinking, tools[].web_search_20250305"
    )


async def test_tokens_are_counted_without_an_answer(pods, gateway, tmp_path):
    front = await gateway(await pods(), model=make_tool_folder(tmp_path, "qwen2.5"))
    body = {name: value for name, value in CLAUDE_CODE.items() if name not in ("max_tokens", "stream")}
    counted = await front.http.post("/v1/messages/count_tokens", json={**body, "model": "tiny-chat"})
    asked = {**CLAUDE_CODE, "model": "tiny-chat", "stream": False}
    answer = (await front.http.post("/v1/messages", json=asked)).json()
    assert counted.json() == {"input_tokens": answer["usage"]["input_tokens"]}
    wrong = await front.http.post("/v1/messages/count_tokens", json={"messages": [], "stop": "a"})
    assert wrong.status_code == 400 and wrong.json()["error"]["type"] == "invalid_request_error"


async def test_the_tokens_of_a_chat_over_the_context_are_counted(pods, gateway):
    front = await gateway(await pods())
    long = {"messages": [{"role": "user", "content": "the order " * 200}]}
    counted = await front.http.post("/v1/messages/count_tokens", json=long)
    assert counted.json()["input_tokens"] > 256, "the context"


async def _prompt(front, messages, **more):
    """The number of tokens of a chat's prompt."""
    counted = await front.http.post("/tokenize", json={"messages": messages, **more})
    return counted.json()["count"]


async def _of_message(front, messages):
    body = {"messages": messages, "max_tokens": 9}
    counted = await front.http.post("/v1/messages/count_tokens", json=body)
    return counted.json()["input_tokens"]


PREFILLED = [
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "1, 2,"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": [
        {"type": "text", "text": "1,"}, {"type": "text", "text": "{"}]}],
    [{"role": "user", "content": "a"},
     {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
     {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
     {"role": "assistant", "content": "It is"}],
]  # fmt: skip


@pytest.mark.parametrize("messages", PREFILLED, ids=["text", "blocks", "after a tool's result"])
async def test_a_last_message_of_the_assistant_is_continued(front, messages):
    opened = [*messages[:-1], {"role": "assistant", "content": "q"}, {"role": "user", "content": "q"}]
    assert await _of_message(front, messages) < await _of_message(front, opened)
    if isinstance(messages[-1]["content"], str) and len(messages) == 2:
        assert await _of_message(front, messages) == await _prompt(
            front, messages, continue_final_message=True, add_generation_prompt=False
        )


@pytest.mark.parametrize(
    ("last", "why"),
    [
        ("1, 2, ", "white space"),
        ([{"type": "text", "text": "a\n"}], "white space"),
        ([{"type": "tool_use", "id": "1", "name": "f", "input": {}}], "send their results"),
        ([{"type": "thinking", "thinking": "a", "signature": ""}], "no text to continue"),
    ],
)
async def test_a_last_message_that_cannot_be_continued_is_refused(front, last, why):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": last}]
    answer = await front.http.post("/v1/messages", json={"max_tokens": 9, "messages": messages})
    assert answer.status_code == 400 and why in answer.json()["error"]["message"]


#: Blocks of the user, and the text that the model reads.
TEXTS = [
    ({"type": "document", "title": "T", "context": "C",
      "source": {"type": "text", "media_type": "text/plain", "data": "d"}}, "T\nC\nd"),
    ({"type": "document", "source": {"type": "content", "content": "d"}}, "d"),
    ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "d"}]}}, "d"),
    ({"type": "search_result", "source": "s", "title": "T", "content": [{"type": "text", "text": "d"}]},
     "T\ns\nd"),
]  # fmt: skip


@pytest.mark.parametrize(("block", "text"), TEXTS)
async def test_documents_of_text_are_text(front, block, text):
    assert await _of_message(front, [{"role": "user", "content": [block]}]) == await _prompt(
        front, [{"role": "user", "content": text}]
    )


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"content": "lost", "is_error": True}, "Error: lost"),
        ({"content": "Error: lost", "is_error": True}, "Error: lost"),
        ({"content": [{"type": "text", "text": "ok"}], "is_error": False}, "ok"),
        ({"content": [{"type": "tool_reference", "tool_name": "f"}]}, "tool f"),
        ({}, ""),
    ],
)
async def test_results_of_tools_reach_the_prompt(front, result, text):
    block = {"type": "tool_result", "tool_use_id": "1", **result}
    assert await _of_message(front, [{"role": "user", "content": [block]}]) == await _prompt(
        front, [{"role": "tool", "tool_call_id": "1", "content": text}]
    )


async def test_blocks_of_anthropics_own_tools_are_left_out(front):
    blocks = [
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": []},
        {"type": "text", "text": "found", "citations": []},
    ]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": blocks}, *ASKED["messages"]]
    answer = await front.http.post("/v1/messages", json={"max_tokens": 9, "messages": turns})
    assert answer.headers["x-tandem-ignored"] == (
        "messages[].content[].server_tool_use, messages[].content[].web_search_tool_result"
    )
    turns[1]["content"] = "found"
    assert answer.json()["usage"]["input_tokens"] == await _prompt(front, turns)


@pytest.mark.parametrize("fields", [{"output_config": {"format": None}}, {"output_format": None}])
async def test_a_format_is_a_guide(pods, gateway, fields):
    pod = await pods()
    front = await gateway(pod)
    wanted = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "null"}}}}
    (name, inner), *_ = fields.items()
    body = {**ASKED, name: wanted if inner is None else {"format": wanted}}
    assert (await front.http.post("/v1/messages", json=body)).status_code == 200
    assert json.loads(pod.requests[0].sampling.guide.json_schema) == wanted["schema"]


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens", "/v1/messages/batches"])
async def test_errors_have_anthropics_types_on_every_path(pods, gateway, keys_file, path):
    front = await gateway(await pods(), api_keys_file=keys_file, max_body_bytes=4096)
    key = {"x-api-key": "acme-key"}
    is_route = not path.endswith("batches")
    cases = [
        (401, "authentication_error", {"json": ASKED}),
        (405, "invalid_request_error", {"method": "DELETE", "headers": key}),
        (400, "invalid_request_error", {"content": b"{", "headers": key}),
        (404, "not_found_error", {"json": {**ASKED, "model": "other"}, "headers": key}),
        (413, "request_too_large", {"json": {**ASKED, "system": "a" * 5000}, "headers": key}),
    ]
    for status, kind, sent in cases if is_route else [(404, "not_found_error", {"json": ASKED})]:
        answer = await front.http.request(sent.pop("method", "POST"), path, **sent)
        body = answer.json()
        assert answer.status_code == status, body
        assert (body["type"], body["error"]["type"]) == ("error", kind)
        assert body["error"]["message"] and body["request_id"] == answer.headers["x-request-id"]


async def test_an_overload_has_anthropics_type(pods, gateway):
    front = await gateway(await pods(pause_s=1.0), max_in_flight=1, max_queue=0)
    answers = await asyncio.gather(*(front.http.post("/v1/messages", json=ASKED) for _ in range(3)))
    refused = [answer for answer in answers if answer.status_code == 429]
    assert refused and refused[0].json()["error"]["type"] == "rate_limit_error"


async def test_a_thread_is_refused_as_anthropics_tool_runner_expects(front):
    """It then sends the request again without the field."""
    answer = await front.http.post("/v1/messages", json={**ASKED, "thread": {"type": "create"}})
    assert answer.status_code == 400
    details = answer.json()["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}


async def test_reasoning_is_shown_if_thinking_is_requested(pods, gateway, tmp_path):
    words = ("<think>\nI ", "think.\n</thi", "nk>\n\nHello")
    front = await gateway(await pods(words=words), model=make_tool_folder(tmp_path, "qwen3"))
    assert (await front.http.post("/v1/messages", json=ASKED)).json()["content"] == [
        {"type": "text", "text": "Hello"}
    ]
    asked = {**ASKED, "thinking": {"type": "enabled", "budget_tokens": 1024}}
    answer = await front.http.post("/v1/messages", json=asked)
    assert "x-tandem-ignored" not in answer.headers
    thinking, text = answer.json()["content"]
    assert (thinking["type"], thinking["thinking"], text["text"]) == ("thinking", "I think.", "Hello")
    events = _events(await front.http.post("/v1/messages", json={**asked, "stream": True}))
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "I think."
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]


CALL = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'


@pytest.mark.parametrize("size", [1, 7, 1000])
async def test_blocks_are_in_the_order_of_the_text(pods, gateway, tmp_path, size):
    text = f"I look.{CALL}Now again.{CALL}Done."
    words = tuple(text[at : at + size] for at in range(0, len(text), size))
    front = await gateway(await pods(words=words), model=make_tool_folder(tmp_path, "qwen2.5"))
    asked = {**ASKED, "max_tokens": 400, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}
    whole = (await front.http.post("/v1/messages", json=asked)).json()
    kinds = ["text", "tool_use", "text", "tool_use", "text"]
    assert [block["type"] for block in whole["content"]] == kinds
    assert [block.get("text") for block in whole["content"][::2]] == ["I look.", "Now again.", "Done."]
    events = _events(await front.http.post("/v1/messages", json={**asked, "stream": True}))
    started = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in started] == kinds
    texts = [""] * len(started)
    for event in events:
        if event["type"] == "content_block_delta":
            texts[event["index"]] += event["delta"].get("text", "")
    assert texts[::2] == ["I look.", "Now again.", "Done."]


async def test_a_cut_call_has_the_arguments_so_far(pods, gateway, tmp_path):
    words = ('<tool_call>{"name": "f", "arguments": {"a": "x", "b": [1, 2, ',)
    fleet = await pods(words=words, reason=common_pb2.FINISH_REASON_LENGTH)
    front = await gateway(fleet, model=make_tool_folder(tmp_path, "qwen2.5"))
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    answer = (await front.http.post("/v1/messages", json={**ASKED, "tools": tools})).json()
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][0]["input"] == {"a": "x", "b": [1, 2]}


def _events(answer):
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": 1e999, "b": 1.5}', {"a": "1e999", "b": 1.5}),
        (r'"{\"a\": NaN}"', {"a": "NaN"}),
        (r'{"a": "\ud83d"}', {"a": "\ud83d"}),
        ("[1]", {}),
        ("5", {}),
    ],
)
async def test_any_arguments_of_a_call_become_an_object_of_json(pods, gateway, tmp_path, arguments, given):
    words = (f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>',)
    front = await gateway(await pods(words=words), model=make_tool_folder(tmp_path, "qwen2.5"))
    tools = [{"name": "f", "input_schema": {"type": "object"}}]
    answer = await front.http.post("/v1/messages", json={**ASKED, "tools": tools})
    (block,) = answer.json()["content"]
    assert block["input"] == given
