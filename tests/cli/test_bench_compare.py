"""Modes side by side: who meets what in which order, and how the figures of the rounds become one row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from tandem_cli.bench.compare import ComparisonConfig, Heat, Ratio, key_for, run_comparison, tabulate
from tandem_cli.bench.compare_report import compare
from tandem_cli.bench.record import OK, RequestRecord, Speculation
from tandem_cli.bench.run import BenchConfig, BenchError
from tandem_cli.bench.stats import summarise
from tandem_cli.main import app
from tandem_gateway.slo import SLO_CLASSES
from tandem_proto.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from typer.testing import CliRunner

BASE = BenchConfig(
    target="", transport="grpc", rate=None, concurrency=1, num_requests=2, dataset=None, policy=None,
    input_tokens=None, model="", max_tokens=6, ignore_eos=False, temperature=0.0, seed=0,
    slo_class="interactive", timeout_s=20.0,
)  # fmt: skip
CONFIG = ComparisonConfig(BASE, modes=("off", "local", "global"), workloads=("json",), loads=(1, 2), rounds=3)


class Gateway(gateway_pb2_grpc.GatewayServiceServicer):
    """Answers at once; `local` accepts two guesses a step, `global` writes another text than the others."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []

    def Chat(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        key = dict(context.invocation_metadata()).get("authorization", "")
        self.seen.append((request.speculation, key, request.messages[-1].content))
        if request.speculation == "chain":
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "speculation: not today")
        text = "x" if request.speculation == "global" else "y"
        yield gateway_pb2.ChatResponse(chunk=gateway_pb2.GeneratedChunk(text=text, token_ids=[1, 2, 3, 4]))
        receipt = common_pb2.Receipt(output_tokens=4, decode_steps=3)
        if request.speculation == "local":
            receipt.MergeFrom(
                common_pb2.Receipt(
                    decode_steps=1, drafted_tokens=8, accepted_tokens=2, accepted_by_source={"prompt": 2},
                    hit_steps=1, hit_steps_by_source={"prompt": 1}, drafted_by_source={"prompt": 8},
                )
            )  # fmt: skip
        yield gateway_pb2.ChatResponse(end=gateway_pb2.GeneratedEnd(receipt=receipt))


@pytest.fixture
def gateway() -> Iterator[tuple[Gateway, str]]:
    servicer = Gateway()
    server = grpc.server(ThreadPoolExecutor(4))
    gateway_pb2_grpc.add_GatewayServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, f"127.0.0.1:{port}"
    server.stop(None)


async def test_modes_take_turns_on_the_same_prompts_and_no_mode_meets_one_twice(
    gateway: tuple[Gateway, str],
) -> None:
    servicer, target = gateway
    heats: list[Heat] = []
    config = replace(CONFIG, base=replace(BASE, target=target))
    assert await run_comparison(config, "bench-{speculation}", heats.append) == heats
    order = [[heat.mode for heat in heats if (heat.concurrency, heat.round) == (1, n)] for n in range(3)]
    assert order == [["off", "local", "global"], ["local", "global", "off"], ["global", "off", "local"]]
    assert [heat.concurrency for heat in heats] == [1] * 9 + [2] * 9
    warm_up, asked = servicer.seen[:3], servicer.seen[3:]
    assert [mode for mode, _, _ in warm_up] == ["off", "local", "global"]
    assert {key for _, key, _ in servicer.seen} == {f"Bearer bench-{mode}" for mode in config.modes}
    prompts = [sorted(text for mode, _, text in asked if mode == name) for name in config.modes]
    assert prompts[0] == prompts[1] == prompts[2]
    assert len(set(prompts[0])) == len(prompts[0]) == 2 * 3 * 2, "requests, rounds, loads"


async def test_a_mode_that_is_refused_is_named_before_the_run(gateway: tuple[Gateway, str]) -> None:
    config = replace(CONFIG, base=replace(BASE, target=gateway[1]), modes=("off", "chain"))
    with pytest.raises(
        BenchError, match="speculation chain failed: INVALID_ARGUMENT: speculation: not today"
    ):
        await run_comparison(config, None, lambda _: None)
    assert [mode for mode, _, _ in gateway[0].seen] == ["off", "chain"]


