"""One trace through gateway, decode pod and prefill pod, over real HTTP, gRPC and ZeroMQ."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest
from front_doors import front_door
from otlp_collector import CLIENT, ERROR, SERVER, Collector, Span, collecting
from pod_fleet import request, run_fleet
from redis_servers import RedisServer
from tandem_decode.main import open_pod as open_decode
from tandem_decode.settings import DecodeSettings
from tandem_lookahead.main import LookaheadPod
from tandem_lookahead.settings import LookaheadSettings
from tandem_proto.v1 import decode_pb2_grpc, gateway_pb2
from toy_models import SIZES, prompt_of
from waiting import until_async

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = (f"00-{TRACE_ID}-{SPAN_ID}-{flags}" for flags in ("01", "00"))
GATEWAY_STAGES = ["receive", "tokenize", "admission queue", "call decode pod", "respond"]
APART = [
    "enter engine",
    "reserve blocks",
    "call prefill pod",
    "KV transfer",
    "adopt blocks",
    "decode",
    "release",
]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """All processes of the test send their spans to it."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def body(num_tokens: int, **fields: object) -> dict[str, object]:
    prompt = prompt_of(num_tokens)
    return {"prompt": prompt, "max_tokens": 24, "ignore_eos": True, "temperature": 0.0, **fields}


def below(collector: Collector, parent: Span, name: str) -> Span:
    """The child of that name."""
    (span,) = [span for span in collector.children(parent) if span.name == name]
    return span


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_one_trace_through_all_pods(tiny_model: Path, collector: Collector, is_streamed: bool) -> None:
    async with (
        run_fleet(tiny_model) as fleet,
        front_door(tiny_model, (fleet.decode_target,), (fleet.prefill_target,)) as (http, _),
    ):
        headers = {"traceparent": SAMPLED}
        answer = await http.post("/v1/completions", json=body(200, stream=is_streamed), headers=headers)
        assert answer.status_code == 200
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        metrics = (await http.get("/metrics", headers=accept)).text
    assert {span.trace_id for span in collector.spans()} == {TRACE_ID}
    (root,) = [span for span in collector.spans() if span.parent_id == SPAN_ID]
    assert (root.service, root.instance, root.kind) == ("tandem-gateway", "g-0", SERVER)
    assert collector.names_below(root) == GATEWAY_STAGES
    call = below(collector, root, "call decode pod")
    decode = below(collector, call, "decode pod")
    assert (call.kind, decode.service, decode.instance) == (CLIENT, "tandem-decode", "d0")
    assert collector.names_below(decode) == APART
    prefill = below(collector, below(collector, decode, "call prefill pod"), "prefill pod")
    assert (prefill.service, prefill.instance) == ("tandem-prefill", "p0")
    assert collector.names_below(prefill) == ["queue", "prefill", "send KV", "release"]
    collector.assert_stages_add_up()
    assert {span.status for span in collector.spans()} == {0}
    assert root.attributes["gen_ai.operation.name"] == "text_completion"
    assert root.attributes["gen_ai.usage.input_tokens"] == 200
    assert root.attributes["gen_ai.usage.output_tokens"] == 24
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert root.attributes["http.response.status_code"] == 200
    e2e_s = root.attributes["gen_ai.latency.e2e"]
    assert isinstance(e2e_s, float)
    assert 0 < e2e_s <= root.length_ns / 1e9
    assert below(collector, decode, "decode").attributes["tandem.decode.tokens"] == 24
    transfer = below(collector, decode, "KV transfer")
    assert transfer.attributes["tandem.kv.received_bytes"] == prefill.attributes["tandem.kv.sent_bytes"]
    for name in ("ttft", "e2e"):
        lines = [line for line in metrics.splitlines() if line.startswith(f"tandem_{name}_seconds_bucket")]
        assert sum(f'trace_id="{TRACE_ID}"' in line for line in lines) == 1


