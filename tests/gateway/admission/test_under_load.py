"""What admission does as a whole: the real gateway and engine on a simulated machine, a minute in a second.

A step takes 20 ms and 10 ms for each sequence, times a factor that varies by a tenth from step to step, and
slowly by more. Seeds are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import toy_tokenizers
from model_folders import make_folder
from simulated_system import PodSpec, SimulatedSystem
from tandem_cli.bench.arrivals import ClosedLoop, OpenLoop, Replay, Schedule
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchOptions
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.requests import Request, Tenant
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_core.step_cost import StepCost

SPEC = PodSpec(
    prefill=StepCost(per_step=0.01, per_token=0.001), decode=StepCost(per_step=0.02, per_token=0.01)
)
OPTIONS = BenchOptions(rate="1", model="", ignore_eos=True)
MIX = ("interactive", "chat", "interactive", "batch")
SEEDS = (1, 2, 3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    trained = toy_tokenizers.trained(["where is my order"] * 20, 300, [])
    folder = make_folder(
        tmp_path_factory.mktemp("model"),
        trained,
        max_model_len=4096,
        vocab_size=trained.get_vocab_size(),
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
    )
    return Tokenizer(folder)


def make(index: int, slo_class: str = "interactive", tenant: str = "t") -> Request:
    """Prompts of about a hundred tokens with different prefixes, and answers of twenty."""
    text = f"{index:03} {slo_class} {tenant} " + "where is my order? " * 12
    slo = DEFAULT_SLO_CLASSES[slo_class]
    return Request(index, Prompt(f"d{index}", (Turn("user", text),)), slo, 20, Tenant(tenant))


def run(
    tokenizer: Tokenizer, sent: Sequence[Request], schedule: Schedule, seed: int, *, max_retries: int = 0
) -> list[RequestRecord]:
    system = SimulatedSystem(tokenizer, spec=SPEC, noise=0.1, drift=0.15, seed=seed)
    with system.started():
        transport = system.transport(OPTIONS)
        return system.run(run_load(transport, sent, schedule, timeout_s=600.0, max_retries=max_retries))


def in_time(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Requests that met their objectives, counted from the last attempt."""
    return [record for record in records if record.is_met(since_s=record.last_sent_s)]


@pytest.mark.parametrize(("classes", "least_admitted"), [(("interactive",), 210), (MIX, 325)])
def test_under_overload_admitted_requests_are_in_time_and_the_machine_is_full(
    tokenizer: Tokenizer, classes: tuple[str, ...], least_admitted: int
) -> None:
    """Four times the capacity for 20 s, with each seed."""
    sent = [make(index, classes[index % len(classes)]) for index in range(240)]
    records = [one for seed in SEEDS for one in run(tokenizer, sent, OpenLoop(12.0, seed), seed)]
    admitted = [record for record in records if not record.is_refused]
    assert len(admitted) >= least_admitted
    assert len(in_time(admitted)) >= 0.98 * len(admitted)


def test_clients_of_a_class_that_waits_get_all_their_answers(tokenizer: Tokenizer) -> None:
    """Four times the capacity for 20 s, with each seed. The machine serves as many in time as if it refused
    the others, minus what those take of it."""
    sent = [make(index, "standard") for index in range(240)]
    records = [one for seed in SEEDS for one in run(tokenizer, sent, OpenLoop(12.0, seed), seed)]
    assert all(record.is_ok for record in records)
    late = [record for record in records if not record.is_met()]
    assert 160 <= len(records) - len(late) < 350
    promises = [record.promise for record in late]
    assert not any(one.met for one in promises)
    assert {one.slo.e2e_s for one in promises} == {5.0}
    assert [one.miss_cause for one in promises].count("queue") > 0.9 * len(late)
    assert max(record.e2e_s for record in records) < 60, "none is forgotten"


def test_refused_clients_find_room_when_they_come_back(tokenizer: Tokenizer) -> None:
    records = []
    for seed in SEEDS:
        sent = [make(index) for index in range(100)]
        records += run(tokenizer, sent, OpenLoop(8.0, seed), seed, max_retries=1)
    returning = [record for record in records if len(record.attempts) > 1]
    admitted = [record for record in returning if not record.is_refused]
    assert len(returning) > 100
    assert len(admitted) >= 0.97 * len(returning)
    assert len(in_time(admitted)) >= 0.98 * len(admitted)


def test_quieter_tenants_are_served_next_to_a_noisy_one(tokenizer: Tokenizer) -> None:
    """One tenant sends one request per second, the other ten; the capacity is three."""
    arrivals = sorted(
        [(float(second), "quiet") for second in range(20)] + [(n / 10, "noisy") for n in range(200)]
    )
    sent = [make(index, tenant=tenant) for index, (_, tenant) in enumerate(arrivals)]
    schedule = Replay(tuple(at for at, _ in arrivals))
    records = [one for seed in SEEDS for one in run(tokenizer, sent, schedule, seed)]
    quiet, noisy = (
        [record for record in records if record.tenant == tenant] for tenant in ("quiet", "noisy")
    )
    assert len(in_time(quiet)) >= 0.98 * len(quiet)
    admitted = [record for record in noisy if not record.is_refused]
    assert len(admitted) >= 2 * len(quiet), "the rest of the machine"
    assert len(in_time(admitted)) >= 0.98 * len(admitted)


def test_a_system_that_was_just_started_refuses_no_load_that_it_can_serve(tokenizer: Tokenizer) -> None:
    sent = [make(index) for index in range(100)]
    for seed in SEEDS:
        records = run(tokenizer, sent, ClosedLoop(6), seed, max_retries=2)
        assert len(in_time(records)) == len(records) == 100
        assert all(len(record.attempts) == 1 for record in records)
