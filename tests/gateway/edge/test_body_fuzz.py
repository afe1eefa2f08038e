"""Random bodies for every endpoint that takes one: no 500, and every answer is JSON."""

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PATHS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/tokenize", "/detokenize",
)  # fmt: skip
NAMES = (
    "model", "messages", "prompt", "input", "instructions", "tokens", "role", "content", "type", "text",
    "format", "tools", "tool_choice", "function", "name", "parameters", "arguments", "call_id", "tool_calls",
    "output", "max_tokens", "max_output_tokens", "temperature", "top_p", "stop", "stream", "seed", "include",
    "logprobs", "top_logprobs", "logit_bias", "response_format", "json_schema", "schema", "guided_regex",
    "guided_choice", "reasoning", "store", "add_special_tokens", "return_token_strs", "chat_template_kwargs",
    "stream_options",
)  # fmt: skip
WORDS = (
    "user", "assistant", "tool", "system", "message", "function_call", "function_call_output", "input_text",
    "json_schema", "json_object", "function", "auto", "required", "none", "object", "string", "", "\0", "✓",
)  # fmt: skip
scalars = (
    st.none() | st.booleans() | st.integers(-3, 300) | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(WORDS) | st.text(max_size=8)
)  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=24,
)
#: Required fields of each endpoint, so that bodies pass the first check.
needed = st.sampled_from(
    [
        {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": "hi"}, {"prompt": [1, 2]},
        {"input": "hi"}, {"input": [{"role": "user", "content": "hi"}]}, {"tokens": [1, 2]}, {},
    ]
)  # fmt: skip
bodies = st.builds(
    lambda base, more: {**more, **base, "max_tokens": 1} if "input" not in base else {**more, **base},
    needed,
    st.dictionaries(st.sampled_from(NAMES), values, max_size=3),
)


@pytest.fixture
async def one_front(pods, gateway):
    """One gateway for all examples of a test."""
    return await gateway(await pods())


async def no_server_error(front, data: st.DataObject) -> None:
    path, body = data.draw(st.sampled_from(PATHS)), data.draw(bodies)
    answer = await front.http.post(path, json=body)
    assert answer.status_code < 500, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        assert isinstance(answer.json(), dict)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_random_bodies_cause_no_server_error(one_front, data):
    await no_server_error(one_front, data)


@pytest.mark.wide
@settings(max_examples=5_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
async def test_many_random_bodies_cause_no_server_error(one_front, data):
    await no_server_error(one_front, data)


@pytest.mark.parametrize("path", PATHS)
async def test_invalid_json_is_refused_by_name(one_front, path):
    random_ = random.Random(path)
    for length in (0, 1, 7, 300):
        answer = await one_front.http.post(path, content=b"\xff" + random_.randbytes(length))
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "body"