@pytest.mark.parametrize("fields", [{"n": 3}, {"n": 3, "use_beam_search": True}])
async def test_the_span_counts_all_choices(
    tiny_model: Path, collector: Collector, fields: dict[str, object]
) -> None:
    async with run_fleet(tiny_model) as fleet, front_door(tiny_model, (fleet.decode_target,)) as (http, _):
        answer = await http.post("/v1/completions", json=body(20, **fields), headers={"traceparent": SAMPLED})
        assert answer.status_code == 200, answer.text
    (root,) = [span for span in collector.spans() if span.parent_id == SPAN_ID]
    assert root.attributes["gen_ai.request.choice.count"] == 3
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"] * 3
    assert root.attributes["gen_ai.usage.input_tokens"] == 20
    assert root.attributes["gen_ai.usage.output_tokens"] == answer.json()["usage"]["completion_tokens"]


async def test_grpc_metadata_carry_the_context_and_texts_stay_out(
    tiny_model: Path, collector: Collector
) -> None:
    async with run_fleet(tiny_model) as fleet, front_door(tiny_model, (fleet.decode_target,)) as (http, stub):
        text = "confidential" * 10
        message = gateway_pb2.GenerateRequest(text=text)
        message.sampling.max_tokens = 24
        message.sampling.ignore_eos = True
        message.sampling.stop.append("never-in-the-answer")
        call = stub.Generate(message, metadata=(("traceparent", SAMPLED),))
        words = "".join([response.chunk.text async for response in call])
        # Refused after the span has begun; the message quotes the field.
        refused = await http.post("/v1/completions", json=body(5, prompt=text, model="no-such-model"))
        assert refused.status_code == 404
    (root,) = [span for span in collector.spans() if span.parent_id == SPAN_ID]
    assert {span.trace_id for span in collector.children(root)} == {TRACE_ID}
    assert collector.names_below(root) == GATEWAY_STAGES
    decode = below(collector, below(collector, root, "call decode pod"), "decode pod")
    assert collector.names_below(decode) == ["enter engine", "queue", "prefill", "decode", "release"]
    collector.assert_stages_add_up()
    assert len(words) > 8
    for secret in (text, words, "never-in-the-answer", "no-such-model"):
        assert secret.encode() not in collector.payload
    (failed,) = [span for span in collector.spans() if span.kind == SERVER and span.status == ERROR]
    assert failed.attributes["error.type"] == "model_not_found"


async def test_what_the_client_does_not_sample_is_not_recorded(
    tiny_model: Path, collector: Collector
) -> None:
    async with (
        run_fleet(tiny_model) as fleet,
        front_door(tiny_model, (fleet.decode_target,), (fleet.prefill_target,)) as (http, _),
    ):
        headers = {"traceparent": NOT_SAMPLED}
        assert (await http.post("/v1/completions", json=body(200), headers=headers)).status_code == 200
    assert collector.spans() == []


async def test_a_prefill_pod_that_fails_is_in_the_trace_with_the_cause(
    tiny_model: Path, collector: Collector
) -> None:

    async with run_fleet(tiny_model) as fleet:
        targets = ["127.0.0.1:9", fleet.prefill_target]
        metadata = (("traceparent", SAMPLED),)
        for number, prefill_targets in enumerate((targets, targets[:1])):
            message = request(f"r{number}", prompt_of(200, start=number), prefill_targets)
            async for _ in fleet.decode.Decode(message, metadata=metadata):
                pass
    first, second = collector.named("decode pod")
    calls = [span for span in collector.children(first) if span.name == "call prefill pod"]
    assert [(call.status, call.attributes["server.port"]) for call in calls] == [
        (ERROR, 9),
        (0, int(fleet.prefill_target.rpartition(":")[2])),
    ]
    assert calls[0].attributes["error.type"] == "unreachable"
    assert first.status == 0, "the request went on"
    assert collector.names_below(second) == [
        "enter engine", "reserve blocks", "call prefill pod", "adopt blocks", "queue", "prefill", "decode",
        "release",
    ]  # fmt: skip
    collector.assert_stages_add_up()


