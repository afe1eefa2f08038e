"""The gateway's span of a call: answers that outlive calls, refusals, clients that disconnect."""

import asyncio
from collections.abc import Iterator

import grpc
import pytest
from otlp_collector import ERROR, Collector, Span, collecting
from tandem_proto.v1 import common_pb2, gateway_pb2
from waiting import until_async

BODY = {"prompt": "hi"}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        yield collector


def roots(collector: Collector) -> list[Span]:
    return [span for span in collector.spans() if not span.parent_id]


async def test_a_repeated_request_reads_the_answer_of_the_first(collector, pods, gateway):
    front = await gateway(await pods())
    for _ in range(2):
        await front.http.post("/v1/completions", json=BODY, headers={"idempotency-key": "k"})
    await front.process.stop()
    first, second = roots(collector)
    assert collector.names_below(first) == [
        "receive", "look up answer", "tokenize", "store answer", "admission queue", "call decode pod",
        "respond",
    ]  # fmt: skip
    assert collector.names_below(second) == ["receive", "look up answer", "read answer"]
    collector.assert_stages_add_up()


async def test_the_trace_of_an_answer_with_a_key_continues_when_its_client_leaves(collector, pods, gateway):
    pod = await pods(pause_s=0.3)
    front = await gateway(pod)
    headers = {"idempotency-key": "k"}
    call = asyncio.create_task(front.http.post("/v1/completions", json=BODY, headers=headers))
    await pod.started.wait()
    call.cancel()
    await asyncio.wait({call})
    await until_async(lambda: _is(front, 'tandem_requests_total{outcome="ok"}', 1))
    await front.process.stop()
    (root,) = roots(collector)
    assert collector.names_below(root)[-1] == "call decode pod"
    assert collector.only("call decode pod").end_ns > root.end_ns


async def test_a_client_that_leaves_ends_its_trace(collector, pods, gateway):
    pod = await pods(pause_s=60.0)
    front = await gateway(pod)
    call = asyncio.create_task(front.http.post("/v1/completions", json=BODY))
    await pod.started.wait()
    call.cancel()
    await asyncio.wait({call})
    await until_async(lambda: _is(front, 'tandem_requests_total{outcome="cancelled"}', 1))
    await front.process.stop()
    (root,) = roots(collector)
    assert (root.status, root.attributes["tandem.outcome"]) == (0, "cancelled")
    assert "tandem.slo.met" not in root.attributes, "it left in time"
    assert root.attributes["gen_ai.usage.output_tokens"] in (0, 1)
    collector.assert_stages_add_up()


async def test_the_trace_of_two_prompts_has_the_usage_of_both(collector, pods, gateway):
    front = await gateway(await pods(cached_tokens=1))
    answer = (await front.http.post("/v1/completions", json={"prompt": ["hi", "the order"], "n": 2})).json()
    await front.process.stop()
    (root,) = roots(collector)
    usage, receipts = answer["usage"], answer["usage"]["tandem_receipts"]
    assert root.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert root.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2
    last_s = max(receipt["e2e_ns"] for receipt in receipts) / 1e9
    assert root.attributes["gen_ai.latency.e2e"] == pytest.approx(last_s)
    assert root.attributes["tandem.slo.met"] is True


async def test_the_traces_of_a_miss_and_a_refusal_have_the_reason(collector, pods, gateway):
    front = await gateway(await pods(pause_s=0.05, step_s=0.01), slo_slack=0.0)
    late = {"x-slo-ttft-ms": "0.001"}
    assert (await front.http.post("/v1/completions", json=BODY, headers=late)).status_code == 200
    refused = await front.http.post("/v1/completions", json=BODY, headers={**late, "x-slo-strict": "true"})
    assert refused.status_code == 429
    assert refused.headers["x-should-retry"] == "false"
    assert "retry-after" not in refused.headers
    with pytest.raises(grpc.aio.AioRpcError) as info:
        slo = common_pb2.SloTarget(ttft_ns=1000, strict=True)
        async for _ in front.grpc.Generate(gateway_pb2.GenerateRequest(text="hi", slo=slo)):
            pass
    assert dict(info.value.trailing_metadata())["refusal-reason"] == "ttft"
    assert "retry-after-ms" not in dict(info.value.trailing_metadata())
    await front.process.stop()
    missed, root, _ = sorted(roots(collector), key=lambda span: span.status)
    assert missed.attributes["tandem.slo.met"] is False
    assert missed.attributes["tandem.slo.miss_reason"].startswith("ttft")
    assert missed.attributes["tandem.slo.miss_cause"] == "other"
    assert root.attributes["tandem.refusal.reason"] == "ttft"
    assert root.attributes["tandem.slo.met"] is False


async def test_a_refusal_names_its_stage_and_a_caller_without_a_key_has_no_trace(
    collector, pods, gateway, keys_file
):
    front = await gateway(await pods(), api_keys_file=keys_file)
    assert (await front.http.post("/v1/completions", json=BODY)).status_code == 401
    headers = {"authorization": "Bearer acme-key"}
    too_long = {"prompt": "the order " * 400}
    assert (await front.http.post("/v1/completions", json=too_long, headers=headers)).status_code == 400
    await front.process.stop()
    (root,) = roots(collector)
    assert (root.status, root.attributes["error.type"]) == (ERROR, "context_length_exceeded")
    assert root.attributes["http.response.status_code"] == 400
    receive, tokenize = collector.children(root)
    assert (receive.name, receive.status) == ("receive", 0)
    assert (tokenize.name, tokenize.status) == ("tokenize", ERROR)


async def _is(front, sample: str, value: float) -> bool:
    return await front.metric(sample) == value
