"""A run from its options to its report, and the report again from the records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_gateway import Answer, FakeGateway
from fake_openai import FakeOpenAI
from tandem_cli.bench.options import BenchOptions, Point
from tandem_cli.bench.run import run_bench
from tandem_cli.main import app
from tandem_core.speculation import SpeculationMode
from tandem_proto.v1 import common_pb2
from typer.testing import CliRunner

ANSWER = Answer(("x", "xx"), common_pb2.Receipt(prompt_tokens=9, output_tokens=3))
OPTIONS = BenchOptions(model="", rate=60.0, num_requests=6, workload="random", max_tokens=6, timeout=30.0)


def rows(table: str) -> list[dict[str, str]]:
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_requests_have_the_options_of_the_run() -> None:
    with FakeGateway(ANSWER).serving() as gateway:
        options = replace(
            OPTIONS, target=gateway.target, speculation=SpeculationMode.LOCAL, slo_ttft_ms=30_000.0
        )
        run = run_bench(options)
    assert run.point.rate == 60
    assert (run.summary.num_ok, run.summary.attainment) == (6, 1.0)
    assert {request.speculation for request in gateway.requests} == {"local"}
    assert {request.slo.ttft_ns for request in gateway.requests} == {30 * 10**9}
    assert len({request.messages[-1].content for request in gateway.requests}) == 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--concurrency", "x"), "Invalid value for '--concurrency'"),
        (("--concurrency", "0"), "Invalid value for '--concurrency'"),
        (("--rate", "0"), "Invalid value for '--rate'"),
        (("--concurrency", "1", "--workload", "poems"), "'poems' is unknown; use retail, random"),
        (("--concurrency", "1", "--rate", "1"), "either --rate or --concurrency"),
        (("--concurrency", "1", "--slo-class", "gold"), "'gold' is unknown"),
        (("--concurrency", "1", "--report", "no/such/x.md"), "does not exist"),
    ],
)
def test_invalid_options_are_refused_in_one_sentence(arguments: tuple[str, ...], complaint: str) -> None:
    result = CliRunner().invoke(app, ["bench", "serve", "--target", "127.0.0.1:1", *arguments])
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


def test_the_command_prints_draft_figures() -> None:
    drafted = common_pb2.Receipt(
        output_tokens=4, decode_steps=1, drafted_tokens=8, accepted_tokens=2, hit_steps=1,
        accepted_by_source={"prompt": 2},
    )  # fmt: skip
    with FakeGateway(Answer(("yyyy",), drafted)).serving() as gateway:
        common = ["bench", "serve", "--target", gateway.target, "--num-requests", "1", "--model", ""]
        result = CliRunner().invoke(app, [*common, "--concurrency", "1", "--workload", "random"])
    assert result.exit_code == 0
    assert "speculation 3.00 tokens per step; a draft token accepted in 100% of steps" in result.output


def test_classes_and_tenants_have_rows_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeGateway(ANSWER, refuse_each=3, retry_after_ms=5).serving() as gateway:
        options = replace(
            OPTIONS,
            target=gateway.target,
            num_requests=30,
            mix="chat=1,batch=1",
            tenants="a=KEY-A,b=KEY-B",
            honour_retry_after=1,
            output=tmp_path / "r.jsonl",
        )
        run = run_bench(options)
    assert {request.slo_class for request in gateway.requests} == {"chat", "batch"}
    assert set(gateway.keys) == {"Bearer KEY-A", "Bearer KEY-B"}
    sent_again = sum(len(record.attempts) > 1 for record in run.records)
    assert sent_again >= 5
    assert len(gateway.requests) == 30 + sent_again
    printed = capsys.readouterr().out
    for part in (
        "retry-after honoured",
        "fairness    Jain's index over tenants",
        "TTFT from the last attempt",
    ):
        assert part in printed
    groups = rows(printed[printed.index("| class or tenant") :])
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
    result = CliRunner().invoke(app, ["bench", "report", str(records), "--report", str(tmp_path / "r.md")])
    assert (result.exit_code, result.stdout) == (0, first)
    assert (tmp_path / "r.md").read_text() == first


def test_a_trace_is_replayed_with_its_classes(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text(
        '{"arrival_s": 0, "output_tokens": 2, "slo_class": "chat"}\n'
        '{"arrival_s": 0.4, "output_tokens": 3, "slo_class": "batch"}\n'
    )
    with FakeGateway(ANSWER).serving() as gateway:
        options = replace(OPTIONS, target=gateway.target, rate=None, num_requests=None)
        run = run_bench(replace(options, trace=tmp_path / "t.jsonl", rate_scale=2.0))
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
            transport="http",
            slo_class="chat",
            slo_tpot_ms=900.0,
        )
        run = run_bench(options)
    assert server.headers[0]["x-slo-tpot-ms"] == "900"
    assert server.headers[0]["x-slo-ttft-ms"] == "1000"
    promise = run.records[0].promise
    assert promise is not None
    assert (promise.ttft_s, promise.e2e_s, promise.slo.ttft_s, promise.widened) == (2.0, 3.0, 4.0, True)
    assert (promise.ttft_p50_s, promise.ttft_p90_s, promise.e2e_p50_s) == (None, 2.5, 1.0)


def test_a_file_without_records_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    for text, complaint in (
        ("", "holds no request"),
        ('{"config": {}}\n{"system": 1}\n', "r.jsonl:2: no record"),
    ):
        path.write_text(text)
        result = CliRunner().invoke(app, ["bench", "report", str(path)])
        assert result.exit_code == 2
        assert complaint in " ".join(result.output.split())


def test_a_point_describes_its_load() -> None:
    loads = [Point("random", 4).load(), Point("random", None, 0.5).load(), Point("random").load()]
    assert loads == ["concurrency 4", "0.5 requests/s", "as recorded"]