async def test_an_answer_that_moves_to_another_pod_shows_both(tiny_model: Path, collector: Collector) -> None:
    async with AsyncExitStack() as stack:
        servers = {}
        for name in ("d0", "d1"):
            settings = DecodeSettings(
                model=tiny_model, pod_id=name, local_prefill_tokens=32, idle_prefill_tokens=0, drain_s=60.0,
                speculation="local", **SIZES,
            )  # fmt: skip
            server = await stack.enter_async_context(open_decode(settings))
            servers[f"127.0.0.1:{server.port}"] = (name, server)
        http, stub = await stack.enter_async_context(front_door(tiny_model, tuple(servers)))
        message = gateway_pb2.GenerateRequest()
        message.token_ids.ids.extend(prompt_of(200))
        message.sampling.max_tokens = 700
        message.sampling.ignore_eos = True
        call = stub.Generate(message, metadata=(("traceparent", SAMPLED),))
        responses = aiter(call)
        await anext(responses)
        pods = (await http.get("/fleet")).json()["pods"]
        (busy,) = [pod["target"] for pod in pods if pod["status"]["usage"]["streams_open"]] or [""]
        if not busy:  # the poll is older than the request

            async def is_busy() -> bool:
                nonlocal busy
                pods = (await http.get("/fleet")).json()["pods"]
                busy = next((pod["target"] for pod in pods if pod["status"]["usage"]["streams_open"]), "")
                return bool(busy)

            await until_async(is_busy)
        left, server = servers[busy]
        stopping = asyncio.create_task(server.stop())
        num_tokens = 1 + sum([len(response.chunk.token_ids) async for response in responses])
        await stopping
    assert num_tokens >= 700
    (root,) = [span for span in collector.spans() if span.parent_id == SPAN_ID]
    first, second = [span for span in collector.children(root) if span.name == "call decode pod"]
    assert (first.status, first.attributes["error.type"]) == (ERROR, "draining")
    assert (second.status, second.attributes["tandem.decode.retries"]) == (0, 1)
    begun, ended = below(collector, first, "decode pod"), below(collector, second, "decode pod")
    assert begun.instance == left != ended.instance
    assert begun.attributes["tandem.outcome"] == "cancelled"
    source = below(collector, below(collector, ended, "call prefill pod"), "prefill pod")
    assert source.instance == left, "the KV came from the pod that drained"
    assert root.status == 0
    collector.assert_stages_add_up()


async def test_the_trace_reaches_the_lookahead_service(
    tiny_model: Path, collector: Collector, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        redis = RedisServer(tmp_path)
        await redis.start()
        stack.push_async_callback(redis.stop)
        lookahead = LookaheadPod(LookaheadSettings(port=0, redis_url=redis.url, drain_s=2.0, pod_id="la"))
        await lookahead.start()
        stack.push_async_callback(lookahead.close)
        stack.push_async_callback(lookahead.server.stop)
        settings = DecodeSettings(
            model=tiny_model, pod_id="d0", lookahead=f"127.0.0.1:{lookahead.server.port}", **SIZES
        )
        server = await stack.enter_async_context(open_decode(settings))
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(f"127.0.0.1:{server.port}"))
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        async for _ in stub.Decode(request("r", prompt_of(40), []), metadata=(("traceparent", SAMPLED),)):
            pass

        async def is_merged() -> bool:
            value = lookahead.server.registry.get_sample_value("tandem_lookahead_tokens_merged_total")
            return value == 24

        await until_async(is_merged)
    stored = collector.only("lookahead service")
    assert stored.trace_id == TRACE_ID
    assert stored.parent_id == collector.only("decode").span_id, "it stores what was decoded"
    collector.assert_stages_add_up()
