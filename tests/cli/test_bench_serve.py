"""Load generation end to end against real servers with fake answers: gRPC from the real proto, and HTTP."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fake_gateway import Answer, FakeGateway
from fake_openai import FakeOpenAI
from tandem_cli.bench.arrivals import ClosedLoop, OpenLoop, Schedule
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchError, BenchOptions
from tandem_cli.bench.record import OK, TIMEOUT, RequestRecord
from tandem_cli.bench.records_file import read_runs
from tandem_cli.bench.run import run_bench
from tandem_cli.bench.transports import GrpcTransport, HttpTransport, Transport
from tandem_cli.bench.workload import RequestMaker
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import common_pb2
from waiting import until

OPTIONS = BenchOptions(model="m", max_tokens=6, seed=3, ignore_eos=True, api_key="secret")


#: Three messages of 1, 3 and 2 tokens.
ANSWER = Answer(
    ("x", "xxx", "xx"),
    common_pb2.Receipt(prompt_tokens=40, output_tokens=6, decode_steps=2, accepted_by_source={"prompt": 3}),
)
CONFIG = BenchOptions(concurrency=2, num_requests=5, model="", max_tokens=6, timeout=20.0)


async def load(
    transport: Transport,
    schedule: Schedule,
    num_requests: int,
    timeout_s: float = 20.0,
    max_retries: int = 0,
    workload: str = "retail",
) -> list[RequestRecord]:
    requests = RequestMaker(replace(CONFIG, num_requests=num_requests)).make(workload)
    try:
        return await run_load(transport, requests, schedule, timeout_s=timeout_s, max_retries=max_retries)
    finally:
        await transport.close()


async def test_grpc_records_first_token_gaps_tokens_and_the_receipt() -> None:
    with FakeGateway(ANSWER, pause_s=0.02).serving() as gateway:
        (record,) = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(1), 1)
    assert record.status == OK
    assert record.text == "xxxxxx"
    assert (record.prompt_tokens, record.output_tokens) == (40, 6)
    assert record.ttft_s is not None
    assert 0.02 <= record.ttft_s < record.e2e_s
    assert len(record.gaps_s) == 2
    assert all(gap_s > 0 for gap_s in record.gaps_s)
    assert record.ttft_s + sum(record.gaps_s) <= record.e2e_s
    assert record.e2e_s >= 0.06, "three chunks, each after a pause"
    assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 5)
    assert record.speculation is not None
    assert record.speculation.accepted_by_source == {"prompt": 3}
    (request,) = gateway.requests
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.ignore_eos) == (6, 3, True)
    assert request.messages[0].role == "system"
    assert gateway.keys == ["Bearer secret"]


async def test_random_answers_do_not_depend_on_the_models_sampling_defaults() -> None:
    with FakeGateway(ANSWER).serving() as gateway, FakeOpenAI().serving() as openai:
        for workload in ("retail", "random"):
            for transport in (GrpcTransport(gateway.target, OPTIONS), HttpTransport(openai.url, OPTIONS)):
                await load(transport, ClosedLoop(1), 1, workload=workload)
    assert [r.sampling.HasField("top_p") for r in gateway.requests] == [False, True]
    assert gateway.requests[1].sampling.top_p == 1.0
    assert [body.get("top_p") for body in openai.bodies] == [None, 1.0]


async def test_a_closed_loop_keeps_its_concurrency_and_sends_all() -> None:
    with FakeGateway(ANSWER, pause_s=0.02).serving() as gateway:
        records = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(3), 8)
    assert gateway.most_running == 3
    assert [record.index for record in records] == list(range(8))


def test_an_open_loop_sends_at_its_rate_and_repeats_with_its_seed() -> None:
    times = OpenLoop(rate=10.0, seed=4).departures_s(2000)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200.0, rel=0.1)
    assert times == OpenLoop(rate=10.0, seed=4).departures_s(2000)
    assert times != OpenLoop(rate=10.0, seed=5).departures_s(2000)


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    with FakeGateway(ANSWER, pause_s=0.2).serving() as gateway:
        records = await load(GrpcTransport(gateway.target, OPTIONS), OpenLoop(rate=200.0, seed=0), 6)
    assert gateway.most_running == 6
    departures = OpenLoop(rate=200.0, seed=0).departures_s(6)
    for record, departure_s in zip(records, departures, strict=True):
        assert departure_s <= record.sent_s
        assert record.late_s == pytest.approx(record.sent_s - departure_s)


async def test_refusals_are_recorded_with_their_status() -> None:
    with FakeGateway(ANSWER, refuse_each=2).serving() as gateway:
        records = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(1), 4)
    assert [record.status for record in records] == [OK, "RESOURCE_EXHAUSTED", OK, "RESOURCE_EXHAUSTED"]
    assert records[1].error == "queue is full"
    assert records[1].ttft_s is None


async def test_a_refused_request_is_sent_again_after_its_retry_after() -> None:
    gateway = FakeGateway(ANSWER, refuse_each=2, retry_after_ms=60)
    with gateway.serving():
        first, second, third = await load(
            GrpcTransport(gateway.target, OPTIONS), ClosedLoop(1), 3, max_retries=1
        )
    assert [len(record.attempts) for record in (first, second, third)] == [1, 2, 2]
    assert [attempt.status for attempt in second.attempts] == ["RESOURCE_EXHAUSTED", OK]
    assert second.attempts[0].retry_after_s == 0.06
    waited_s = second.last_sent_s - second.attempts[0].ended_s
    assert waited_s >= 0.059
    assert second.ttft_s is not None
    assert second.ttft_s > second.last_sent_s > 0.06, "times count from the first sending"
    assert gateway.requests[1].messages == gateway.requests[2].messages


async def test_retries_are_limited_and_need_a_retry_after() -> None:
    gateway = FakeGateway(ANSWER, refuse_each=1, retry_after_ms=1)
    with gateway.serving():
        (record,) = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(1), 1, max_retries=2)
    assert [attempt.status for attempt in record.attempts] == ["RESOURCE_EXHAUSTED"] * 3
    assert record.status == "RESOURCE_EXHAUSTED"
    with FakeGateway(ANSWER, refuse_each=1).serving() as silent:
        (record,) = await load(GrpcTransport(silent.target, OPTIONS), ClosedLoop(1), 1, max_retries=2)
    assert [attempt.retry_after_s for attempt in record.attempts] == [None]


async def test_the_end_of_the_run_ends_the_wait_for_a_retry() -> None:
    with FakeGateway(ANSWER, refuse_each=1, retry_after_ms=60_000).serving() as gateway:
        transport = GrpcTransport(gateway.target, OPTIONS)
        (record,) = await load(transport, ClosedLoop(1), 1, timeout_s=1.5, max_retries=5)
    assert record.status == TIMEOUT
    assert [attempt.status for attempt in record.attempts] == ["RESOURCE_EXHAUSTED"]


async def test_the_time_limit_cancels_running_requests_and_sends_no_more() -> None:
    with FakeGateway(ANSWER, pause_s=5.0).serving() as gateway:
        records = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(2), 6, timeout_s=0.3)
        assert [record.status for record in records] == [TIMEOUT, TIMEOUT]
        await until(lambda: gateway.cancelled == 2)


async def test_each_request_fails_without_a_gateway() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        records = await load(GrpcTransport(target, OPTIONS), ClosedLoop(1), 2)
    assert {record.status for record in records} == {"UNAVAILABLE"}


@pytest.fixture
def openai() -> Iterator[FakeOpenAI]:
    figures = {"decode_steps": 2, "drafted_tokens": 9, "accepted_tokens": 3, "accepted_by_source": {"a": 3}}
    with FakeOpenAI(receipt=figures).serving() as server:
        yield server


async def test_http_reads_events_usage_and_receipt(openai: FakeOpenAI) -> None:
    (record,) = await load(HttpTransport(openai.url, OPTIONS), ClosedLoop(1), 1)
    assert (record.status, record.text) == (OK, "Hello")
    assert (record.prompt_tokens, record.output_tokens) == (40, 6)
    assert len(record.gaps_s) == 1
    assert record.speculation is not None
    assert record.speculation.accepted_by_source == {"a": 3}
    assert (record.speculation.decode_steps, record.speculation.drafted_tokens) == (2, 9)
    assert openai.bodies[0]["stream_options"] == {"include_usage": True}
    assert openai.bodies[0]["slo_class"] == "interactive"


async def test_http_sends_extra_fields_and_removes_those_set_to_none(openai: FakeOpenAI) -> None:
    options = replace(OPTIONS, speculation=SpeculationMode.LOCAL)
    await load(HttpTransport(openai.url, options, {"ignore_eos": None, "top_k": 1}), ClosedLoop(1), 1)
    assert "ignore_eos" not in openai.bodies[0]
    assert (openai.bodies[0]["top_k"], openai.bodies[0]["speculation"]) == (1, "local")


async def test_http_reads_the_retry_after_in_milliseconds_first(openai: FakeOpenAI) -> None:
    transport = HttpTransport(openai.url, replace(OPTIONS, model="busy"))
    (record,) = await load(transport, ClosedLoop(1), 1, max_retries=1)
    assert [attempt.status for attempt in record.attempts] == ["HTTP 429", OK]
    assert record.attempts[0].retry_after_s == 0.02
    assert record.attempts[0].is_refused


async def test_http_errors_are_recorded_with_their_code(openai: FakeOpenAI) -> None:
    (record,) = await load(HttpTransport(openai.url, replace(OPTIONS, model="unknown")), ClosedLoop(1), 1)
    assert record.status == "HTTP 404"
    assert "no such model" in record.error


def test_a_whole_run_writes_its_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway(Answer(("a",), common_pb2.Receipt(output_tokens=1))).serving() as gateway:
        options = replace(CONFIG, target=gateway.target, api_key="secret")
        run = run_bench(replace(options, output=tmp_path / "run.jsonl"))
    assert (run.summary.num_sent, run.summary.num_ok, run.summary.attainment) == (5, 5, 1.0)
    text = (tmp_path / "run.jsonl").read_text()
    assert json.loads(text.splitlines()[0])["config"]["concurrency"] == 2
    assert "secret" not in text
    assert read_runs(tmp_path / "run.jsonl") == [run]
    assert "attainment  100.0% of all sent (interactive)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (replace(CONFIG, slo_class="gold"), "SLO class 'gold'"),
        (replace(CONFIG, policy=Path("/nonexistent/p.md")), "--policy"),
        (replace(CONFIG, concurrency=None), "either --rate or --concurrency, or --trace"),
    ],
)
def test_an_invalid_configuration_is_refused_before_the_run(config: BenchOptions, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        run_bench(config)


def test_a_file_in_a_missing_folder_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="does not exist"):
        run_bench(replace(CONFIG, output=tmp_path / "no" / "x.json"))
