"""Comparisons: the order of the modes, and how the figures of the rounds become one row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from fake_gateway import Answer, FakeGateway
from tandem_cli.bench.options import BenchError, BenchOptions, Point
from tandem_cli.bench.record import OK, RequestRecord, Speculation
from tandem_cli.bench.records_file import read_runs
from tandem_cli.bench.report import comparison_table
from tandem_cli.bench.run import run_bench
from tandem_cli.bench.stats import Run, summarise
from tandem_cli.main import app
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_proto.v1 import common_pb2
from typer.testing import CliRunner

INTERACTIVE = DEFAULT_SLO_CLASSES["interactive"]
MODES = ("off", "local", "global")
OPTIONS = BenchOptions(
    concurrency="1,2", speculation="off,local,global", workload="json", num_requests=2, model="",
    max_tokens=6, timeout=20.0,
)  # fmt: skip


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """`local` accepts two guesses a step, `global` writes another text, `chain` is refused."""
    plain = common_pb2.Receipt(output_tokens=4, decode_steps=3)
    drafted = common_pb2.Receipt(
        output_tokens=4, decode_steps=1, drafted_tokens=8, accepted_tokens=2, hit_steps=1,
        accepted_by_source={"prompt": 2},
    )  # fmt: skip
    by_mode = {
        "local": Answer(("yyyy",), drafted),
        "global": Answer(("xxxx",), plain),
        "chain": Answer(failure=(grpc.StatusCode.INVALID_ARGUMENT, "speculation: not today")),
    }
    with FakeGateway(Answer(("yyyy",), plain), by_mode).serving() as gateway:
        yield gateway


def test_modes_take_turns_on_the_same_prompts_and_no_mode_sees_one_twice(gateway: FakeGateway) -> None:
    runs = run_bench(replace(OPTIONS, target=gateway.target, api_key="bench-{speculation}"))
    order = [[run.system for run in runs if (run.point.concurrency, run.round) == (1, n)] for n in range(3)]
    assert order == [["off", "local", "global"], ["local", "global", "off"], ["global", "off", "local"]]
    assert [run.point.concurrency for run in runs] == [1] * 9 + [2] * 9
    warm_up, asked = gateway.requests[:3], gateway.requests[3:]
    assert [request.speculation for request in warm_up] == list(MODES)
    assert set(gateway.keys) == {f"Bearer bench-{mode}" for mode in MODES}
    prompts = [sorted(r.messages[-1].content for r in asked if r.speculation == mode) for mode in MODES]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(set(prompts[0])) == len(prompts[0]) == 2 * 3 * 2, "requests, rounds, loads"


def test_a_mode_that_is_refused_is_named_before_the_run(gateway: FakeGateway) -> None:
    options = replace(OPTIONS, target=gateway.target, speculation="off,chain")
    with pytest.raises(
        BenchError, match="first request to chain failed: INVALID_ARGUMENT: speculation: not today"
    ):
        run_bench(options)
    assert [request.speculation for request in gateway.requests] == ["off", "chain"]


def run_of(mode: str, number: int, tpot_s: float, *, ttft_s: float = 1.0, steps: int = 10) -> Run:
    """One request of 11 tokens; mode `other` has a different text."""
    figures = Speculation(steps, 20, 11 - 1 - steps, {"prompt": 10 - steps}, 3)
    text, e2e_s = "b" if mode == "other" else "a", ttft_s + 10 * tpot_s
    record = RequestRecord(0, "d", OK, "", 0.0, ttft_s, e2e_s, (), 100, 11, text, figures, slo=INTERACTIVE)
    return Run(Point("json", 4), number, mode, summarise([record]), (record,))


def rows(table: str) -> list[dict[str, str]]:
    head, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(head, line, strict=True)) for line in lines]


def test_ratios_are_formed_within_rounds_and_shown_as_median_and_range() -> None:
    """The machine is ten times slower in the second round; the ratio of the modes is not affected."""
    off, fast = (0.01, 0.1, 0.02), (0.005, 0.06, 0.01)
    runs = [run_of("off", n, s) for n, s in enumerate(off)]
    runs += [run_of("local", n, s, steps=5) for n, s in enumerate(fast)]
    first, second = rows(comparison_table(runs))
    assert (first["system"], second["system"]) == ("off", "local")
    assert first["TPOT ratio"] == "1.000 (1.00 to 1.00)"
    assert second["TPOT ratio"] == "0.500 (0.50 to 0.60)"
    assert (second["TPOT ms"], second["MAT"], second["token hit rate"]) == ("10.0", "2.00", "0.250")


def test_texts_that_differ_are_counted() -> None:
    runs = [run_of("off", 0, 0.01), run_of("local", 0, 0.01), run_of("other", 0, 0.01)]
    assert [row["same text"] for row in rows(comparison_table(runs))] == ["1 of 1", "1 of 1", "0 of 1"]


def test_without_goodput_of_the_first_mode_there_is_no_ratio_of_it() -> None:
    first, second = rows(comparison_table([run_of("off", 0, 0.01, ttft_s=9.0), run_of("local", 0, 0.01)]))
    assert first["goodput tokens/s"] == "0.0"
    assert (first["goodput ratio"], second["goodput ratio"]) == ("-", "-")


def test_a_mode_has_a_key_of_its_own_where_the_key_names_it() -> None:
    assert replace(OPTIONS, api_key="bench-{speculation}").key_for("off") == "bench-off"
    assert (replace(OPTIONS, api_key="k").key_for("off"), OPTIONS.key_for("off")) == ("k", None)


def test_a_comparison_is_printed_and_written(gateway: FakeGateway, tmp_path: Path) -> None:
    options = replace(OPTIONS, target=gateway.target, rounds=1)
    runs = run_bench(replace(options, output=tmp_path / "c.jsonl", report=tmp_path / "c.md"))
    assert len(runs) == 6
    table = rows((tmp_path / "c.md").read_text().partition("\n\n")[2].rstrip())
    assert len(table) == 6
    assert [table[1][name] for name in ("workload", "concurrency", "system")] == ["json", "1", "local"]
    assert (table[1]["MAT"], table[1]["token hit rate"]) == ("3.00", "0.250")
    assert [row["same text"] for row in table[:3]] == ["2 of 2", "2 of 2", "0 of 2"]
    assert read_runs(tmp_path / "c.jsonl") == runs
    config = json.loads((tmp_path / "c.jsonl").read_text().splitlines()[0])["config"]
    assert config["speculation"] == "off,local,global"


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    return result.exit_code, result.output


def test_the_command_compares_where_several_values_are_given(gateway: FakeGateway) -> None:
    common = ("--target", gateway.target, "--num-requests", "1", "--model", "")
    code, output = run(*common, "--concurrency", "1", "--speculation", "off,local", "--rounds", "1")
    assert code == 0
    assert output.count("| retail | 1 |") == 2
    code, output = run(*common, "--concurrency", "1", "--speculation", "local", "--workload", "faq")
    assert code == 0
    assert "speculation 3.00 tokens per step; a guess accepted in 100% of steps" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--concurrency", "1,x"), "--concurrency '1,x': give whole numbers from 1 to"),
        (("--concurrency", "0"), "--concurrency '0': give whole numbers"),
        (
            ("--concurrency", "1", "--speculation", "forest"),
            "'forest' is unknown; use off, local, chain, global",
        ),
        (("--concurrency", "1", "--workload", "poems"), "'poems' is unknown; use retail, random"),
        (("--concurrency", "1,4", "--plot", "x.png"), "--plot shows one run"),
        (("--concurrency", "1", "--rate", "1"), "either --rate or --concurrency"),
        (("--concurrency", "1,2", "--slo-class", "gold"), "'gold' is unknown"),
        (("--concurrency", "1,2", "--report", "no/such/x.md"), "does not exist"),
    ],
)
def test_what_makes_no_benchmark_is_refused_in_one_sentence(
    arguments: tuple[str, ...], complaint: str
) -> None:
    code, output = run("--target", "127.0.0.1:1", *arguments)
    assert code == 2
    assert complaint in " ".join(output.split())
