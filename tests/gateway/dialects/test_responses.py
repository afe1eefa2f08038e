"""OpenAI's Responses API, through OpenAI's client: one object, typed events, nothing stored."""

import json

import openai
import pytest
from tandem_proto.v1 import common_pb2
from tool_models import make_tool_folder

ITEMS = [
    {"role": "developer", "content": "Go."},
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "1"},
    {"type": "function_call", "call_id": "c2", "name": "f", "arguments": "2"},
    {"type": "function_call_output", "call_id": "c1", "output": "shipped"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "lost"}]},
]


@pytest.fixture
async def front(pods, gateway):
    return await gateway(await pods())


async def test_a_response_has_the_text_and_usage_of_a_chat(front):
    response = await front.openai.responses.create(model="tiny-chat", instructions="You help.", input="hi")
    chat = await front.openai.chat.completions.create(
        model="tiny-chat",
        messages=[{"role": "system", "content": "You help."}, {"role": "user", "content": "hi"}],
    )
    assert response.output_text == chat.choices[0].message.content == "Hello there!"
    assert (response.status, response.object, response.error) == ("completed", "response", None)
    assert response.usage.input_tokens == chat.usage.prompt_tokens
    assert response.usage.output_tokens == chat.usage.completion_tokens
    assert response.usage.model_extra["tandem_receipt"]["decode_pod"] == "d-0"
    assert response.model_extra["store"] is False, "OpenAI's default is true, but nothing is stored here"
    (item,) = response.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")


async def test_a_stream_has_openais_events_in_their_order_and_numbers(front):
    stream = await front.openai.responses.create(model="tiny-chat", input="hi", stream=True)
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 3,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Hello there!"
    assert events[7].text == "Hello there!"
    last = events[-1].response
    assert last.output_text == "Hello there!" and last.id == events[0].response.id
    assert last.usage.total_tokens == last.usage.input_tokens + last.usage.output_tokens
    assert {e.item_id for e in events if hasattr(e, "item_id")} == {last.output[0].id}


async def test_the_clients_stream_helper_collects_the_response(front):
    async with front.openai.responses.stream(model="tiny-chat", input="hi") as stream:
        async for _ in stream:
            pass
        assert (await stream.get_final_response()).output_text == "Hello there!"


async def test_an_answer_cut_by_its_limit_is_incomplete(pods, gateway):
    front = await gateway(await pods(words=("a",), reason=common_pb2.FINISH_REASON_LENGTH))
    cut = await front.openai.responses.create(model="tiny-chat", input="hi", max_output_tokens=1)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    stream = await front.openai.responses.create(
        model="tiny-chat", input="hi", max_output_tokens=1, stream=True
    )
    assert [event async for event in stream][-1].type == "response.incomplete"


async def test_items_become_the_messages_of_a_chat(front, pods):
    await front.openai.responses.create(model="tiny-chat", input=ITEMS)
    chat = [
        {"role": "developer", "content": "Go."},
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": str(n)}}
            for n in (1, 2)
        ]},
        {"role": "tool", "tool_call_id": "c1", "content": "shipped"},
        {"role": "tool", "tool_call_id": "c2", "content": "lost"},
    ]  # fmt: skip
    await front.openai.chat.completions.create(model="tiny-chat", messages=chat)
    tokens = [
        (await front.http.post("/tokenize", json={"messages": chat})).json()["count"],
        (await front.openai.responses.create(model="tiny-chat", input=ITEMS)).usage.input_tokens,
    ]
    assert tokens[0] == tokens[1]


async def test_logprobs_are_included_on_request(front):
    stream = await front.openai.responses.create(
        model="tiny-chat", input="hi", include=["message.output_text.logprobs"], top_logprobs=2, stream=True
    )
    events = [event async for event in stream]
    part = events[-1].response.output[0].content[0]
    assert part.logprobs is not None


