"""Guides and tools' schemas are checked before admission: in turns of tenants, in bounded memory."""

from __future__ import annotations

import asyncio
import json
import threading
import tracemalloc

import grpc
import httpx
import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_gateway.auth import Caller
from tandem_gateway.call import guide_checks
from tandem_gateway.call.guide_checks import GuideChecks
from tandem_proto.v1 import common_pb2, gateway_pb2
from tool_models import make_tool_folder
from waiting import until

CHAT = "/v1/chat/completions"
ACME, OTHER = (Caller(tenant, known_classes={}) for tenant in ("acme", "other"))


def guide(schema: object) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema, ensure_ascii=False), "response_format")


def test_results_of_refused_guides_take_no_memory_for_their_text() -> None:
    checks, num_guides = GuideChecks(), 100

    async def refuse_all() -> None:
        for number in range(num_guides):
            schema = {"bad": number, "description": "🙂" + "d" * 50_000}
            with pytest.raises(InvalidRequestError, match=r"response_format: .*'bad' is not supported"):
                await checks.check(ACME, guide(schema))

    tracemalloc.start()
    try:
        asyncio.run(refuse_all())
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < num_guides * 5_000


async def test_a_guide_is_compiled_once_for_a_tenant(monkeypatch) -> None:
    compiled: list[Guide] = []
    monkeypatch.setattr(guide_checks, "check_guide", compiled.append)
    checks = GuideChecks()
    await asyncio.gather(*(checks.check(ACME, guide({"type": "object"})) for _ in range(4)))
    assert len(compiled) == 1
    await checks.check(OTHER, guide({"type": "object"}))
    assert len(compiled) == 2, "another tenant could learn from the time that somebody has sent the guide"


async def test_slow_schemas_of_a_tenant_do_not_delay_others(pods, gateway, keys_file, tmp_path, monkeypatch):
    model = make_tool_folder(tmp_path / "model", "qwen2.5")
    front = await gateway(await pods(), model=model, api_keys_file=keys_file)
    check, may_go_on, begun = guide_checks.check_guide, threading.Event(), []

    def slow(guide: Guide) -> None:
        if "slow" in guide.source:
            begun.append(guide)
            may_go_on.wait(30)
        check(guide)

    monkeypatch.setattr(guide_checks, "check_guide", slow)

    def ask(key: str, name: str, strict: bool) -> asyncio.Task[httpx.Response]:
        parameters = {"type": "object", "properties": {}, "additionalProperties": False}
        tools = [
            {"type": "function",
             "function": {"name": f"{name}{number}", "strict": strict,
                          "parameters": parameters | {"description": f"{name} {number}"}}}
            for number in range(3)
        ]  # fmt: skip
        body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 2}
        headers = {"authorization": f"Bearer {key}"}
        return asyncio.create_task(front.http.post(CHAT, json=body, headers=headers))

    try:
        waiting = [ask("acme-key", f"slow{number}", strict=True) for number in range(4)]
        await until(lambda: begun)
        for strict in (False, True):
            assert (await ask("slow-key", "quick", strict=strict)).status_code == 200
        assert (await ask("acme-key", "plain", strict=False)).status_code == 200
        assert len(begun) == 1, "a tenant has one thread at a time"
    finally:
        may_go_on.set()
    assert {answer.status_code for answer in await asyncio.gather(*waiting)} == {200}


async def test_a_prompt_that_does_not_fit_is_refused_before_its_guide_is_compiled(pods, gateway, monkeypatch):
    front = await gateway(await pods())

    def fail(guide: Guide) -> None:
        raise AssertionError("was compiled")

    monkeypatch.setattr(guide_checks, "check_guide", fail)
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}
    body = {"messages": [{"role": "user", "content": "a b " * 200}], "response_format": schema}
    answer = await front.http.post(CHAT, json=body)
    assert answer.status_code == 400
    assert "context" in answer.json()["error"]["message"]


async def test_a_schema_without_an_end_is_refused_by_the_clients_field(pods, gateway, tmp_path):
    pod = await pods()
    front = await gateway(pod, model=make_tool_folder(tmp_path / "model", "qwen2.5"))
    schema = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    arguments = {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"],
                 "$defs": schema["$defs"]}  # fmt: skip
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": arguments}}
    messages = {"messages": [{"role": "user", "content": "hi"}]}
    named = {"type": "json_schema", "name": "n", "schema": schema}
    for path, fields, param in [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
         "response_format.json_schema.schema"),
        (CHAT, {"guided_json": schema}, "guided_json"),
        (CHAT, {"structured_outputs": {"json": schema}}, "structured_outputs.json"),
        (CHAT, {"tools": [tool]}, "tools[0].function.parameters"),
        ("/v1/responses", {"text": {"format": named}}, "text.format.schema"),
    ]:  # fmt: skip
        body = {"input": "hi", **fields} if "responses" in path else {**messages, **fields}
        for stream in (False, True):
            answer = await front.http.post(path, json={**body, "stream": stream})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (400, param)
            assert "/$defs/a requires itself without an end" in error["message"]
    sampling = common_pb2.SamplingParams(guide=common_pb2.Guide(json_schema=json.dumps(schema)))
    with pytest.raises(grpc.aio.AioRpcError, match=r"guide: .*requires itself without an end"):
        async for _ in front.grpc.Generate(gateway_pb2.GenerateRequest(text="hi", sampling=sampling)):
            pass
    assert not pod.requests
