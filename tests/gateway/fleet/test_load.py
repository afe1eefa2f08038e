"""The works of a pod: progress between reports, works of other gateways, and requests that move."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from planned_pods import LOAD, MODEL, answer, prompt, request_of, router_over
from still_clock import Clock
from tandem_core.codec import step_cost_to_proto
from tandem_core.sampling import BeamParams
from tandem_core.slo import SloTarget
from tandem_core.step_cost import StepCost
from tandem_gateway.fleet.load import Placed, PodLoad, PodWorks, Track
from tandem_gateway.fleet.pods import Pod, Role
from tandem_proto.v1 import common_pb2

MakePod = Callable[..., Pod]


@pytest.fixture
def works(clock: Clock) -> PodWorks:
    works = PodWorks()
    works.load = LOAD
    return works


def reported(request_id: str, start: int, stop: int = 1000, due_s: float = 5.0) -> common_pb2.PromptWork:
    return common_pb2.PromptWork(request_id=request_id, due_seconds=due_s, start=start, stop=stop)


def left(works: PodWorks) -> list[int]:
    """Prompt tokens that the pod has yet to compute, by work."""
    return [job.stop - job.start for job in works.jobs({}).values()]


def placed_on(*pods: Pod, num_tokens: int = 1000, slo: SloTarget | None = None) -> Placed:
    request = request_of(range(num_tokens), **({} if slo is None else {"slo": slo}))
    effects = router_over(*pods).plan(request)
    assert effects is not None
    placed = Placed(request)
    placed.first = Track(1000.0, 1000.0, effects.route.first_s)
    placed.move(effects.route)
    return placed


# -- reports ------------------------------------------------------------------------------------------


def test_a_report_sets_costs_limits_and_free_blocks() -> None:
    report = common_pb2.PodStatus(max_batch=8, chunk_size=256, enough_prompt_tokens=64, block_size=16)
    report.prefill_cost.CopyFrom(step_cost_to_proto(StepCost(per_token=0.003)))
    report.usage.blocks_free, report.usage.blocks_cached, report.usage.blocks_total = 3, 4, 10
    report.usage.requests_waiting, report.usage.requests_running = 1, 2
    load = PodLoad.of(report)
    assert (load.model.max_batch, load.model.chunk_size, load.model.enough_prompt_tokens) == (8, 256, 64)
    assert load.model.prefill.per_token == pytest.approx(0.003)
    assert (load.knows_prompts, load.knows_texts) == (True, False)
    assert load.model.decode == PodLoad.model.decode, "a usual cost until one is measured"
    assert (load.free_blocks, load.total_blocks, load.num_requests) == (7, 10, 3)


# -- progress -----------------------------------------------------------------------------------------


def test_the_prompt_with_the_earliest_deadline_advances_between_reports(
    works: PodWorks, clock: Clock
) -> None:
    works.add(prompt(1000, due=2.0))
    works.add(prompt(500, due=1.0))
    clock.now += 0.4
    assert left(works) == pytest.approx([1000, 100], abs=1)
    clock.now += 0.3
    assert left(works) == pytest.approx([800, 0], abs=3), "then the next one, next to an answer"
    assert works.has_prompts
    clock.now += 1.0
    assert not works.has_prompts


def test_answers_slow_the_progress_of_a_prompt(works: PodWorks, clock: Clock) -> None:
    costs = replace(MODEL, decode=StepCost(per_token=0.032), enough_prompt_tokens=256, max_batch=2)
    works.load = replace(LOAD, model=costs)
    for _ in range(3):
        works.add(answer(100))
    works.add(prompt(1024))
    clock.now += 2 * (0.256 + 2 * 0.032)
    assert left(works)[3] == pytest.approx(512, abs=1), "a batch of two decodes next to 256 prompt tokens"


async def test_the_prompt_of_an_own_request_has_a_token_left_until_its_first_output_token(
    make_pod: MakePod, clock: Clock
) -> None:
    pod = make_pod("d:1")
    placed = placed_on(pod)
    pod.works.add(prompt(1000, due=math.inf))
    clock.now += 10.0
    assert left(pod.works) == [1, 1000], "nor does the next prompt advance"
    placed.computed()
    clock.now += 0.5
    assert left(pod.works)[0] == 0
    assert left(pod.works)[1] == pytest.approx(500, rel=0.01)


async def test_a_report_corrects_the_progress_of_an_own_prompt(make_pod: MakePod, clock: Clock) -> None:
    pod = make_pod("d:1")
    placed_on(pod)
    pod.works.entered("r")
    clock.now += 0.1
    pod.works.report(pod.load, [reported("r", 700)], num_foreign=0)
    assert left(pod.works) == [300]
    pod.works.report(pod.load, [reported("r", 650)], num_foreign=0)
    assert left(pod.works) == [300], "a report may be older than the progress"
    pod.works.report(pod.load, [reported("r", 1000)], num_foreign=0)
    assert left(pod.works) == [1]


async def test_a_report_of_one_prompt_does_not_correct_a_call_with_several(make_pod: MakePod) -> None:
    pod = make_pod("d:1")
    request = request_of(range(1000))
    effects = router_over(pod).plan(request, num_places=2, other_tokens=500)
    Placed(request, 2, 500).move(effects.route)
    pod.works.entered("r")
    pod.works.report(pod.load, [reported("r", 700)], num_foreign=0)
    assert left(pod.works) == [1500]


# -- other gateways -----------------------------------------------------------------------------------


def test_works_of_other_gateways_are_those_of_the_last_report(works: PodWorks, clock: Clock) -> None:
    works.report(LOAD, [reported("a", 100), reported("b", 0, due_s=-1.0)], num_foreign=4)
    first, second, *texts = works.all
    assert (first.due, second.due) == (clock.now + 5.0, clock.now - 1.0)
    assert left(works) == [900, 1000, 0, 0]
    assert works.num_sequences() == len(texts) == 2
    assert works.prompts_s(clock.now) == pytest.approx(1.0), "prompts with earlier deadlines"
    clock.now += 1.0 - 1e-9
    works.report(LOAD, [], num_foreign=1)
    assert left(works) == [0]


async def test_a_prefill_pod_decodes_nothing(make_pod: MakePod, clock: Clock) -> None:
    pod = make_pod("p:1", Role.PREFILL)
    pod.works.report(pod.load, [reported("a", 0), reported("b", 0, due_s=9.0)], num_foreign=5)
    assert [job.num_tokens for job in pod.works.jobs({}).values()] == [1, 1]
    clock.now += 1.5
    assert left(pod.works) == [500]
    assert pod.works.num_sequences() == 0


def test_own_and_ended_requests_do_not_count_as_other_gateways(works: PodWorks) -> None:
    works.entered("open")
    works.entered("ended")
    works.left("ended")
    assert works.open_ids == {"open"}
    prompts = [reported(name, 0) for name in ("open", "ended", "foreign")]
    works.report(LOAD, prompts, num_foreign=0)
    assert left(works) == [1000]


def test_the_last_ended_requests_are_remembered(works: PodWorks) -> None:
    for number in range(2000):
        works.entered(f"r{number}")
        works.left(f"r{number}")
    works.report(LOAD, [reported("r0", 0), reported("r1999", 0)], num_foreign=0)
    assert len(works.all) == 1, "the oldest one is forgotten"


# -- placed requests ----------------------------------------------------------------------------------


def num_works(pods: Sequence[Pod]) -> list[int]:
    return [len(pod.works.all) for pod in pods]


async def test_a_request_has_a_work_on_each_of_its_pods_until_its_prompt_is_computed(
    make_pod: MakePod,
) -> None:
    pods = decode, prefill = make_pod("d:1"), make_pod("p:1", Role.PREFILL)
    placed = placed_on(decode, prefill)
    assert num_works(pods) == [1, 1]
    assert placed.prompt_work is prefill.works.all[0]
    assert placed.answer_work is decode.works.all[0]
    assert not decode.works.has_prompts and prefill.works.has_prompts
    placed.computed()
    assert num_works(pods) == [1, 0]
    assert placed.prompt_work is None
    placed.leave()
    assert num_works(pods) == [0, 0]


async def test_a_request_that_moves_leaves_its_pods(make_pod: MakePod) -> None:
    pods = one, other = make_pod("a:1"), make_pod("b:1")
    placed = placed_on(one)
    effects = router_over(other).plan(placed.request)
    placed.move(effects.route)
    assert num_works(pods) == [0, 1]
    assert placed.route is effects.route


async def test_tokens_left_follow_the_answer(make_pod: MakePod) -> None:
    decode, prefill = make_pod("d:1"), make_pod("p:1", Role.PREFILL)

    def tokens_left() -> list[float]:
        return [job.num_tokens for pod in (decode, prefill) for job in pod.works.jobs({}).values()]

    placed = placed_on(decode, prefill)
    assert tokens_left() == [99, 1], "the prefill pod computes the first of 100 tokens"
    placed.computed()
    placed.gained(30, 1001.0)
    placed.gained(20, 1002.0)
    assert (placed.num_tokens, placed.first_at) == (30, 1001.0), "the longest of several choices"
    assert tokens_left() == [70]
    assert placed.route is not None
    placed.move(placed.route)
    assert tokens_left() == [69, 1], "after a loss its prompt is computed again, with the next token"


async def test_deadlines_follow_from_objectives_and_progress(make_pod: MakePod) -> None:
    slo = SloTarget("a", ttft_s=2.0, tpot_s=0.01, e2e_s=30.0)
    placed = placed_on(make_pod("d:1"), slo=slo)
    assert placed.starts_by == 1002.0
    first_s, later_s = 1001.0, 1005.0
    assert placed.ends_by(1000.0) == pytest.approx(first_s + 99 * 0.01), "from the predicted first token"
    assert placed.ends_by(later_s) == pytest.approx(later_s + 99 * 0.01), "which is late"
    placed.gained(1, 1001.5)
    assert placed.starts_by == math.inf
    assert placed.ends_by(later_s) == pytest.approx(1001.5 + 99 * 0.01)
    short = replace(placed.request, slo=replace(slo, tpot_s=0.0))
    placed.request = short
    assert placed.ends_by(later_s) == 1030.0
    placed.request = replace(short, slo=SloTarget("b"))
    assert (placed.starts_by, placed.ends_by(later_s)) == (math.inf, math.inf)


def test_a_track_includes_requests_that_arrived_later() -> None:
    track = Track(1000.0, 1000.0, 5.0)
    assert track.model_s == 5.0
    track.change(1001.0, 4.0, 6.0)
    assert (track.changed_at, track.left_s, track.model_s) == (1001.0, 6.0, 7.0)
    track.change(1003.0, 3.5, 3.5)
    assert track.model_s == 7.0, "a request that changes nothing"


async def test_a_resumed_answer_has_only_its_remaining_tokens_left(make_pod: MakePod) -> None:
    request = replace(request_of(range(1000), max_tokens=100), output_token_ids=(7,) * 90)
    effects = router_over(make_pod("a")).plan(request)
    assert effects is not None
    placed = Placed(request)
    placed.move(effects.route)
    (job,) = effects.route.decode.works.jobs({}).values()
    assert (job.num_tokens, job.stop) == (10, 1090)
    assert effects.job.num_tokens == 10


async def test_a_choice_that_begins_takes_over_its_part_of_the_calls_works(make_pod: MakePod) -> None:
    pod = make_pod("d:1")
    request, same = request_of(range(1000)), request_of(range(1000))
    other = request_of(range(5000, 5300))
    effects = router_over(pod).plan(request, num_places=3, other_tokens=300)
    assert effects is not None
    placed = Placed(request, 3, 300)
    placed.move(effects.route)
    (work,) = pod.works.all
    assert (work.num_places, left(pod.works)) == (3, [1300])
    second = placed.part(same)
    assert (work.num_places, left(pod.works)) == (2, [1300])
    third = placed.part(other)
    assert (work.num_places, left(pod.works)) == (1, [1000])
    placed.part(other)
    assert (work.num_places, left(pod.works)) == (1, [1000]), "the prompt is taken once"
    placed.move(effects.route)
    assert [(one.num_places, one.stop) for one in pod.works.all] == [(1, 1000)], "also after a loss"
    third.move(replace(effects.route, start=0, stop=300))
    second.move(replace(effects.route, start=999))
    assert left(pod.works) == [1000, 300, 1]
    placed.leave()
    third.leave()
    assert pod.works.num_sequences() == 0 and left(pod.works) == [1]
    assert placed.part(same).num_places == 1, "a call whose first choice has ended"


async def test_a_prompt_in_progress_stays_one_when_a_choice_with_another_prompt_begins(
    make_pod: MakePod, clock: Clock
) -> None:
    decode, prefill = make_pod("d:1"), make_pod("p:1", Role.PREFILL)
    request, other = request_of(range(1000)), request_of(range(5000, 5300))
    effects = router_over(decode, prefill).plan(request, num_places=3, other_tokens=300)
    assert effects is not None
    placed = Placed(request, 3, 300)
    placed.move(effects.route)
    clock.now += 1.2
    placed.part(other)
    assert left(prefill.works) == [1], "1200 tokens are predicted to be computed, but no token has come"
    assert left(decode.works) == [0]
    assert [work.num_places for pod in (decode, prefill) for work in pod.works.all] == [2, 1]


async def test_a_computed_prompt_stays_computed_when_another_choice_begins(make_pod: MakePod) -> None:
    pod = make_pod("d:1")
    placed = placed_on(pod)
    placed.computed()
    placed.part(request_of(range(1000)))
    assert not pod.works.has_prompts


async def test_a_choice_keeps_its_places_however_many_others_begin(make_pod: MakePod) -> None:
    pod = make_pod("d:1")
    router, request = router_over(pod), request_of(range(1000))
    effects = router.plan(request, num_places=2)
    assert effects is not None
    placed = Placed(request, 2)
    placed.move(effects.route)
    for _ in range(3):
        placed.part(request)
        assert [work.num_places for work in pod.works.all] == [1]
    placed.move(effects.route)
    placed.computed()
    assert pod.works.num_sequences() == 1
    assert router.plan(request).route.token_s == pytest.approx(0.002, rel=0.02)


async def test_a_beam_search_takes_over_the_places_of_its_beams(make_pod: MakePod) -> None:
    pod = make_pod("d:1")
    plain = request_of(range(100))
    search = replace(plain, sampling=replace(plain.sampling, beam_search=BeamParams(width=4)))
    effects = router_over(pod).plan(search, num_places=8)
    assert effects is not None
    placed = Placed(search, 8)
    placed.move(effects.route)
    for _ in range(2):
        assert placed.part(replace(search, request_id="other")).num_places == 4
        assert [work.num_places for work in pod.works.all] == [4]