async def test_the_last_events_of_a_stream_repeat_no_long_lists_of_logprobs(pods, gateway):
    """Each repeats the whole list, which 20,000 tokens with 20 alternatives make two seconds of work."""
    asked = {
        "model": "tiny-chat", "input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2
    }  # fmt: skip
    for num_tokens, num_repeated in ((100, 100), (200, 0)):
        front = await gateway(await pods(words=(" word",) * num_tokens))
        stream = await front.openai.responses.create(**asked, stream=True)
        events = [event async for event in stream]
        deltas = [event for event in events if event.type == "response.output_text.delta"]
        assert sum(len(event.logprobs) for event in deltas) == num_tokens
        assert len(events[-1].response.output[0].content[0].logprobs) == num_repeated
        (done,) = [event for event in events if event.type == "response.output_text.done"]
        assert len(done.logprobs) == num_repeated
    whole = await front.openai.responses.create(**asked)
    assert len(whole.output[0].content[0].logprobs) == 200


BAD_TOOL = {"type": "function", "name": "f", "parameters": {"type": "objekt"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "message", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0]"),
        ({"input": "a", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "max_tokens": 3}, "max_tokens"),
        ({"input": "a", "temperature": 9}, "temperature"),
        ({"input": "a", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "word " * 5000}, "input"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "x", "schema": {"tpye": 1}}}},
            "text.format.schema",
        ),
        ({"input": "a", "tools": [BAD_TOOL]}, "tools[0].parameters.type"),
    ],
)
async def test_unsupported_fields_are_refused_by_name(front, fields, param):
    answer = await front.http.post("/v1/responses", json=fields)
    assert answer.status_code == 400, answer.text
    if param is not None:
        assert answer.json()["error"]["param"] == param


async def test_fields_without_an_effect_are_accepted(front):
    response = await front.openai.responses.create(
        model="tiny-chat", input="hi", store=True, metadata={"a": "b"}, user="u", truncation="disabled",
        parallel_tool_calls=True, text={"format": {"type": "text"}}, background=False, include=[], tools=[],
        previous_response_id=None, service_tier="auto", extra_body={"seed": 5, "slo_class": "batch"},
    )  # fmt: skip
    assert response.output_text == "Hello there!"


async def test_a_cut_stream_is_resumed_with_the_same_ids_and_numbers(front):
    body, with_ids = {"input": "hi", "stream": True}, {"x-event-ids": "true"}
    async with front.http.stream("POST", "/v1/responses", json=body, headers=with_ids) as answer:
        frames = [frame async for frame in _frames(answer)]
    number, frame = [(n, frame) for n, frame in enumerate(frames) if "id" in frame][1]
    headers = {"last-event-id": frame["id"]}
    async with front.http.stream("POST", "/v1/responses", headers=headers) as answer:
        rest = [frame async for frame in _frames(answer)]
    assert rest == frames[number + 1 :]
    other = await front.http.post("/v1/chat/completions", headers=headers)
    assert other.status_code == 400, "an answer is resumed where it began"


async def test_a_repeated_request_gets_the_response_of_the_first(front):
    headers = {"idempotency-key": "one"}
    first, second = [
        (await front.http.post("/v1/responses", json={"input": "hi"}, headers=headers)).json() for _ in "ab"
    ]
    assert first["id"] == second["id"] and first["output"] == second["output"]


async def test_a_failure_in_a_stream_is_an_error_event(pods, gateway):
    import grpc

    front = await gateway(await pods(fail_with=grpc.StatusCode.INTERNAL, fail_after=1))
    stream = await front.openai.responses.create(model="tiny-chat", input="hi", stream=True)
    with pytest.raises(openai.APIError, match=r"the decode pod .* failed"):
        async for _ in stream:
            pass


async def _frames(answer):
    """Events as {"event", "data", "id" if there is one}."""
    text = (await answer.aread()).decode()
    for block in text.strip().split("\n\n"):
        frame = dict(line.split(": ", 1) for line in block.splitlines())
        yield {**frame, "data": json.loads(frame["data"])}


