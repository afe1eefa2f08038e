"""Every field and alternative of the SDKs' request types is used, ignored with a header, or refused for a
reason that is listed here."""

from __future__ import annotations

import importlib
import json
import re

import pytest
from sdk_samples import fields, samples
from tandem_core.errors import InvalidRequestError
from tandem_gateway.dialects.fields import MAX_NAME_CHARS, MAX_NAMES, Ignored
from tandem_gateway.dialects.messages_models import MessagesBody
from tandem_gateway.dialects.openai_models import ChatBody, CompletionBody, parse_json
from tandem_gateway.dialects.responses_models import ResponsesBody
from tool_models import make_tool_folder

USER = [{"role": "user", "content": "hi"}]
#: By API: body, SDK's type, a request, and what is refused: patterns of "field: message".
APIS = {
    "chat": (
        ChatBody,
        "openai.types.chat.completion_create_params:CompletionCreateParamsStreaming",
        {"messages": USER, "stream": True},
        (
            r"messages\[0\]\.content\[0\]: is a part of type '(image_url|input_audio|file)'",
            "(audio|moderation|web_search_options): .* is not supported",
            # incomplete samples
            "response_format.json_schema.schema: is missing",
            "tool_choice: names 'find', which is not in tools",
            "tool_choice: is not a choice",
            "top_logprobs: is only allowed with logprobs",
        ),
    ),
    "completion": (
        CompletionBody,
        "openai.types.completion_create_params:CompletionCreateParamsStreaming",
        {"prompt": "hi", "stream": True},
        ("suffix: 'x' is not supported",),
    ),
    "response": (
        ResponsesBody,
        "openai.types.responses.response_create_params:ResponseCreateParamsStreaming",
        {"input": "hi", "stream": True},
        (
            r"input\[0\]\.(content|output)\[0\]: is a part of type '(input_image|input_file)'",
            r"input\[0\]\.type: is '(computer_call|computer_call_output|item_reference)'",
            r"input\[0\]\.type: is '(compaction|compaction_trigger)'",
            "(background|conversation|previous_response_id|prompt|moderation): .* is not supported",
            # incomplete samples
            "tool_choice: names 'find', which is not in tools",
            "tool_choice: is not a choice",
            "top_logprobs: is only allowed with include",
        ),
    ),
    "message": (
        MessagesBody,
        "anthropic.types.beta.message_create_params:MessageCreateParamsStreaming",
        {"messages": USER, "max_tokens": 9, "stream": True},
        (
            r"messages\[0\]\.content\[0\]\S*: is a part of type '(image|browser_state|container_upload)'",
            r"messages\[0\]\.content\[0\]\S*\.source: is not a text",
            "(compaction|container|thread): .* is not supported",
            # incomplete or misplaced samples
            r"messages\[0\]\.content\[0\]\S*: is a part of type 'None'",
            r"messages\[0\]\.content(\[0\])?: (is not a block|has no text to continue|is missing)",
            r"messages\[0\]: calls tools",
            r"messages\[0\]\.tool_calls: are only allowed in messages of the assistant",
            "tool_choice: (is 'required', but tools is empty|names 'find')",
        ),
    ),
}


def read(kind: type, body: dict[str, object]) -> tuple[str, str]:
    """The header for a body, and why it is refused."""
    ignored = Ignored(names=kind.field_names)
    try:
        chat = parse_json(kind, json.dumps(body).encode()).checked(ignored)
        if isinstance(chat, ChatBody):
            chat.chat_messages(), chat.chosen_tools(ignored), chat.chat_options((), ignored)
        chat.given_sampling()
    except InvalidRequestError as error:
        return ignored.header(), str(error)
    return ignored.header(), ""


@pytest.mark.parametrize("api", APIS)
def test_every_field_of_the_sdks_is_accepted_or_refused_for_a_reason(api: str) -> None:
    kind, where, request, refusals = APIS[api]
    module, _, name = where.partition(":")
    pytest.importorskip(module.partition(".")[0])
    of_request = fields(getattr(importlib.import_module(module), name))
    assert len(of_request) >= 18
    unused = set(refusals)
    for field, type_ in of_request.items():
        for value in samples(type_):
            _, refusal = read(kind, {**request, field: value})
            found = next((pattern for pattern in refusals if re.match(pattern, refusal)), None)
            assert not refusal or found, f"{field} {value}: {refusal}"
            unused.discard(found)
    assert not unused, "no sample is refused for this reason any more"


