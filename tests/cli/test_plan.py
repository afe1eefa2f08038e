"""`tandem plan`: costs from a data sheet, the simulated fleet, and the search for the cheapest one."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import yaml
from tandem_cli.main import app
from tandem_cli.plan.costs import GPUS, SHAPES, DoesNotFitError, PodCosts, of_gpu
from tandem_cli.plan.fleet_plan import Contention, FleetPlan
from tandem_cli.plan.measured import measured_fleet
from tandem_cli.plan.overlay import write_overlay
from tandem_cli.plan.search import cheapest, cheapest_together, evaluate, slack
from tandem_cli.plan.simulate import simulate
from tandem_cli.plan.workload import PlannedRequest, poisson
from tandem_core.codec import step_cost_to_proto
from tandem_core.slo import SloTarget
from tandem_core.step_cost import StepCost
from tandem_proto.v1 import common_pb2
from typer.testing import CliRunner

REPOSITORY = Path(__file__).resolve().parents[2]
#: A prompt token takes 1 ms; a decode step 10 ms, 1 ms more for each sequence.
COSTS = PodCosts(
    StepCost(per_token=0.001), StepCost(0.010, 0.001), kv_tokens=100_000, kv_bytes_per_token=1000
)
SLO = SloTarget("", ttft_s=1.5, e2e_s=4.0)


def fleet(num_prefill: int, num_decode: int, **changes: Any) -> FleetPlan:
    return FleetPlan(COSTS, num_prefill, num_decode, **changes)


def request(arrival_s: float = 0.0, prompt: int = 500, output: int = 100, cached: int = 0) -> PlannedRequest:
    return PlannedRequest(arrival_s, prompt, cached, output)


def test_a_data_sheet_gives_the_roofline() -> None:
    gpu, shape = GPUS["h200"], SHAPES["qwen2.5-72b"]
    costs = of_gpu(gpu, shape, 8)
    weights_s = 2 * 72.7e9 / (8 * 0.8 * 4.8e12)
    assert costs.decode.per_step == pytest.approx(weights_s + 0.0015 + 160 * 12e-6)
    assert costs.prefill.per_token == pytest.approx(2 * 72.7e9 / (8 * 0.65 * 989e12))
    kv_bytes = 2 * 80 * 8 * 128 * 2
    assert costs.decode.per_pair == pytest.approx(kv_bytes / (8 * 0.8 * 4.8e12))
    assert costs.kv_tokens == int((8 * 0.9 * 141e9 - 2 * 72.7e9) / kv_bytes)
    with pytest.raises(DoesNotFitError, match="145 GB of weights; 1 x h200"):
        of_gpu(gpu, shape, 1)


def test_a_request_alone_takes_its_prompt_and_its_steps() -> None:
    (outcome,) = simulate(fleet(1, 1), [request()])
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.e2e_s == pytest.approx(0.5 + 99 * 0.011)
    (cached,) = simulate(fleet(1, 1), [request(cached=300)])
    assert cached.ttft_s == pytest.approx(0.2)
    (together,) = simulate(fleet(0, 1, chunk_size=100), [request()])
    assert (together.ttft_s, together.e2e_s) == pytest.approx((outcome.ttft_s, outcome.e2e_s))
    (drafted,) = simulate(fleet(1, 1, tokens_per_step=(3.0,)), [request()])
    assert drafted.tpot_s == pytest.approx(outcome.tpot_s / 3, rel=0.01)
    (single,) = simulate(fleet(1, 1), [request(output=1)])
    assert single.e2e_s == single.ttft_s


def test_prompts_wait_as_in_an_m_d_1_queue() -> None:
    rate, service_s = 0.8 / 0.5, 0.5
    outcomes = simulate(fleet(1, 8), poisson(rate, 8000, 500, 1, spread=0.0, seed=3))
    waited_s = mean(outcome.ttft_s for outcome in outcomes) - service_s
    assert waited_s == pytest.approx(0.8 / (2 * 0.2) * service_s, rel=0.15)


def test_sequences_share_steps_and_wait_for_room() -> None:
    pair = simulate(fleet(2, 1), [request(), request()])
    assert [one.tpot_s for one in pair] == pytest.approx([0.012, 0.012], rel=0.01)
    small = FleetPlan(PodCosts(COSTS.prefill, COSTS.decode, 1000, 1000.0), 2, 1)
    first, second = simulate(small, [request(), request()])
    assert first.tpot_s == pytest.approx(0.011)
    assert second.e2e_s == pytest.approx(first.e2e_s + 99 * 0.011), "600 + 600 tokens do not fit in 1,000"
    turns = simulate(fleet(2, 1, max_batch=1), [request(), request()])
    assert turns[1].e2e_s == pytest.approx(second.e2e_s)


def test_prompts_slow_decoding_only_on_pods_that_do_both() -> None:
    long = [request(output=200), request(0.9, prompt=1000, output=2)]
    apart, both = (simulate(plan, long)[0] for plan in (fleet(1, 1), fleet(0, 1, chunk_size=200)))
    assert apart.e2e_s < 0.5 + 199 * 0.0121
    assert both.e2e_s > apart.e2e_s + 0.9


def test_decode_pods_compute_short_prompts_themselves() -> None:
    local = {"local_prefill_tokens": 384, "idle_prefill_tokens": 512, "chunk_size": 1000}
    # Up to 512 tokens while the pod is idle; up to 384 during decoding, whose steps they lengthen.
    first, short, long = simulate(
        fleet(1, 1, **local), [request(output=200), request(0.6, prompt=300), request(2.5, prompt=400)]
    )
    assert first.ttft_s == pytest.approx(0.5)
    assert short.ttft_s == pytest.approx(0.3, abs=0.03)
    assert long.ttft_s == pytest.approx(0.4)
    apart, *_ = simulate(fleet(1, 1), [request(output=200), request(0.6, prompt=300)])
    assert first.e2e_s == pytest.approx(apart.e2e_s + 0.3, abs=0.03)
    cached, *_ = simulate(fleet(1, 1, **local), [request(prompt=5000, cached=4900)])
    assert cached.ttft_s == pytest.approx(0.1)


def test_a_step_takes_prompts_up_to_the_token_limit() -> None:
    five = [request(prompt=100, output=1) for _ in range(5)]
    assert [one.ttft_s for one in simulate(fleet(0, 1), five)] == pytest.approx([0.5] * 5)
    some = simulate(fleet(0, 1, enough_prompt_tokens=128), five)
    assert [one.ttft_s for one in some] == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.5])
    late = [five[0], *[request(0.05, prompt=100, output=1)] * 4]
    times = [one.ttft_s for one in simulate(fleet(0, 1), late)]
    assert times == pytest.approx([0.1, *[0.45] * 4]), "the running step is over first"


def test_a_step_that_decodes_takes_prompt_tokens_up_to_the_limit() -> None:
    load = [request(prompt=100, output=6), request(0.05, prompt=400, output=1)]
    large, small = (simulate(fleet(0, 1, enough_prompt_tokens=enough), load) for enough in (0, 100))
    # The sequence gains a token after the whole prompt, or after each 100 tokens of it.
    assert large[0].e2e_s == pytest.approx(0.1 + 0.4 + 4 * 0.011, abs=0.005)
    assert small[0].e2e_s == pytest.approx(0.1 + 0.4 + 0.011, abs=0.005)
    assert small[1].ttft_s == pytest.approx(large[1].ttft_s, abs=0.005)


def test_pods_that_share_a_machine_slow_each_other() -> None:
    shared = fleet(1, 1, contention=Contention(prefill=3.0, decode=2.0))
    text, prompt = simulate(shared, [request(prompt=100, output=101), request(1.2, prompt=100, output=1)])
    # The prompt arrives when the sequence has ended.
    assert text.e2e_s == pytest.approx(0.1 + 100 * 0.011)
    assert prompt.ttft_s == pytest.approx(0.1)
    text, prompt = simulate(shared, [request(prompt=100, output=201), request(0.5, prompt=500, output=1)])
    # Of the prompt a third of a second per second is computed while the text decodes.
    assert prompt.ttft_s == pytest.approx(1.5, abs=0.03)
    assert text.e2e_s == pytest.approx(0.1 + 200 * 0.011 + 0.75, abs=0.03)


def test_mixed_steps_multiplies_the_sum_of_both_costs() -> None:
    requests = [request(prompt=100, output=101), request(0.5, prompt=100, output=1)]
    (text, prompt), (slower_text, slower_prompt) = (
        simulate(fleet(0, 1, mixed_steps=factor), requests) for factor in (1.0, 2.0)
    )
    # One step has both: the prompt's tenth of a second and the time of the sequence.
    assert slower_prompt.ttft_s - prompt.ttft_s == pytest.approx(0.1, abs=0.015)
    assert slower_text.e2e_s - text.e2e_s == pytest.approx(0.1, abs=0.015)
    assert slower_text.ttft_s == text.ttft_s, "a prompt alone is none of these"


def test_measured_settings_are_those_of_the_pods() -> None:
    own_prefill = StepCost(per_token=0.002)
    prefill = common_pb2.PodStatus(
        role="prefill", chunk_size=256, prefill_cost=step_cost_to_proto(COSTS.prefill)
    )
    decode = common_pb2.PodStatus(
        role="decode",
        max_batch=12,
        tokens_per_step=2.5,
        local_prefill_tokens=100,
        idle_prefill_tokens=200,
        enough_prompt_tokens=128,
        block_size=64,
        usage=common_pb2.ResourceUsage(blocks_total=10),
        prefill_cost=step_cost_to_proto(own_prefill),
        decode_cost=step_cost_to_proto(COSTS.decode),
    )
    with pytest.raises(ValueError, match="send it requests first"):
        measured_fleet([prefill, common_pb2.PodStatus(role="decode")])
    assert measured_fleet([prefill, decode]) == FleetPlan(
        PodCosts(COSTS.prefill, COSTS.decode, 640, 0.0, own_prefill=own_prefill),
        num_prefill=1,
        num_decode=1,
        chunk_size=256,
        max_batch=12,
        tokens_per_step=(2.5,),
        local_prefill_tokens=100,
        idle_prefill_tokens=200,
        enough_prompt_tokens=128,
    )


def test_a_slow_link_delays_the_second_token() -> None:
    (outcome,) = simulate(fleet(1, 1, link_bytes_per_s=250_000), [request()])
    assert outcome.ttft_s == pytest.approx(0.5)
    assert outcome.e2e_s == pytest.approx(2.0 + 99 * 0.011)


def test_the_cheapest_fleet_grows_with_the_rate_and_is_minimal() -> None:
    needed = []
    for rate in (1.0, 4.0, 16.0):
        requests = poisson(rate, 300, 500, 100, spread=0.2, seed=1)
        best = cheapest(fleet, requests, SLO, 0.95)
        assert best is not None
        assert best.attainment >= 0.95
        plan = best.plan
        for prefill, decode in (
            (plan.num_prefill - 1, plan.num_decode),
            (plan.num_prefill, plan.num_decode - 1),
        ):
            if prefill and decode:
                assert evaluate(fleet(prefill, decode), requests, SLO).attainment < 0.95
        needed.append(plan.num_devices)
    assert needed == sorted(needed)
    assert needed[-1] > needed[0]


def test_objectives_that_no_fleet_meets_have_no_plan() -> None:
    requests = poisson(1.0, 30, 5000, 100, spread=0.0, seed=1)
    assert cheapest(fleet, requests, SLO, 0.95) is None
    assert cheapest_together(fleet, requests, SLO, 0.95) is None


def test_the_limit_with_the_least_slack_comes_first() -> None:
    requests = poisson(2.0, 200, 500, 100, spread=0.2, seed=2)
    result = evaluate(fleet(4, 1), requests, SloTarget("", tpot_s=0.018))
    limits = slack(result, requests, SloTarget("", tpot_s=0.018), 0.9)
    assert limits[0][0] == "memory bandwidth", "the decode step's own part"
    assert limits == sorted(limits, key=lambda limit: -limit[1])
    slow = fleet(2, 2, link_bytes_per_s=400_000)
    result = evaluate(slow, requests, SLO)
    assert slack(result, requests, SLO, result.attainment)[0][0] in ("link", "compute")


def test_the_command_prints_plans_and_writes_an_overlay_that_renders(tmp_path: Path) -> None:
    out = REPOSITORY / "deploy" / "k8s" / "overlays" / f"planned-{random.randrange(10**9)}"
    args = ["plan", "--rate", "2", "--shape", "llama-3.1-8b", "--gpu", "h100", "--prompt-tokens", "4000"]
    args += ["--output-tokens", "200", "--requests", "60", "--out", str(out)]
    try:
        done = CliRunner().invoke(app, args)
        assert done.exit_code == 0, done.output
        assert re.search(r"Best: \d+ (prefill|together)", done.output)
        assert "llama-3.1-8b on h100, 60 requests" in done.output
        assert "cannot run this fleet" not in done.output
        assert "Limiting resource: " in done.output
        kubectl = Path(sys.executable).with_name("kubectl")
        if kubectl.exists():
            rendered = subprocess.run(
                [kubectl, "kustomize", out], capture_output=True, text=True, check=True
            ).stdout
            deployments = {
                one["metadata"]["name"]: one
                for one in yaml.safe_load_all(rendered)
                if one["kind"] == "Deployment"
            }
            assert deployments["tandem-decode"]["spec"]["replicas"] >= 1
            assert 'TANDEM_MAX_BATCH: "128"' in rendered
            assert 'TANDEM_IDLE_PREFILL_TOKENS: "512"' in rendered
        again = CliRunner().invoke(app, args)
        assert again.exit_code == 1
        assert "exists already" in again.output
    finally:
        for path in out.glob("*"):
            path.unlink()
        out.rmdir()


@pytest.mark.parametrize(
    ("args", "what"),
    [
        (["--gpu", "abacus"], "--gpu abacus is unknown; use one of l40s"),
        (["--shape", "gpt"], "--shape gpt is unknown"),
        (["--ttft", "0", "--e2e", "0"], "are all 0"),
        (["--trace", "/absent"], "/absent"),
        (["--contention", "3"], "--contention '3' is not two numbers"),
        (["--contention", "3,.5"], "of at least 1"),
        (["--measured", "127.0.0.1:1"], "no gateway answers"),
        ([], "alone on 8 devices: e2e"),
    ],
)
def test_an_impossible_plan_names_the_reason(args: list[str], what: str) -> None:
    done = CliRunner().invoke(app, ["plan", "--rate", "2", "--requests", "20", *args])
    assert done.exit_code == 1
    assert what in done.output


def test_a_fleet_that_the_engine_cannot_run_is_listed_last() -> None:
    arguments = [
        "plan",
        "--rate",
        "2",
        "--requests",
        "30",
        "--prompt-tokens",
        "1000",
        "--output-tokens",
        "100",
    ]
    small = CliRunner().invoke(app, [*arguments, "--shape", "llama-3.1-8b"]).output
    (best,) = re.findall(r"Best: (.*) \(with", small)
    assert "GPUs" not in best and "GPUs" in small
    large = CliRunner().invoke(app, [*arguments, "--kv-bits", "8"]).output
    assert large.startswith("qwen2.5-72b on h200, the defaults of --shape and --gpu")
    assert large.endswith(
        "cannot run this fleet yet: the engine has no quantised KV and no tensor parallelism.\n"
    )


def test_an_overlay_is_not_overwritten(tmp_path: Path) -> None:
    result = evaluate(fleet(1, 2), [request()], SLO)
    path = write_overlay(tmp_path / "new", "../base", result)
    assert yaml.safe_load(path.read_text())["replicas"] == [
        {"name": "tandem-prefill", "count": 1},
        {"name": "tandem-decode", "count": 2},
    ]
    with pytest.raises(FileExistsError):
        write_overlay(tmp_path / "new", "../base", result)