PATCH = {
    "type": "custom", "name": "apply_patch", "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: begin_patch"},
}  # fmt: skip
#: As the Codex CLI sends it.
CODEX = {
    "model": "gpt-5-codex",
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "List the files."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "I list them."}],
         "content": None, "encrypted_content": "x"},
        {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "shell",
         "arguments": '{"command": ["ls"]}'},
        {"type": "function_call_output", "call_id": "c1", "output": "a.py"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "apply_patch", "input": "*** Begin Patch"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "Done."},
        {"type": "local_shell_call", "id": "l1", "call_id": "c3", "status": "completed",
         "action": {"type": "exec", "command": ["pwd"], "env": {}}},
        {"type": "local_shell_call_output", "id": "c3", "output": "/src"},
        {"type": "web_search_call", "id": "w1", "status": "completed",
         "action": {"type": "search", "query": "q"}},
        {"type": "message", "role": "assistant", "id": "m1", "status": "completed",
         "content": [{"type": "output_text", "text": "There is one.", "annotations": []}]},
        {"type": "message", "role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"type": "additional_tools", "role": "developer", "tools": [
            {"type": "function", "name": "later", "parameters": None, "strict": False}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go on."}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs a command.", "strict": False,
         "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {
             "type": "string"}}}, "required": ["command"], "additionalProperties": False}},
        PATCH, {"type": "web_search", "external_web_access": False}, {"type": "local_shell"},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object"}, "strict": False}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "1-2-3",
    "text": {"verbosity": "medium"},
    "client_metadata": {"a": "b"},
}  # fmt: skip


async def test_codexs_request_is_answered_under_its_models_name(pods, gateway, tmp_path):
    model = make_tool_folder(tmp_path, "qwen2.5")
    front = await gateway(await pods(), model=model, model_alias=("gpt-5*", "other"))
    answer = await front.http.post("/v1/responses", json=CODEX)
    assert answer.status_code == 200, answer.text
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data: "))["response"]
    assert (last["model"], last["status"]) == ("gpt-5-codex", "completed")
    for name in ("instructions", "tools", "tool_choice", "parallel_tool_calls"):
        assert last[name] == CODEX[name]
    assert sorted(answer.headers["x-tandem-ignored"].split(", ")) == [
        "client_metadata", "input[].web_search_call", "reasoning", "text.verbosity", "tools[].local_shell",
        "tools[].web_search",
    ]  # fmt: skip


async def test_items_of_a_turn_become_one_message(pods, gateway, tmp_path):
    front = await gateway(await pods(), model=make_tool_folder(tmp_path, "qwen3"))
    items = [
        {"role": "user", "content": "a"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I think."}]},
        {"type": "message", "role": "assistant", "content": "b"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "p", "input": 'say "x"'},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "r"},
        {"type": "reasoning", "summary": []},
    ]
    call = {
        "id": "c1",
        "type": "function",
        "function": {"name": "p", "arguments": '{"input": "say \\"x\\""}'},
    }
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "reasoning_content": "I think.", "content": "b", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "r"},
    ]
    response = await front.openai.responses.create(model="tiny-chat", input=items)
    counted = (await front.http.post("/tokenize", json={"messages": turns})).json()["count"]
    assert response.usage.input_tokens == counted


@pytest.mark.parametrize("name", ["apply_patch", r"\ud83d"])
async def test_half_of_a_surrogate_pair_ends_no_answer(pods, gateway, tmp_path, name):
    words = (rf'<tool_call>{{"name": "{name}", "arguments": {{"input": "\ud83d"}}}}</tool_call>',)
    front = await gateway(await pods(words=words), model=make_tool_folder(tmp_path, "qwen2.5"))
    asked = {"model": "tiny-chat", "input": "Edit.", "tools": [PATCH]}
    for stream in (False, True):
        answer = await front.http.post("/v1/responses", json={**asked, "stream": stream})
        assert answer.status_code == 200 and r"\ud83d" in answer.text and '"completed"' in answer.text