#: Fields of Anthropic's SDK 2.14, which is not always installed.
MESSAGE_FIELDS = {
    "system": "a", "temperature": 0.5, "top_k": 5, "top_p": 0.5, "stop_sequences": ["x"], "stream": False,
    "tools": [{"name": "f", "input_schema": {"type": "object"}}], "metadata": {"user_id": "u"},
    "service_tier": "auto", "cache_control": {"type": "ephemeral"}, "diagnostics": {}, "betas": ["b"],
    "billing_policy": {"type": "x"}, "fallback_credit_token": "t", "user_profile_id": "u",
    "workspace_id": "w", "inference_geo": "us", "speed": "fast", "fallbacks": "default", "mcp_servers": [{}],
    "thinking": {"type": "between_tools"}, "output_config": {"effort": "max", "task_budget": {"type": "t"}},
    "context_management": {"edits": []}, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
}  # fmt: skip


@pytest.mark.parametrize("field", MESSAGE_FIELDS)
def test_fields_of_anthropics_sdk_are_accepted(field: str) -> None:
    request = {**APIS["message"][2], field: MESSAGE_FIELDS[field]}
    assert read(MessagesBody, request)[1] == ""


#: Fields of the four APIs that other clients send, and of misspelled ones.
HINTS = {
    "chat": {
        "reasoning_effort": "low", "verbosity": "medium", "prediction": {"type": "content", "content": "x"},
        "cache_prompt": True, "keep_alive": "5m", "usage": {"include": True}, "priority": 3, "max_token": 5,
        "kv_transfer_params": {"a": 1}, "thinking": {"type": "enabled"}, "chat_id": "c", "mirostat": 2,
        "temprature": 0, "top_q": 0.0,
    },
    "completion": {"cache_prompt": True, "n_predict": 5, "id_slot": 1},
    "response": {
        "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "high"},
        "context_management": [{"type": "compaction"}], "include": ["a.new.one"], "max_outputtokens": 3,
        "tools": [{"type": "web_search"}], "stream_options": {"include_obfuscation": False, "x": 1},
    },
    "message": {
        "thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "fallbacks": "default",
        "context_management": {"edits": [{"type": "clear_thinking_20251015"}]}, "speed": "fast",
        "inference_geo": "us", "mcp_servers": [{"type": "url"}], "tools": [{"type": "bash_20250124"}],
    },
}  # fmt: skip
PATHS = {
    "chat": "/v1/chat/completions",
    "completion": "/v1/completions",
    "response": "/v1/responses",
    "message": "/v1/messages",
}
#: How the header names what is within a field.
WITHIN = {
    "text": "text.verbosity", "include": "include.a.new.one", "output_config": "output_config.effort",
    "stream_options": "stream_options.x",
}  # fmt: skip


@pytest.mark.parametrize("api", APIS)
async def test_hints_are_ignored_and_named_in_a_header_or_refused_by_name(pods, gateway, api, subtests):
    pod = await pods()
    front, strict = await gateway(pod), await gateway(pod, strict_fields=True)
    request = {name: value for name, value in APIS[api][2].items() if name != "stream"}
    for name, value in HINTS[api].items():
        with subtests.test(name):
            body = {**request, "stream": name == "stream_options", name: value}
            answer = await front.http.post(PATHS[api], json=body)
            assert answer.status_code == 200, answer.text
            shown = f"tools[].{value[0]['type']}" if name == "tools" else WITHIN.get(name, name)
            assert answer.headers["x-tandem-ignored"] == shown
            refused = await strict.http.post(PATHS[api], json=body)
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == shown.replace("[]", "[0]")
    plain = await strict.http.post(PATHS[api], json=request)
    assert plain.status_code == 200 and "x-tandem-ignored" not in plain.headers


@pytest.mark.parametrize("api", APIS)
async def test_a_whole_number_may_have_a_fraction_of_zero(pods, gateway, api):
    pod = await pods()
    front = await gateway(pod)
    length = {"response": "max_output_tokens"}.get(api, "max_tokens")
    body = {**APIS[api][2], "stream": False, length: 5.0}
    assert (await front.http.post(PATHS[api], json=body)).status_code == 200
    assert pod.requests[0].sampling.max_tokens == 5
    for wrong in (5.5, "5", True, 1e400):
        content = json.dumps({**body, length: wrong}).replace("Infinity", "1e400")
        refused = await front.http.post(PATHS[api], content=content)
        assert (refused.status_code, refused.json()["error"].get("param", length)) == (400, length)


