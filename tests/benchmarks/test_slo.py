"""`benchmarks/slo.py` against fake gateways: what each part sends, and the page from the records."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
import slo_report
from fake_gateway import Answer, FakeGateway
from slo import (
    CAPACITY_CONCURRENCY,
    PROBED_EVERY,
    TENANTS,
    Benchmark,
    Plan,
    Served,
    make_keys,
    mooncake_entries,
    probed_every,
    scaled_to_mean,
)
from tandem_cli.bench.options import BenchError, BenchOptions, Point
from tandem_cli.bench.record import OK, Promise, RequestRecord
from tandem_cli.bench.records_file import RecordsWriter, read_runs
from tandem_cli.bench.stats import Run, summarise
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_gateway.auth import ApiKeys
from tandem_proto.v1 import common_pb2

OPTIONS = BenchOptions(rate=1.0, model="", input_tokens=64, max_tokens=4, timeout=30.0)
PLAN = Plan(
    OPTIONS,
    {"ours": "--ours", "refusing": "--refuse"},
    ("poisson", "trace", "retry", "fairness", "fresh"),
    loads=(0.5, 2.0),
    seconds=0.5,
    capacity=40.0,
    learning_requests=2,
    # Eight requests.
    warm_up_s=0.4,
    fresh_starts=2,
)
KEYS = {tenant: f"key-{tenant}" for tenant in TENANTS}


class Fleets:
    """Starts a fake gateway for each configuration, and keeps those that have ended."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.ended: list[FakeGateway] = []

    @contextlib.contextmanager
    def start(self, name: str, flags: str) -> Iterator[Served]:
        self.order.append(name)
        receipt = common_pb2.Receipt(prompt_tokens=64, output_tokens=2, ttft_ns=1)
        refuse_each = 3 if flags == "--refuse" else 0
        with FakeGateway(
            Answer(("x", "y"), receipt), refuse_each=refuse_each, retry_after_ms=1
        ).serving() as it:
            yield Served(it.target)
        self.ended.append(it)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Fleets, list[Run], Path]:
    records = tmp_path_factory.mktemp("slo") / "r.jsonl"
    fleets = Fleets()
    writer = RecordsWriter(records, OPTIONS.described())
    return fleets, Benchmark(PLAN, fleets.start, KEYS, writer).measure(), records


Measured = tuple[Fleets, list[Run], Path]


def of(runs: list[Run], part: str, system: str = "ours") -> list[Run]:
    return [run for run in runs if (run.point.workload, run.system) == (part, system)]


def test_configurations_take_turns_and_begin_anew_in_each_part(measured: Measured) -> None:
    fleets, runs, _ = measured
    assert fleets.order == [
        *("ours", "refusing", "refusing", "ours", "ours", "refusing", "refusing", "ours"),
        *("ours", "refusing", "ours", "refusing"),
    ]
    assert [run.point.rate for run in of(runs, "poisson")] == [20.0, 80.0]
    assert [run.summary.num_sent for run in of(runs, "poisson")] == [10, 40]
    assert len(runs) == 2 * (2 + 2 + 1 + 3 + 2)


def test_all_configurations_get_the_same_requests_of_three_classes_and_tenants(measured: Measured) -> None:
    fleets, runs, _ = measured
    first, second = fleets.ended[:2]
    # Without the warm-up, whose prompts differ.
    sent = [
        Counter(request.messages[-1].content for request in fake.requests[10:]) for fake in (first, second)
    ]
    assert sent[0] == sent[1]
    assert {request.slo_class for request in first.requests} == {"interactive", "chat", "batch"}
    assert set(first.keys) == {f"Bearer {key}" for key in KEYS.values()}
    assert {record.tenant for record in of(runs, "poisson")[1].records} == set(TENANTS)


def test_the_neighbours_send_the_same_at_the_same_times_beside_the_noisy_one(measured: Measured) -> None:
    _, runs, _ = measured
    (alone,), (fair,), (noisy,) = (of(runs, part) for part in ("alone", "fair", "noisy"))
    assert {record.tenant for record in alone.records} == set(TENANTS[:-1])
    for run, num_others in ((fair, 8), (noisy, 32)):
        quiet = [record for record in run.records if record.tenant != TENANTS[-1]]
        assert [(r.dialogue_id, r.tenant, r.slo) for r in quiet] == [
            (r.dialogue_id, r.tenant, r.slo) for r in alone.records
        ]
        assert len(run.records) - len(quiet) == num_others


