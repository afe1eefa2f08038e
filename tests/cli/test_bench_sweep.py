"""Several rates, systems and classes in one run: tables, curves, and the same again from the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_gateway import Answer, FakeGateway
from fake_openai import FakeOpenAI
from tandem_cli.bench.options import BenchError, BenchOptions, Point, System, TransportName
from tandem_cli.bench.run import run_bench
from tandem_cli.main import app
from tandem_proto.v1 import common_pb2
from typer.testing import CliRunner

ANSWER = Answer(("x", "xx"), common_pb2.Receipt(prompt_tokens=9, output_tokens=3))
OPTIONS = BenchOptions(
    model="", rate="40,80", num_requests=6, workload="json", rounds=2, max_tokens=6, timeout=30.0
)


def rows(table: str) -> list[dict[str, str]]:
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_rates_and_peers_are_one_table_and_one_picture(tmp_path: Path) -> None:
    with FakeGateway(ANSWER).serving() as gateway, FakeOpenAI(model="other").serving() as peer:
        options = replace(
            OPTIONS,
            target=gateway.target,
            peers=f"vLLM={peer.url}/v1",
            api_key="secret",
            slo_ttft_ms=30_000.0,
            report=tmp_path / "r.md",
            plot=tmp_path / "r.png",
        )
        runs = run_bench(options)
    order = [(run.point.rate, run.round, run.system) for run in runs]
    assert order[:4] == [(40, 0, "Tandem"), (40, 0, "vLLM"), (40, 1, "vLLM"), (40, 1, "Tandem")]
    assert len(order) == 8
    table = rows((tmp_path / "r.md").read_text().partition("\n\n")[2].rstrip())
    assert [(row["load"], row["system"]) for row in table] == [
        ("40 requests/s", "Tandem"), ("40 requests/s", "vLLM"),
        ("80 requests/s", "Tandem"), ("80 requests/s", "vLLM"),
    ]  # fmt: skip
    assert {(row["attainment"], row["succeeded"]) for row in table} == {("1.000", "12 of 12")}
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    # A peer gets nothing that only Tandem understands, and no key.
    assert all(body["model"] == "other" and "slo_class" not in body for body in peer.bodies)
    assert not any("authorization" in headers or "x-slo-ttft-ms" in headers for headers in peer.headers)
    assert {request.slo.ttft_ns for request in gateway.requests[1:]} == {30 * 10**9}
    assert set(gateway.keys) == {"Bearer secret"}


def test_classes_and_tenants_have_rows_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeGateway(ANSWER, refuse_each=3, retry_after_ms=5).serving() as gateway:
        options = replace(
            OPTIONS,
            target=gateway.target,
            rate="60",
            num_requests=30,
            mix="chat=1,batch=1",
            tenants="a=KEY-A,b=KEY-B",
            honour_retry_after=1,
            output=tmp_path / "r.jsonl",
        )
        (run,) = run_bench(options)
    assert {request.slo_class for request in gateway.requests} == {"chat", "batch"}
    assert set(gateway.keys) == {"Bearer KEY-A", "Bearer KEY-B"}
    sent_again = sum(len(record.attempts) > 1 for record in run.records)
    assert sent_again >= 5
    assert len(gateway.requests) == 30 + sent_again
    printed = capsys.readouterr().out
    for part in (
        "retry-after honoured",
        "fairness    Jain's index over tenants",
        "TTFT from the last sending",
    ):
        assert part in printed
    groups = rows("\n".join(line for line in printed.splitlines() if line.startswith("|")))
    assert [row["class or tenant"] for row in groups] == [
        "class batch", "class chat", "tenant a", "tenant b",
    ]  # fmt: skip
    assert sum(int(row["sent"]) for row in groups) == 60
    assert "KEY-" not in (tmp_path / "r.jsonl").read_text() + printed


def test_the_report_is_printed_again_from_the_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = tmp_path / "r.jsonl"
    with FakeGateway(ANSWER, refuse_each=5).serving() as gateway:
        run_bench(replace(OPTIONS, target=gateway.target, mix="chat=1,batch=1", output=records))
    first = capsys.readouterr().out
    files = ("--plot", str(tmp_path / "r.png"), "--report", str(tmp_path / "r.md"))
    result = CliRunner().invoke(app, ["bench", "report", str(records), *files])
    assert (result.exit_code, result.stdout) == (0, first)
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "r.md").read_text() == first.replace("\n\n\n", "\n\n")


def test_a_trace_is_replayed_with_its_classes(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"arrival_s": 0, "output_tokens": 2, "slo_class": "chat"}\n'
        '{"arrival_s": 0.4, "output_tokens": 3, "slo_class": "batch"}\n'
    )
    with FakeGateway(ANSWER).serving() as gateway:
        options = replace(OPTIONS, target=gateway.target, rate=None, num_requests=None)
        (run,) = run_bench(replace(options, trace=tmp_path / "t.jsonl", rate_scale=2.0))
    assert [(r.slo_class, r.sampling.max_tokens) for r in gateway.requests] == [("chat", 2), ("batch", 3)]
    first, second = run.records
    assert second.sent_s - first.sent_s >= 0.19


def test_http_sends_the_objectives_and_reads_predictions_of_the_receipt() -> None:
    receipt = {
        "ttft_ns": "2000000000",
        "e2e_ns": "3000000000",
        "slo": {"name": "chat", "ttft_ns": "4000000000"},
        "slo_widened": True,
        "predicted_ttft_p90_ns": "2500000000",
        "predicted_e2e_p50_ns": "1000000000",
    }
    with FakeOpenAI(receipt=receipt).serving() as server:
        options = replace(
            OPTIONS,
            target=server.url,
            model="m",
            rate="50",
            transport=TransportName.HTTP,
            slo_class="chat",
            slo_tpot_ms=900.0,
        )
        (run,) = run_bench(options)
    assert server.headers[0]["x-slo-tpot-ms"] == "900"
    assert server.headers[0]["x-slo-ttft-ms"] == "1000"
    promise = run.records[0].promise
    assert promise is not None
    assert (promise.ttft_s, promise.e2e_s, promise.slo.ttft_s, promise.widened) == (2.0, 3.0, 4.0, True)
    assert (promise.ttft_p50_s, promise.ttft_p90_s, promise.e2e_p50_s) == (None, 2.5, 1.0)


def test_a_peer_is_asked_for_its_model_unless_it_is_given() -> None:
    given = replace(OPTIONS, peers="a=http://h:1#big/model,b=http://h:2/").systems()
    assert given == (
        System("Tandem"), System("a", url="http://h:1", model="big/model"), System("b", url="http://h:2"),
    )  # fmt: skip
    with pytest.raises(BenchError, match=r"--peers b: http://127.0.0.1:1/v1/models names no model"):
        run_bench(replace(OPTIONS, peers="b=http://127.0.0.1:1"))


@pytest.mark.parametrize(
    ("peers", "complaint"),
    [("vLLM", "give NAME=URL"), ("a=ftp://x", "give NAME=URL"), ("a=http://x,a=http://y", "a system twice")],
)
def test_peers_that_cannot_be_asked_are_refused(peers: str, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        replace(OPTIONS, peers=peers).systems()


def test_a_file_that_holds_no_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for text, complaint in (
        ("", "holds no request"),
        ('{"config": {}}\n{"system": 1}\n', "r.jsonl:2: no record"),
    ):
        path.write_text(text)
        result = CliRunner().invoke(app, ["bench", "report", str(path)])
        assert result.exit_code == 2
        assert complaint in " ".join(result.output.split())


def test_a_point_says_its_load() -> None:
    loads = [Point("json", 4).load(), Point("json", None, 0.5).load(), Point("json").load()]
    assert loads == ["concurrency 4", "0.5 requests/s", "as recorded"]
