"""Requests of mixed classes and tenants and of traces, and their send times."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev

import pytest
from tandem_cli.bench.arrivals import ClosedLoop, OpenLoop, Replay
from tandem_cli.bench.options import BenchError, BenchOptions, Point
from tandem_cli.bench.prompts import estimate_tokens
from tandem_cli.bench.requests import Request, Tenant, parse_mix, parse_tenants
from tandem_cli.bench.traces import TraceEntry
from tandem_cli.bench.workload import RequestMaker, load_trace
from tandem_core.slo import SloTarget

OPTIONS = BenchOptions(model="", rate=2.0, num_requests=12, max_tokens=50, workload="random")


def make(options: BenchOptions, first: int = 0) -> list[Request]:
    return RequestMaker(options).make(options.workload, first)


def gaps(loop: OpenLoop, count: int = 20_000) -> list[float]:
    return [later - earlier for earlier, later in pairwise(loop.departures_s(count))]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5), (math.inf, 0.0)])
def test_burstiness_sets_the_variation_of_the_gaps_and_not_their_mean(
    burstiness: float, variation: float
) -> None:
    drawn = gaps(OpenLoop(5.0, seed=1, burstiness=burstiness))
    assert mean(drawn) == pytest.approx(0.2, rel=0.05)
    assert pstdev(drawn) / mean(drawn) == pytest.approx(variation, rel=0.06, abs=1e-9)


def test_the_pattern_is_equal_at_all_rates() -> None:
    slow, fast = (OpenLoop(rate, seed=2, burstiness=0.5).departures_s(50) for rate in (1.0, 4.0))
    assert [time_s / 4 for time_s in slow] == pytest.approx(fast)


def test_a_seed_draws_equal_classes_and_tenants_by_weight() -> None:
    options = replace(
        OPTIONS, num_requests=1000, mix="interactive=.6,chat=.3,batch=.1", tenants="a=K1:3,b=K2:1"
    )
    requests = make(options)
    classes = Counter(request.slo.name for request in requests)
    assert [classes[name] / 1000 for name in ("interactive", "chat", "batch")] == pytest.approx(
        [0.6, 0.3, 0.1], abs=0.05
    )
    assert Counter(request.tenant.name for request in requests)["a"] == pytest.approx(750, abs=50)
    assert {request.tenant.key for request in requests if request.tenant.name == "a"} == {"K1"}
    assert requests == make(options)
    other = make(replace(options, seed=1))
    assert [request.slo for request in other] != [request.slo for request in requests]


def test_further_runs_have_an_equal_mix_and_other_prompts() -> None:
    options = replace(OPTIONS, mix="chat=1,batch=1", tenants="a,b")
    first, second = make(options), make(options, first=12)
    assert [(r.slo, r.tenant) for r in first] == [(r.slo, r.tenant) for r in second]
    assert not {r.prompt.messages for r in first} & {r.prompt.messages for r in second}


def test_explicit_objectives_replace_those_of_every_class() -> None:
    options = replace(OPTIONS, mix="chat=1,batch=1", slo_ttft_ms=250.0, slo_e2e_ms=9000.0)
    found = {request.slo.name: request.slo for request in make(options)}
    assert (found["chat"].ttft_s, found["chat"].tpot_s, found["chat"].e2e_s) == (0.25, 0.15, 9.0)
    assert (found["batch"].ttft_s, found["batch"].tpot_s) == (0.25, 0.0)
    assert all(request.sends_objectives for request in make(options))
    assert not any(request.sends_objectives for request in make(OPTIONS))


def test_classes_are_those_of_the_gateway(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="'gold' is unknown; use one of standard, interactive, chat, batch"):
        make(replace(OPTIONS, mix="gold=1"))
    file = tmp_path / "slo.json"
    file.write_text('{"gold": {"ttft_ms": 300}}')
    options = replace(OPTIONS, mix="gold=1", slo_classes_file=file)
    assert {request.slo for request in make(options)} == {SloTarget("gold", ttft_s=0.3)}
    with pytest.raises(BenchError, match="'chat' is unknown; use one of gold"):
        make(replace(options, mix="chat=1"))
    file.write_text("{}")
    with pytest.raises(BenchError, match=r"slo\.json: the file: .*give 1 to 16 classes"):
        make(options)


@pytest.mark.parametrize(
    ("mix", "complaint"),
    [
        ("chat", "the weight is not a number above 0"),
        ("chat=0", "not a number above 0"),
        ("chat=inf", "not a number above 0"),
        ("chat=1,chat=2", "names chat twice"),
    ],
)
def test_an_invalid_mix_is_refused(mix: str, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        parse_mix(mix)


def test_tenants_have_keys_and_weights_and_no_message_shows_a_key() -> None:
    assert parse_tenants("a=sk-1:2.5, b=sk-2,c:4,d") == {
        Tenant("a", "sk-1"): 2.5,
        Tenant("b", "sk-2"): 1.0,
        Tenant("c"): 4.0,
        Tenant("d"): 1.0,
    }
    for text in ("a=sk-1:x", "=sk-1:2", "a=sk-1,a=sk-2"):
        with pytest.raises(BenchError) as caught:
            parse_tenants(text)
        assert "sk-" not in str(caught.value)
    assert "sk-1" not in repr(Tenant("a", "sk-1"))
    assert "sk-1" not in str(replace(OPTIONS, tenants="a=sk-1:2").described())


TRACE = [
    TraceEntry(0.0, 1100, 20, (7, 8, 9)),
    TraceEntry(1.0, 600, 500, (7, 5)),
    TraceEntry(4.0, 300, 30, slo_class="batch", tenant="b"),
]


def test_a_trace_sets_lengths_class_and_tenant() -> None:
    options = replace(OPTIONS, trace=Path("t"), rate=None, tenants="a=K1,b=K2", input_tokens=800)
    maker = RequestMaker(options, TRACE)
    requests = maker.make("retail")
    assert [request.max_tokens for request in requests] == [20, 50, 30]
    assert maker.num_cut == 2
    lengths = [estimate_tokens("".join(turn.content for turn in r.prompt.messages)) for r in requests]
    assert lengths == pytest.approx([800, 600, 300], rel=0.06)
    assert (requests[2].slo.name, requests[2].tenant) == ("batch", Tenant("b", "K2"))
    assert requests[0].slo.name == "interactive"


def test_equal_blocks_are_equal_text_within_a_run_only() -> None:
    maker = RequestMaker(replace(OPTIONS, trace=Path("t"), rate=None), TRACE)
    first, second, _ = (request.prompt.messages[0].content for request in maker.make("retail"))
    common = next(i for i, (mine, other) in enumerate(zip(first, second, strict=False)) if mine != other)
    assert common == pytest.approx(512 * 4, abs=2)
    again = maker.make("retail", first=3)[0].prompt.messages[0].content
    assert len(again) == len(first)
    assert sum(a == b for a, b in zip(first, again, strict=True)) < 0.5 * len(first)


@pytest.mark.parametrize(
    ("options", "speed"),
    [
        (replace(OPTIONS, rate=None), 1.0),
        (replace(OPTIONS, rate=None, rate_scale=4.0), 4.0),
        (replace(OPTIONS, rate=2.0), 4.0),  # recorded: 2 gaps in 4 s
    ],
)
def test_a_trace_is_replayed_at_its_speed_a_multiple_or_a_mean_rate(
    options: BenchOptions, speed: float
) -> None:
    options = replace(options, trace=Path("t"))
    schedule = RequestMaker(options, TRACE).schedule(options.point())
    assert isinstance(schedule, Replay)
    assert schedule.departures_s(3) == pytest.approx([0.0, 1.0 / speed, 4.0 / speed])


def test_without_a_trace_the_load_decides_the_schedule() -> None:
    maker = RequestMaker(replace(OPTIONS, burstiness=0.5, seed=4))
    assert maker.schedule(Point("random", rate=3.0)) == OpenLoop(3.0, 4, 0.5)
    assert maker.schedule(Point("random", concurrency=3)) == ClosedLoop(3)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"rate_scale": 2.0}, "--rate-scale changes the speed of a --trace"),
        ({"trace": Path("t"), "rate_scale": 2.0}, "both set the speed"),
        ({"trace": Path("t"), "burstiness": 2.0}, "leave out --burstiness"),
        ({"trace": Path("t"), "rate": None, "concurrency": 2}, "not --concurrency"),
        ({"burstiness": 0.0}, "--burstiness 0: give a number above 0"),
        ({"burstiness": math.nan}, "--burstiness nan"),
    ],
)
def test_contradictory_loads_are_refused(changes: dict[str, object], complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        replace(OPTIONS, **changes).point()


def test_requests_after_the_end_of_the_run_are_not_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f'{{"arrival_s": {10 * number}}}\n' for number in range(100)))
    options = replace(OPTIONS, trace=path, rate=None, num_requests=None, timeout=50.0)
    assert len(load_trace(options)) == 5
    assert len(load_trace(replace(options, rate_scale=2.0))) == 10
    assert len(load_trace(replace(options, rate=0.4))) == 20
    assert len(load_trace(replace(options, num_requests=3))) == 3
    monkeypatch.setattr("tandem_cli.bench.workload._MAX_TRACE", 99)
    with pytest.raises(BenchError, match="more than 99 requests; limit them with --num-requests"):
        load_trace(options)
    assert len(load_trace(replace(options, num_requests=100, rate_scale=100.0))) == 100


def test_a_tenant_of_the_trace_without_a_key_is_named() -> None:
    with pytest.raises(BenchError, match="tenant 'b'; add it to --tenants"):
        RequestMaker(replace(OPTIONS, trace=Path("t"), tenants="a=K"), TRACE)