def test_the_page_is_made_from_the_records_alone(
    measured: Measured, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["benchmarks/slo.py"])
    _, runs, records = measured
    assert read_runs(records) == runs
    slo_report.finish(read_runs(records), tmp_path / "p.md", tmp_path / "p.png")
    text = (tmp_path / "p.md").read_text()
    for title in ("## Overload", "## Retry-after honoured", "## A noisy tenant"):
        assert title in text
    assert (tmp_path / "p.png").exists()
    (row,) = [line for line in text.splitlines() if line.startswith("| poisson | 80/s | refusing |")]
    assert row.split(" | ")[3:5] == ["40", "35%"]


def test_a_refused_request_comes_back_in_the_part_for_it_alone(measured: Measured) -> None:
    _, runs, _ = measured
    assert not any(len(record.attempts) > 1 for record in of(runs, "poisson", "refusing")[1].records)
    (retry,) = of(runs, "retry", "refusing")
    assert sum(len(record.attempts) > 1 for record in retry.records) >= 10


def test_a_fresh_start_gets_the_same_requests_without_a_warm_up(measured: Measured) -> None:
    fleets, runs, _ = measured
    starts = fleets.ended[-4:]
    assert len(starts[0].requests) == 100 < len(starts[1].requests), "refused ones come back"
    texts = [{request.messages[-1].content for request in fake.requests} for fake in starts]
    assert texts[0] == texts[1] == texts[2] == texts[3]
    assert {request.slo_class for request in starts[0].requests} == {"interactive"}
    table = slo_report.fresh_table(runs).splitlines()
    assert table[2].startswith("| ours | 100 of 100, 100 of 100 | 0 | 0 |")
    assert table[2].endswith("| - |")
    # Every third sending is refused; which client's that is depends on how they take turns.
    refusing = of(runs, "fresh", "refusing")
    for run, fake in zip(refusing, starts[1::2], strict=True):
        assert sum(max(len(record.attempts), 1) for record in run.records) == len(fake.requests)
        refused = [one for record in run.records for one in record.attempts if one.is_refused]
        assert len(refused) == len(fake.requests) // 3
    records = [record for run in refusing for record in run.records]
    num_again = sum(len(record.attempts) > 1 for record in records)
    num_lost = sum(record.is_refused for record in records)
    in_time, again, lost = (cell.strip() for cell in table[3].split("|")[2:5])
    assert sum(int(cell.split()[0]) for cell in in_time.split(",")) == 200 - num_lost
    assert (again, lost) == (str(num_again), str(num_lost))
    assert num_again > 0
    assert " to " in table[3]


def test_the_capacity_is_measured_on_the_first_configuration() -> None:
    fleets = Fleets()
    plan = replace(PLAN, parts=("poisson",), loads=(0.01,), seconds=0.01, capacity=None)
    first, second, _ = Benchmark(plan, fleets.start, KEYS, None).measure()
    assert fleets.order == ["ours", "ours", "refusing"]
    assert first.point == Point("capacity", CAPACITY_CONCURRENCY)
    assert {record.slo.name for record in first.records} == {"batch"}
    assert second.point.rate == pytest.approx(0.01 * first.summary.requests_per_s, abs=1e-4)


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(BenchError, match="'tidal' is unknown; use poisson, bursts"):
        Benchmark(replace(PLAN, parts=("tidal",)), Fleets().start, KEYS, None).measure()


def test_the_recorded_shape_keeps_its_ratios_and_gets_the_wanted_mean() -> None:
    entries = mooncake_entries()
    assert (len(entries), entries[0].arrival_s, entries[-1].arrival_s) == (71, 0.0, 21.0)
    lengths = scaled_to_mean([entry.prompt_tokens or 0 for entry in entries], 512)
    assert mean(lengths) == pytest.approx(512, rel=0.02)
    assert max(lengths) <= 4 * 512
    assert min(lengths) >= 512 // 16
    assert lengths[1] / lengths[0] == pytest.approx(7322 / 6758, rel=0.02)


def test_the_gateway_accepts_the_keys_that_are_made(tmp_path: Path) -> None:
    path, keys = make_keys(tmp_path)
    loaded = ApiKeys.load(path)
    assert [loaded.authenticate(f"Bearer {keys[tenant]}").tenant for tenant in TENANTS] == list(TENANTS)