async def test_a_call_of_a_custom_tool_has_its_text(pods, gateway, tmp_path):
    text = '*** Begin "Patch"\n+é'
    call = json.dumps({"name": "apply_patch", "arguments": {"input": text}})
    words = ("<tool_call>\n", call[:40], call[40:], "\n</tool_call>")
    front = await gateway(await pods(words=words), model=make_tool_folder(tmp_path, "qwen2.5"))
    asked = {"model": "tiny-chat", "input": "Edit.", "tools": [PATCH]}
    (item,) = (await front.openai.responses.create(**asked)).output
    assert (item.type, item.name, item.input) == ("custom_tool_call", "apply_patch", text)
    stream = await front.openai.responses.create(**asked, stream=True)
    events = {event.type: event async for event in stream}
    assert events["response.custom_tool_call_input.delta"].delta == text
    assert events["response.custom_tool_call_input.done"].input == text
    assert events["response.completed"].response.output[0].input == text
    required = {**asked, "tool_choice": {"type": "custom", "name": "apply_patch"}}
    assert (await front.openai.responses.create(**required)).output[0].input == text


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("is_cut", [False, True])
async def test_items_are_in_the_order_of_the_text(pods, gateway, tmp_path, size, is_cut):
    call = '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'
    text = f"I look.{call}Now again.{call}"
    text = text[:-20] if is_cut else f"{text}Done."
    reason = common_pb2.FINISH_REASON_LENGTH if is_cut else common_pb2.FINISH_REASON_STOP
    words = tuple(text[at : at + size] for at in range(0, len(text), size))
    front = await gateway(await pods(words=words, reason=reason), model=make_tool_folder(tmp_path, "qwen2.5"))
    tool = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
    asked = {"model": "tiny-chat", "input": "hi", "tools": [tool]}
    asked |= {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    whole = await front.openai.responses.create(**asked)
    stream = [event async for event in await front.openai.responses.create(**asked, stream=True)]
    kinds = ["message", "function_call", "message", "function_call", "message"]
    for response in (whole, stream[-1].response):
        assert [item.type for item in response.output] == (kinds[:4] if is_cut else kinds)
        assert [item.content[0].text for item in response.output[:3:2]] == ["I look.", "Now again."]
        assert response.output[1].arguments == '{"n": 1}'
        cut = "incomplete" if is_cut else "completed"
        assert [item.status for item in response.output] == ["completed"] * (len(response.output) - 1) + [cut]


async def test_a_tool_in_a_namespace_is_called_by_both_names(pods, gateway, tmp_path):
    words = ('<tool_call>\n{"name": "mcp__a__find", "arguments": {"x": 1}}\n</tool_call>',)
    front = await gateway(await pods(words=words), model=make_tool_folder(tmp_path, "qwen2.5"))
    inner = {"type": "function", "name": "find", "parameters": {"type": "object"}, "strict": False}
    tools = [{"type": "namespace", "name": "mcp__a", "description": "A.", "tools": [inner]}]
    asked = {"model": "tiny-chat", "input": "hi", "tools": tools}
    whole = await front.openai.responses.create(**asked)
    stream = [event async for event in await front.openai.responses.create(**asked, stream=True)]
    for response in (whole, stream[-1].response):
        (item,) = response.output
        assert (item.type, item.namespace, item.name) == ("function_call", "mcp__a", "find")
    call = {"type": "function_call", "call_id": "1", "arguments": "{}"}
    counts = [
        (await front.openai.responses.create(**{**asked, "input": [{"role": "user", "content": "a"}, one]}))
        for one in ({**call, "namespace": "mcp__a", "name": "find"}, {**call, "name": "mcp__a__find"})
    ]
    assert counts[0].usage.input_tokens == counts[1].usage.input_tokens


async def test_a_response_shows_fields_of_the_request(front):
    given = {
        "instructions": "Be brief.", "metadata": {"a": "b"}, "tool_choice": "none",
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
    }  # fmt: skip
    whole = await front.openai.responses.create(model="tiny-chat", input="hi", **given)
    stream = await front.openai.responses.create(model="tiny-chat", input="hi", stream=True, **given)
    first = (await anext(aiter(stream))).response
    for response in (whole, first):
        shown = response.model_dump(exclude_unset=True)
        assert {name: shown[name] for name in given} == given
    long = {"instructions": "a", "metadata": {"a": "b" * 70_000}}
    assert (await front.http.post("/v1/responses", json={"input": "a", **long})).json()["metadata"] == {}


async def test_allowed_tools_are_the_ones_that_are_offered(pods, gateway, tmp_path):
    front = await gateway(await pods(), model=make_tool_folder(tmp_path, "qwen2.5"))
    tools = [
        {"type": "function", "name": name, "parameters": {"type": "object"}, "strict": False}
        for name in "fgh"
    ]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]}
    allowed, one = [
        await front.openai.responses.create(model="tiny-chat", input="hi", **given)
        for given in ({"tools": tools, "tool_choice": choice}, {"tools": tools[1:2]})
    ]
    assert allowed.usage.input_tokens == one.usage.input_tokens
