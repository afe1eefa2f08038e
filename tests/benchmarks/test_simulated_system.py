"""The simulated machine: its time, its steps, and what the real admission does with them."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import toy_tokenizers
from fixed_gate import FixedGate
from model_folders import make_folder
from simulated_system import PodSpec, SimulatedSystem, VirtualTime
from slo import TENANTS, Plan
from slo_report import PROBE
from slo_simulated import MADE_OTHERS_LATE, SimulatedBenchmark, simulator
from tandem_cli.bench.arrivals import ClosedLoop, OpenLoop
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.requests import Request, Tenant
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_core.step_cost import StepCost

OPTIONS = BenchOptions(rate=1.0, model="", ignore_eos=True)
#: 20 ms a token, and 10 ms for each sequence in the batch.
SPEC = PodSpec(
    prefill=StepCost(per_step=0.01, per_token=0.001), decode=StepCost(per_step=0.02, per_token=0.01)
)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = toy_tokenizers.trained(["where is my order"] * 20, 300, [])
    return make_folder(
        tmp_path_factory.mktemp("model"),
        tokenizer,
        max_model_len=4096,
        vocab_size=tokenizer.get_vocab_size(),
        chat_template=TEMPLATE,
    )


def requests(count: int, slo_class: str = "interactive", max_tokens: int = 20) -> list[Request]:
    """Of about a hundred tokens each, no two with the same beginning."""
    slo = DEFAULT_SLO_CLASSES[slo_class]
    return [
        Request(
            index,
            Prompt(f"d{index}", (Turn("user", f"{index:03} {slo_class} " + "where is my order? " * 12),)),
            slo,
            max_tokens,
            Tenant("t"),
        )
        for index in range(count)
    ]


def run(
    system: SimulatedSystem, sent: Sequence[Request], schedule: OpenLoop | ClosedLoop
) -> list[RequestRecord]:
    with system.started():
        return system.run(run_load(system.transport(OPTIONS), sent, schedule, timeout_s=600.0))


def test_time_passes_while_the_loop_waits_and_not_else() -> None:
    clock = VirtualTime()
    real = time.monotonic()

    async def sleeps() -> tuple[float, float]:
        began = time.monotonic()
        await asyncio.gather(asyncio.sleep(3600.0), asyncio.sleep(1800.0))
        return began, time.perf_counter()

    with clock.installed():
        began, ended = clock.run(sleeps())
        assert ended - began == pytest.approx(3600.0)
        clock.run_for(5.0)
        assert time.monotonic() - ended == pytest.approx(5.0)
    assert time.monotonic() - real < 60.0


def test_a_request_alone_takes_what_its_steps_cost(folder: Path) -> None:
    system = SimulatedSystem(Tokenizer(folder), spec=SPEC)
    (record,) = run(system, requests(1), ClosedLoop(1))
    assert record.is_ok and record.output_tokens == 20
    assert record.ttft_s == pytest.approx(0.01 + 0.001 * record.prompt_tokens)
    assert record.tpot_s == pytest.approx(0.03)
    assert record.promise is not None and record.promise.e2e_p50_s == pytest.approx(record.e2e_s, rel=0.1)


def test_texts_of_which_more_can_be_guessed_end_earlier(folder: Path) -> None:
    system = SimulatedSystem(Tokenizer(folder), spec=replace(SPEC, right_guesses=1.5))
    records = run(system, requests(12), ClosedLoop(1))
    assert all(record.output_tokens == 20 for record in records)
    for record in records:
        # Each step has four guesses, which cost as much as tokens of a prompt; the last ones may have fewer.
        assert record.e2e_s - record.ttft_s == pytest.approx(0.034 * len(record.gaps_s), rel=0.05)
    num_steps = sorted(len(record.gaps_s) for record in records)
    assert num_steps[0] < 6 and 10 < num_steps[-1] <= 19, num_steps
    assert 5 < statistics.median(num_steps) < 15, (
        "a token and 1.5 guesses a step on average, some texts fewer"
    )


def test_equal_seeds_make_equal_runs_and_noise_other_ones(folder: Path) -> None:
    tokenizer = Tokenizer(folder)
    runs = [
        run(
            SimulatedSystem(tokenizer, spec=SPEC, noise=noise, drift=noise, seed=1),
            requests(40),
            OpenLoop(4.0, 7),
        )
        for noise in (0.1, 0.1, 0.0)
    ]
    assert runs[0] == runs[1] != runs[2]


@pytest.fixture(scope="module")
def overloaded(folder: Path) -> Iterator[dict[str, list[RequestRecord]]]:
    """Four times what the pod can do, for 20 s."""
    sent = requests(240)
    ours, fixed = (SimulatedSystem(Tokenizer(folder), spec=SPEC) for _ in range(2))
    fixed.admission.gate = FixedGate(fixed.admission, "fcfs")
    yield {name: run(one, sent, OpenLoop(12.0, 3)) for name, one in (("ours", ours), ("FCFS", fixed))}


def test_under_overload_what_is_admitted_is_in_time(overloaded: dict[str, list[RequestRecord]]) -> None:
    ours, fcfs = overloaded["ours"], overloaded["FCFS"]
    admitted = [record for record in ours if not record.is_refused]
    assert len(admitted) < len(ours)
    assert sum(record.is_met() for record in admitted) >= 0.97 * len(admitted)
    assert sum(record.is_met() for record in ours) > 1.5 * sum(record.is_met() for record in fcfs)


def test_a_refused_request_is_run_again_as_if_it_had_been_admitted(folder: Path) -> None:
    options = replace(OPTIONS, input_tokens=64, max_tokens=16)
    plan = Plan(
        options, {"ours": "", "FCFS": "--fixed-gate fcfs"}, ("poisson",), loads=(4.0,),
        seconds=4.0, capacity=8.0, warm_up_s=1.0,
    )  # fmt: skip
    benchmark = SimulatedBenchmark(plan, simulator(folder, 0), None)
    runs = benchmark.measure()
    ours, again, fcfs = runs
    assert (ours.system, again.point.workload, fcfs.system) == ("ours", f"{PROBE}poisson", "FCFS")
    refused = {record.index for record in ours.records if record.is_refused}
    assert refused and {record.index for record in again.records} <= refused
    assert not any(record.is_refused for record in again.records)
    assert {record.status for record in again.records} <= {"OK", MADE_OTHERS_LATE}
    assert {record.tenant for record in ours.records} <= set(TENANTS)


def test_answers_that_do_not_end_delay_neither_requests_beside_them_nor_after_them(folder: Path) -> None:
    """More answers than the batch has places, each expected to end in time, generate 1,500 tokens."""
    options = replace(OPTIONS, ignore_eos=False)
    fast = PodSpec(
        prefill=StepCost(per_step=0.005, per_token=0.0003), decode=StepCost(per_step=0.006, per_token=0.001)
    )
    system = SimulatedSystem(Tokenizer(folder), spec=fast)

    async def send(slo_class: str, count: int, max_tokens: int, schedule: OpenLoop | ClosedLoop):
        sent = requests(count, slo_class, max_tokens)
        return await run_load(system.transport(options), sent, schedule, timeout_s=600.0)

    async def all_of() -> tuple[list[RequestRecord], ...]:
        long = asyncio.ensure_future(send("standard", 24, 1500, ClosedLoop(24)))
        await asyncio.sleep(10.0)
        beside = await send("chat", 10, 16, OpenLoop(1.0, 1))
        assert not long.done()
        return await long, beside, await send("chat", 16, 16, OpenLoop(4.0, 0))

    with system.started():
        long, beside, after = system.run(all_of())
    assert all(record.is_ok for record in long)
    assert [record.is_met() for record in beside] == [True] * 10
    assert [record.is_met() for record in after] == [True] * 16
