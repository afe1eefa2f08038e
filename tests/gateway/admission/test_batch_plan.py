"""When the sequences of a full decode pod begin and end."""

from types import SimpleNamespace

import pytest
from tandem_core.step_cost import StepCost
from tandem_gateway.admission.batch_plan import BatchPlan, Turn
from tandem_gateway.fleet.pod_load import PodLoad

#: A step takes .1 s whatever is in it, and gives each sequence one token.
STEP_S = 0.1


def plan_of(*turns: Turn, max_batch: int = 2, num_foreign: int = 0) -> BatchPlan:
    cost = StepCost(per_step=STEP_S)
    load = PodLoad(prefill_cost=cost, decode_cost=cost, tokens_per_step=(1.0,), max_batch=max_batch)
    return BatchPlan(SimpleNamespace(load=load, num_foreign=num_foreign), turns, context=100)


def turn(due: float, num_tokens: float, *, num_places: int = 1, prompt_s: float = 0.0) -> Turn:
    return Turn(due, num_places, prompt_s, num_tokens)


def test_nobody_waits_while_there_are_places():
    one, other = turn(1, 10), turn(2, 20)
    assert not plan_of(one, other).is_full
    assert plan_of(one, other, turn(3, 1)).is_full


def test_other_gateways_have_their_part_of_the_places():
    turns = [turn(n, 10) for n in range(4)]
    assert not plan_of(*turns, max_batch=8, num_foreign=4).is_full
    assert plan_of(*turns, max_batch=8, num_foreign=6).num_places == 3
    assert plan_of(*turns, max_batch=8, num_foreign=12).num_places == 2, "a quarter of all is here"
    assert plan_of(*turns, max_batch=8, num_foreign=400).num_places == 1


def test_places_go_to_those_that_are_due_earliest():
    short, long, late = turn(1, 10), turn(2, 30), turn(9, 10)
    plan = plan_of(late, long, short)
    assert plan.times(short) == pytest.approx((0, 1.0))
    assert plan.times(long) == pytest.approx((0, 3.0))
    assert plan.times(late) == pytest.approx((1.0, 2.0)), "when the first of the two ends"


def test_who_is_due_earlier_takes_the_place_of_one_that_runs():
    runs = [turn(5, 10), turn(6, 10)]
    urgent = turn(1, 5)
    plan = plan_of(*runs, urgent)
    assert plan.times(urgent)[0] == 0
    assert plan.times(runs[0])[0] == 0
    assert plan.times(runs[1]) == pytest.approx((0.5, 1.5)), "it is paused until the urgent one ends"


def test_several_choices_wait_for_as_many_places():
    first, second, beam = turn(1, 10), turn(2, 20), turn(3, 5, num_places=2)
    plan = plan_of(first, second, beam)
    assert plan.times(beam)[0] == pytest.approx(2.0)
    wide = turn(0, 5, num_places=7)
    assert plan_of(wide, turn(1, 5)).times(wide)[0] == 0, "more than there are: it begins nevertheless"


def test_prompts_count_for_those_that_run_when_they_begin():
    """One that waits for a place is not computed beside the answers that have one."""
    long, short, waits = turn(1, 40), turn(2, 10), turn(3, 10, prompt_s=0.8)
    plan = plan_of(long, short, waits)
    assert plan.times(waits)[0] == pytest.approx(1.0)
    assert plan.prompts(0, 1.0) == (0, 0.0)
    assert plan.prompts(0, 4.0) == (1, 0.8)
    # Of its forty tokens one comes in the step of the prompt, which takes .8 s.
    assert plan.times(long)[1] == pytest.approx(0.8 + 39 * STEP_S)
    assert plan.times(short)[1] == pytest.approx(1.0)
