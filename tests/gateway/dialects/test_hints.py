"""Hints that are used: reasoning as variables of the template, salts of the prefix cache, names of models."""

import openai
import pytest
from tandem_gateway.dialects.fields import Ignored
from tandem_gateway.dialects.reasoning_hints import reasoning_arguments
from tandem_gateway.settings import GatewaySettings
from tool_models import make_tool_folder

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SWITCHES = ("enable_thinking", "thinking", "messages")


@pytest.mark.parametrize(
    ("hints", "variables", "arguments", "ignored"),
    [
        ({"reasoning_effort": "low"}, SWITCHES, {"enable_thinking": True, "thinking": True}, ""),
        ({"reasoning_effort": "none"}, SWITCHES, {"enable_thinking": False, "thinking": False}, ""),
        ({"reasoning_effort": "minimal"}, ("enable_thinking",), {"enable_thinking": False}, ""),
        ({"reasoning_effort": "high"}, ("reasoning_effort",), {"reasoning_effort": "high"}, ""),
        ({"reasoning": {"effort": "high"}}, ("reasoning_effort",), {"reasoning_effort": "high"}, ""),
        ({"reasoning": {"enabled": False}}, ("enable_thinking",), {"enable_thinking": False}, ""),
        ({"thinking": {"type": "disabled"}}, ("enable_thinking",), {"enable_thinking": False}, ""),
        ({"thinking": {"type": "adaptive"}}, ("enable_thinking",), {"enable_thinking": True}, ""),
        ({"thinking": {"type": "enabled"}}, ("reasoning_effort",), {}, ""),
        ({"enable_thinking": False}, ("enable_thinking",), {"enable_thinking": False}, ""),
        ({"thinking": {"type": "disabled"}, "reasoning_effort": "high"}, ("enable_thinking",),
         {"enable_thinking": False}, ""),
        ({"reasoning": {"effort": None, "summary": "auto"}}, ("messages",), {}, ""),
        ({"thinking": 5, "reasoning": ["a"]}, ("enable_thinking",), {}, ""),
        ({"reasoning_effort": "low", "thinking": True}, ("messages",), {}, "reasoning_effort, thinking"),
        ({}, SWITCHES, {}, ""),
    ],
)  # fmt: skip
def test_hints_become_variables_of_the_template(hints, variables, arguments, ignored):
    found = Ignored()
    assert reasoning_arguments(hints, variables, found) == arguments
    assert found.header() == ignored


async def test_a_hint_changes_the_prompt_of_a_model_that_reasons(pods, gateway, tmp_path):
    front = await gateway(await pods(), model=make_tool_folder(tmp_path, "qwen3"))

    async def count(**fields):
        answer = await front.http.post("/tokenize", json={"messages": USER, **fields})
        assert "x-tandem-ignored" not in answer.headers
        return answer.json()["count"]

    without = await count(chat_template_kwargs={"enable_thinking": False})
    assert without != await count()
    assert await count(reasoning_effort="none") == without
    assert await count(thinking={"type": "disabled"}) == without
    assert await count(reasoning_effort="high") == await count()
    both = {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}
    assert await count(**both) == without


async def test_a_repeated_answer_names_the_ignored_hints_too(pods, gateway):
    front = await gateway(await pods())
    body = {"messages": USER, "reasoning_effort": "low", "colour": "blue"}
    answers = [
        await front.http.post(CHAT, json=body, headers={"idempotency-key": "k"} if key else {})
        for key in (False, True, True)
    ]
    assert answers[1].json()["id"] == answers[2].json()["id"]
    assert {answer.headers["x-tandem-ignored"] for answer in answers} == {"colour, reasoning_effort"}


async def test_a_cache_salt_reaches_the_pod_and_the_routing(pods, gateway):
    pod = await pods()
    front = await gateway(pod)
    for body in (
        {"messages": USER},
        {"messages": USER, "cache_salt": "a"},
        {"messages": USER, "cache_salt": ""},
    ):
        assert (await front.http.post(CHAT, json=body)).status_code == 200
    assert [request.cache_salt for request in pod.requests] == ["", "a", ""]
    long = await front.http.post(CHAT, json={"messages": USER, "cache_salt": "é" * 65})
    assert long.status_code == 400 and long.json()["error"]["param"] == "cache_salt"


async def test_aliases_are_names_of_the_model(pods, gateway):
    front = await gateway(await pods(), model_alias=("gpt-4o", "claude-*"))
    models = [model.id async for model in front.openai.models.list()]
    assert models == ["tiny-chat", "gpt-4o"]
    assert (await front.openai.models.retrieve("claude-x")).id == "claude-x"
    for name in ("gpt-4o", "claude-3-5-haiku-latest", "tiny-chat"):
        whole = await front.openai.chat.completions.create(model=name, messages=USER)
        stream = await front.openai.chat.completions.create(model=name, messages=USER, stream=True)
        assert {whole.model, *[chunk.model async for chunk in stream]} == {name}
        completion = await front.openai.completions.create(model=name, prompt="a")
        assert completion.model == name
        assert (await front.openai.responses.create(model=name, input="a")).model == name
    unnamed = await front.http.post(CHAT, json={"messages": USER})
    assert unnamed.json()["model"] == "tiny-chat"
    for name in ("gpt-4", "gpt-4o-mini", "xclaude-1"):
        with pytest.raises(openai.NotFoundError):
            await front.openai.chat.completions.create(model=name, messages=USER)


@pytest.mark.parametrize("alias", ["a b", "[a-z]", "a?b", "é", "a" * 129])
def test_an_alias_that_no_request_has_is_refused(alias, tmp_path):
    with pytest.raises(ValueError, match="is not a model name"):
        GatewaySettings(model=tmp_path, decode=("127.0.0.1:1",), model_alias=(alias,))
