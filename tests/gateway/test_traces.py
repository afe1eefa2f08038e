"""What the gateway's span of a call says: the stages of answers that outlive calls, refusals, clients that
leave."""

import asyncio
from collections.abc import Iterator

import pytest
from otlp_collector import ERROR, Collector, Span, collecting
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


async def test_an_answer_with_a_key_is_computed_on_when_its_client_leaves(collector, pods, gateway):
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
    collector.assert_stages_add_up()


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