async def test_unknown_fields_within_a_chat_are_named_once(pods, gateway):
    front = await gateway(await pods())
    part = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "odd": 1}
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object"}, "odd": 1},
        "cache_control": {},
        "also": 1,
    }
    replayed = {
        "role": "assistant", "content": "b", "id": "1", "timestamp": 5, "provider_specific_fields": {"a": 1},
        "thinking_blocks": [{}], "reasoning_details": [{}], "annotations": [{}], "refusal": "x",
        "audio": {"id": "a"}, "cache_control": {"type": "ephemeral"},
    }  # fmt: skip
    body = {
        "messages": [{"role": "user", "content": [part, part], "odd": 1}, replayed, *USER],
        "tools": [tool],
        "stream": True,
        "stream_options": {"include_usage": True, "bogus": 1},
        "response_format": {"type": "text", "odd": 1},
    }
    answer = await front.http.post("/v1/chat/completions", json=body)
    names = answer.headers["x-tandem-ignored"].split(", ")
    assert sorted(names) == [
        "messages[].content[].odd", "messages[].odd", "response_format.odd", "stream_options.bogus",
        "tools[].also", "tools[].function.odd",
    ]  # fmt: skip


async def test_ignored_fields_of_a_tool_do_not_reach_the_prompt(pods, gateway, tmp_path):
    front = await gateway(await pods(), model=make_tool_folder(tmp_path, "qwen2.5"))
    counts = []
    for extra in ({}, {"cache_control": {"type": "ephemeral"}, "defer_loading": True}):
        tool = {"type": "function", "function": {"name": "f", "description": "d", **extra}, **extra}
        body = {"messages": USER, "tools": [tool]}
        counts.append((await front.http.post("/tokenize", json=body)).json()["count"])
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    "names", [["a\r\nx-evil: 1"], ["é" * 300], ["n" * 5000], [f"field_{i}" for i in range(200)], [""]]
)
async def test_the_header_is_bounded_and_printable(pods, gateway, names):
    front = await gateway(await pods())
    body = {"messages": USER, **dict.fromkeys(names, 1)}
    answer = await front.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    header = answer.headers["x-tandem-ignored"]
    assert len(header) <= (MAX_NAMES + 1) * (MAX_NAME_CHARS + 2) and header.isascii()
    assert "x-evil" not in answer.headers


@pytest.mark.parametrize("api", APIS)
async def test_a_body_of_very_many_fields_is_refused(pods, gateway, api):
    front = await gateway(await pods())
    body = {**APIS[api][2], **{f"field_{i}": 1 for i in range(300)}}
    answer = await front.http.post(PATHS[api], json=body)
    assert answer.status_code == 400 and "at most 256" in answer.json()["error"]["message"]


async def test_refusals_name_the_field_that_the_client_sent(pods, gateway, subtests):
    front = await gateway(await pods())
    cases = [
        ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ("chat", {"max_completion_tokens": 0}, "max_completion_tokens"),
        ("chat", {"max_tokens": 0}, "max_tokens"),
        ("chat", {"echo": True}, "echo"),
        ("chat", {"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ("chat", {"response_format": {"type": "json_object", "schema": {"tpye": 1}}},
         "response_format.schema"),
        ("chat", {"grammar": "root ::= x"}, "grammar"),
        ("completion", {"logprobs": 21}, "logprobs"),
        ("completion", {"suffix": "x"}, "suffix"),
        ("response", {"max_output_tokens": 0}, "max_output_tokens"),
        ("response", {"include": ["message.output_text.logprobs"], "top_logprobs": 21}, "top_logprobs"),
        ("response", {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"tpye": 1}}}},
         "text.format.schema"),
        ("response", {"input": [{"type": "function_call", "call_id": "1", "arguments": "{}"}]},
         "input[0].name"),
        ("message", {"max_tokens": 0}, "max_tokens"),
        ("message", {"output_config": {"format": {"type": "json_schema", "schema": {"tpye": 1}}}},
         "output_config.format.schema"),
        ("message", {"tools": [{"name": "n" * 129, "input_schema": {}}]}, "tools[0].name"),
        ("message", {"response_format": {"type": "json_object"}}, "response_format"),
    ]  # fmt: skip
    for api, given, param in cases:
        with subtests.test(param, api=api):
            request = {name: value for name, value in APIS[api][2].items() if name != "stream"}
            answer = await front.http.post(PATHS[api], json={**request, **given})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == param
