"""Load generation end to end against real servers with fake answers: gRPC from the real proto, and HTTP."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fake_gateway import Answer, FakeGateway
from tandem_cli.bench.loadgen import ClosedLoop, OpenLoop, run_load
from tandem_cli.bench.options import BenchError, BenchOptions
from tandem_cli.bench.record import OK, TIMEOUT, RequestRecord
from tandem_cli.bench.run import make_prompts, run_bench
from tandem_cli.bench.transports import GrpcTransport, HttpTransport, Transport
from tandem_proto.v1 import common_pb2
from waiting import until

OPTIONS = BenchOptions(model="m", max_tokens=6, seed=3, ignore_eos=True, api_key="secret")


#: Three messages of 1, 3 and 2 tokens.
ANSWER = Answer(
    ("x", "xxx", "xx"),
    common_pb2.Receipt(prompt_tokens=40, output_tokens=6, decode_steps=2, accepted_by_source={"prompt": 3}),
)
CONFIG = BenchOptions(concurrency="2", num_requests=5, model="", max_tokens=6, timeout=20.0)


async def load(
    transport: Transport, schedule: ClosedLoop | OpenLoop, num_requests: int, timeout_s: float = 20.0
) -> list[RequestRecord]:
    prompts = make_prompts(replace(CONFIG, num_requests=num_requests), "retail")
    try:
        return await run_load(transport, prompts, schedule, timeout_s=timeout_s, on_done=lambda _: None)
    finally:
        await transport.close()


async def test_grpc_notes_first_token_gaps_tokens_and_the_receipt() -> None:
    with FakeGateway(ANSWER, pause_s=0.02).serving() as gateway:
        (record,) = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(1), 1)
    assert record.status == OK
    assert record.text == "xxxxxx"
    assert (record.prompt_tokens, record.output_tokens) == (40, 6)
    assert record.ttft_s is not None
    assert 0.02 <= record.ttft_s < record.e2e_s
    assert len(record.gaps_s) == 2
    assert sum(record.gaps_s) >= 0.035
    assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 5)
    assert record.speculation is not None
    assert record.speculation.accepted_by_source == {"prompt": 3}
    (request,) = gateway.requests
    assert (request.sampling.max_tokens, request.sampling.seed, request.sampling.ignore_eos) == (6, 3, True)
    assert request.messages[0].role == "system"
    assert gateway.keys == ["Bearer secret"]


async def test_a_closed_loop_keeps_its_concurrency_and_sends_all() -> None:
    with FakeGateway(ANSWER, pause_s=0.02).serving() as gateway:
        records = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(3), 8)
    assert gateway.most_running == 3
    assert [record.index for record in records] == list(range(8))


def test_an_open_loop_departs_at_its_rate_and_repeats_with_its_seed() -> None:
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
        assert departure_s <= record.sent_s < departure_s + 0.15


async def test_refusals_are_recorded_with_their_status() -> None:
    with FakeGateway(ANSWER, refuse_each=2).serving() as gateway:
        records = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(1), 4)
    assert [record.status for record in records] == [OK, "RESOURCE_EXHAUSTED", OK, "RESOURCE_EXHAUSTED"]
    assert records[1].error == "queue is full"
    assert records[1].ttft_s is None


async def test_the_time_limit_cancels_what_runs_and_sends_nothing_more() -> None:
    with FakeGateway(ANSWER, pause_s=5.0).serving() as gateway:
        records = await load(GrpcTransport(gateway.target, OPTIONS), ClosedLoop(2), 6, timeout_s=0.3)
        assert [record.status for record in records] == [TIMEOUT, TIMEOUT]
        await until(lambda: gateway.cancelled == 2)


async def test_a_gateway_that_is_not_there_fails_each_request() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        records = await load(GrpcTransport(target, OPTIONS), ClosedLoop(1), 2)
    assert {record.status for record in records} == {"UNAVAILABLE"}


class FakeOpenAI(BaseHTTPRequestHandler):
    """Streams two pieces of text and a usage chunk; refuses the model "unknown"."""

    bodies: list[dict[str, object]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if body["model"] == "unknown":
            self.send_error(404, "no such model")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        receipt = {
            "decode_steps": 2,
            "drafted_tokens": 9,
            "accepted_tokens": 3,
            "accepted_by_source": {"a": 3},
            "drafted_by_source": {"a": 9},
        }
        usage = {"prompt_tokens": 40, "completion_tokens": 6, "tandem_receipt": receipt}
        events: list[object] = [
            {"choices": [{"delta": {"role": "assistant"}}]},
            {"choices": [{"delta": {"content": "He"}}]},
            {"choices": [{"delta": {"content": "llo"}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        for event in events:
            self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def openai_server() -> Iterator[tuple[str, list[dict[str, object]]]]:
    bodies: list[dict[str, object]] = []
    handler = type("Handler", (FakeOpenAI,), {"bodies": bodies})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", bodies
    server.shutdown()
    server.server_close()


async def test_http_reads_events_usage_and_receipt(
    openai_server: tuple[str, list[dict[str, object]]],
) -> None:
    url, bodies = openai_server
    (record,) = await load(HttpTransport(url, OPTIONS), ClosedLoop(1), 1)
    assert (record.status, record.text) == (OK, "Hello")
    assert (record.prompt_tokens, record.output_tokens) == (40, 6)
    assert len(record.gaps_s) == 1
    assert record.speculation is not None
    assert record.speculation.accepted_by_source == {"a": 3}
    assert (record.speculation.decode_steps, record.speculation.drafted_tokens) == (2, 9)
    assert bodies[0]["stream_options"] == {"include_usage": True}
    assert bodies[0]["slo_class"] == "interactive"


async def test_http_sends_extra_fields_and_removes_those_set_to_none(
    openai_server: tuple[str, list[dict[str, object]]],
) -> None:
    url, bodies = openai_server
    await load(HttpTransport(url, OPTIONS, "local", {"ignore_eos": None, "top_k": 1}), ClosedLoop(1), 1)
    assert "ignore_eos" not in bodies[0]
    assert (bodies[0]["top_k"], bodies[0]["speculation"]) == (1, "local")


async def test_http_errors_are_recorded_with_their_code(
    openai_server: tuple[str, list[dict[str, object]]],
) -> None:
    (record,) = await load(
        HttpTransport(openai_server[0], replace(OPTIONS, model="unknown")), ClosedLoop(1), 1
    )
    assert record.status == "HTTP 404"
    assert "no such model" in record.error


def test_a_whole_run_writes_json_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with FakeGateway(Answer(("a",), common_pb2.Receipt(output_tokens=1))).serving() as gateway:
        options = replace(CONFIG, target=gateway.target, api_key="secret")
        (run,) = run_bench(replace(options, output=tmp_path / "run.json", plot=tmp_path / "run.png"))
    assert (run.summary.num_sent, run.summary.num_ok, run.summary.attainment) == (5, 5, 1.0)
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["summary"]["num_ok"] == 5
    assert written["config"]["concurrency"] == "2"
    assert "secret" not in (tmp_path / "run.json").read_text()
    assert len(written["requests"]) == 5
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    assert "attainment  100.0% of all sent (interactive)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (replace(CONFIG, slo_class="gold"), "slo-class 'gold'"),
        (replace(CONFIG, policy=Path("/nonexistent/p.md")), "--policy"),
        (replace(CONFIG, concurrency=None), "either --rate or --concurrency"),
    ],
)
def test_a_configuration_that_makes_no_run_is_refused_first(config: BenchOptions, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        run_bench(config)


def test_a_file_in_a_missing_folder_is_refused_before_the_run(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="does not exist"):
        run_bench(replace(CONFIG, output=tmp_path / "no" / "x.json"))