def heat(mode: str, number: int, tpot_s: float, *, ttft_s: float = 1.0, steps: int = 10) -> Heat:
    """One request of 11 tokens; a text of its own where the mode is `other`."""
    figures = Speculation(steps, 20, 11 - 1 - steps, {"prompt": 10 - steps}, 3, {"prompt": 3})
    text, e2e_s = "b" if mode == "other" else "a", ttft_s + 10 * tpot_s
    record = RequestRecord(0, "d", OK, "", 0.0, ttft_s, e2e_s, (), 100, 11, text, figures)
    return Heat("json", 4, number, mode, summarise([record], SLO_CLASSES["interactive"]), (record,))


def test_ratios_are_formed_within_rounds_and_told_as_median_and_range() -> None:
    """The machine is ten times slower in the second round; the modes' ratio is not."""
    off, fast = (0.01, 0.1, 0.02), (0.005, 0.06, 0.01)
    heats = [heat("off", n, s) for n, s in enumerate(off)]
    heats += [heat("local", n, s, steps=5) for n, s in enumerate(fast)]
    first, second = tabulate(heats)
    assert (first.mode, second.mode) == ("off", "local")
    assert first.tpot_ratio == Ratio(1.0, 1.0, 1.0)
    assert second.tpot_ratio is not None
    assert second.tpot_ratio.median == pytest.approx(0.5)
    assert (second.tpot_ratio.low, second.tpot_ratio.high) == (pytest.approx(0.5), pytest.approx(0.6))
    assert second.tpot_s == pytest.approx(0.01)
    assert second.drafts is not None
    assert (second.drafts.mean_accepted_length, second.drafts.iteration_hit_rate) == (2.0, 0.6)
    assert second.drafts.token_hit_rate == 0.25
    assert second.accepted_per_step == {"prompt": 1.0}


def test_texts_that_differ_are_counted() -> None:
    rows = tabulate([heat("off", 0, 0.01), heat("local", 0, 0.01), heat("other", 0, 0.01)])
    assert [row.num_same for row in rows] == [1, 1, 0]


def test_where_nothing_met_its_objective_there_is_no_ratio_of_goodput() -> None:
    rows = tabulate([heat("off", 0, 0.01, ttft_s=9.0), heat("local", 0, 0.01)])
    assert rows[0].goodput_tokens_per_s == 0.0
    assert [row.goodput_ratio for row in rows] == [None, None]


def test_every_mode_has_a_key_of_its_own_if_it_is_to() -> None:
    assert key_for("off", "bench-{speculation}") == "bench-off"
    assert (key_for("off", "k"), key_for("off", None)) == ("k", None)


def test_a_comparison_is_printed_and_written(gateway: tuple[Gateway, str], tmp_path: Path) -> None:
    config = replace(CONFIG, base=replace(BASE, target=gateway[1]), rounds=1)
    heats = compare(config, api_key=None, output=tmp_path / "c.json", report=tmp_path / "c.md")
    assert len(heats) == 6
    table = [line for line in (tmp_path / "c.md").read_text().splitlines() if line.startswith("| json")]
    assert len(table) == 6
    local = [cell.strip() for cell in table[1].split("|")]
    assert local[1:4] == ["json", "1", "local"]
    assert local[6:10] == ["3.00", "1.000", "0.250", "prompt 2.00 (0.25)"]
    assert [line.split("|")[14].strip() for line in table[:3]] == ["2 of 2", "2 of 2", "0 of 2"]
    written = json.loads((tmp_path / "c.json").read_text())
    assert [len(heat["requests"]) for heat in written["heats"]] == [2] * 6
    assert written["config"]["modes"] == ["off", "local", "global"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", "serve", *arguments])
    return result.exit_code, result.output


def test_the_command_compares_where_several_values_are_given(gateway: tuple[Gateway, str]) -> None:
    common = ("--target", gateway[1], "--num-requests", "1", "--model", "")
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
        (("--concurrency", "1", "--report", "x.md"), "--report a comparison of several"),
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