def answer(ttft_s: float, *, status: str = OK, promise: Promise | None = None) -> RequestRecord:
    return RequestRecord(
        0, "d", status, "", 0.0, ttft_s, ttft_s, (), 9, 1, "", None,
        slo=DEFAULT_SLO_CLASSES["chat"], tenant="a", max_tokens=4, promise=promise,
    )  # fmt: skip


def test_promises_are_judged_by_the_client_s_clock_and_the_receipt_s_objectives() -> None:
    wide = Promise(1.0, 1.0, 0.0, replace(DEFAULT_SLO_CLASSES["chat"], ttft_s=3.0), met=True)
    records = [
        answer(2.0, promise=wide),
        answer(4.0, promise=wide),
        answer(0.1, status="UNAVAILABLE"),
        answer(0.1, status="RESOURCE_EXHAUSTED"),
    ]
    assert slo_report.kept_promises(records) == pytest.approx(1 / 3)
    assert slo_report.kept_promises([answer(0.1)]) is None


def test_an_eighth_of_the_refused_requests_is_sent_again_without_objectives() -> None:
    fleets = Fleets()
    plan = replace(PLAN, configurations={"refusing": "--refuse"}, parts=("poisson",), loads=(2.0,))
    runs = Benchmark(plan, fleets.start, KEYS, None).measure()
    first, probed = runs
    assert probed.point == first.point._replace(workload="refused in poisson")
    num_refused = first.summary.num_refused
    assert num_refused >= 10
    assert len(probed.records) == len(range(0, num_refused, PROBED_EVERY))
    refused = {record.index for record in first.records if record.is_refused}
    assert {record.index for record in probed.records} <= refused
    assert all(record.slo in DEFAULT_SLO_CLASSES.values() for record in probed.records)
    assert {record.slo.name for record in probed.records} != {"batch"}, "judged by their own class"
    calls = [call.slo_class for call in fleets.ended[0].requests]
    asked = [record.slo.name for record in first.records]
    warm_up = len(calls) - len(asked) - len(probed.records)
    assert calls[warm_up:].count("batch") == asked.count("batch") + len(probed.records)


def test_no_more_than_some_refused_requests_of_a_large_run_are_sent_again() -> None:
    assert [probed_every(count) for count in (1, 256, 1011)] == [8, 8, 31]


def test_drafts_are_learnt_from_requests_without_objectives_before_each_part() -> None:
    fleets = Fleets()
    plan = replace(PLAN, configurations={"ours": ""}, parts=("poisson",), loads=(0.5,), learning_requests=5)
    Benchmark(plan, fleets.start, KEYS, None).measure()
    assert [call.slo_class for call in fleets.ended[0].requests[:5]] == ["batch"] * 5
    learnt = len(fleets.ended[0].requests)
    Benchmark(replace(plan, learning_requests=0), fleets.start, KEYS, None).measure()
    assert len(fleets.ended[1].requests) == learnt - 5


def test_a_refusal_was_wrong_if_the_request_meets_its_own_objectives_behind_all_others() -> None:
    def run(part: str, *records: RequestRecord) -> Run:
        return Run(Point(part, rate=2.0), 0, "ours", summarise(records), records)

    refused = answer(0.1, status="RESOURCE_EXHAUSTED")
    overload = run("poisson", refused, refused, answer(0.1))
    probes = run("refused in poisson", answer(0.1), answer(90.0))
    table = slo_report.overload_table([overload, probes], capacity=2.0).splitlines()
    assert len(table) == 3, "probes have no row of their own"
    assert " | 1 of 2 | " in table[2]
    assert " | - | " in slo_report.overload_table([overload], capacity=2.0).splitlines()[2]


def test_predictions_have_rows_by_class_and_by_load() -> None:
    told = Promise(
        1.0, 2.0, 0.0, DEFAULT_SLO_CLASSES["chat"], met=True, ttft_p50_s=0.5, ttft_p90_s=1.0, e2e_p90_s=9.0
    )
    records = (answer(1.0, promise=told),)
    runs = [Run(Point("poisson", rate=rate), 0, "ours", summarise(records), records) for rate in (2.0, 8.0)]
    table = slo_report.calibration_table(runs, capacity=4.0).splitlines()
    assert table[2:] == [
        "| ours | class chat | 2 | 0.000 | 1.000 | - | 1.000 |",
        "| ours | 0.5x | 1 | 0.000 | 1.000 | - | 1.000 |",
        "| ours | 2x | 1 | 0.000 | 1.000 | - | 1.000 |",
    ]
