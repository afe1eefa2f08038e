"""Routing: prefix affinity against load, free blocks, and no sharing of prompts across tenants."""

import time
from dataclasses import replace

import pytest
from planned_pods import FixedFleet, answer, prompt, request_of, router_over
from tandem_core.codec import step_cost_to_proto
from tandem_core.pod_model import Job, Times
from tandem_core.step_cost import StepCost
from tandem_gateway.fleet.load import Placed, PodLoad
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.pods import Pod, Role
from tandem_gateway.fleet.prefix_index import PrefixIndex
from tandem_gateway.fleet.routing import Effects, Router
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import common_pb2

PROMPT = range(1000, 1000 + 40 * 64)


def give(pod: Pod, num_answers: int, num_tokens: int = 100) -> None:
    """Answers in progress, with this many tokens left."""
    for _ in range(num_answers):
        pod.works.add(answer(num_tokens))


def place(router: Router, request: TokenizedRequest) -> tuple[Placed, Effects]:
    """Sends the request to the pods that the router chooses."""
    effects, placed = router.plan(request), Placed(request)
    placed.move(effects.route)
    return placed, effects


async def test_a_conversation_returns_to_the_pod_that_holds_its_prefix(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = router_over(a, b)
    give(b, 1)
    assert router.choose(request_of(PROMPT)).decode is a
    give(a, 3)
    longer = range(PROMPT.start, PROMPT.stop + 100)
    assert router.choose(request_of(longer)).decode is a, "2.56 s of prefill outweigh two more sequences"
    assert router.choose(request_of(longer, tenant="other")).decode is b, "tenants share no cache"
    assert router.choose(request_of(range(5))).decode is b


async def test_a_much_busier_pod_is_not_chosen_for_its_prefixes(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = router_over(a, b)
    assert router.choose(request_of(PROMPT)).decode is a
    give(a, 30)
    assert router.choose(request_of(PROMPT)).decode is b


async def test_prefixes_are_counted_in_each_pods_own_blocks(make_pod):
    small, large = make_pod("a:1", block_size=16, free_blocks=50), make_pod("b:1", block_size=128)
    router = router_over(small, large)
    short, medium = range(1000, 1060), range(2000, 2120)
    assert router.choose(request_of(short), frozenset({"b:1"})).decode is small
    assert router.choose(request_of(short)).decode is small, "three blocks of 16 are cached"
    assert router.choose(request_of(medium), frozenset({"a:1"})).decode is large
    large.works.load = replace(large.load, free_blocks=40)
    assert router.choose(request_of(medium)).decode is small, "120 tokens fill no block of 128"


async def test_a_pod_without_room_for_the_prompt_comes_last(make_pod):
    full, roomy = make_pod("a:1", free_blocks=39), make_pod("b:1", free_blocks=40)
    give(roomy, 20)
    router = router_over(full, roomy)
    assert router.choose(request_of(PROMPT)).decode is roomy
    assert router.choose(request_of(PROMPT), frozenset({"b:1"})).decode is full


async def test_with_equal_load_the_pod_with_most_free_blocks_wins(make_pod):
    router = router_over(make_pod("a:1", free_blocks=50), make_pod("b:1", free_blocks=60))
    assert router.choose(request_of(range(5))).decode.target == "b:1"


async def test_timelines_decide_between_the_pods_of_a_simple_estimate(make_pod):
    ending, lasting = make_pod("a:1"), make_pod("b:1")
    give(ending, 3, num_tokens=2)
    give(lasting, 2, num_tokens=1000)
    route = router_over(ending, lasting).plan(request_of(range(64))).route
    assert route.decode is ending, "it has more sequences, but they end at once"
    assert route.end_s == pytest.approx(0.064 + 99 * 0.001, abs=0.01)


async def test_a_request_counts_as_load_once_it_has_its_pods(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = router_over(a, b)
    placed, effects = place(router, request_of(range(64)))
    assert effects.route.decode is a
    assert router.plan(request_of(range(64))).route.decode is b
    placed.leave()
    assert router.plan(request_of(range(64))).route.decode is a


async def test_prompts_and_answers_of_other_gateways_count_as_their_pod_reports_them(make_pod):
    pod = make_pod("a:1")
    router = router_over(pod)
    alone = router.plan(request_of(range(64))).route
    prompts = [common_pb2.PromptWork(request_id="x", due_seconds=-1.0, start=0, stop=1024)]
    pod.works.report(pod.load, prompts, num_foreign=1)
    route = router.plan(request_of(range(64))).route
    # Half of a step has passed. The other answer then decodes next to the prompt.
    assert route.first_s - alone.first_s == pytest.approx(1.024 - 0.512 / 2 + 0.001)
    pod.works.report(pod.load, [], num_foreign=1)
    route = router.plan(request_of(range(64))).route
    assert route.token_s == pytest.approx(2 * alone.token_s)


async def test_a_prompt_shares_its_steps_with_the_sequences_that_decode(make_pod):
    pod = make_pod("a:1", decode=StepCost(per_step=0.02, per_token=0.01))
    router = router_over(pod)
    assert router.plan(request_of(range(600))).route.first_s == pytest.approx(0.6)
    give(pod, 2)
    of_chunks, half_a_step = 2 * 2 * 0.01, (0.02 + 2 * 0.01) / 2
    route = router.plan(request_of(range(600))).route
    assert route.first_s == pytest.approx(0.6 + of_chunks + half_a_step)
    pod.works.add(prompt(100))
    half_a_step = (0.1 + 2 * 0.01) / 2
    assert router.plan(request_of(range(600))).route.first_s == pytest.approx(0.6 + of_chunks + half_a_step)


async def test_a_prompt_next_to_answers_takes_more_steps(make_pod):
    pod = make_pod("a:1")
    report = common_pb2.PodStatus(chunk_size=512, enough_prompt_tokens=128)
    report.decode_cost.CopyFrom(step_cost_to_proto(StepCost(per_token=0.01)))
    pod.works.load = PodLoad.of(report)
    router = router_over(pod)
    assert router.plan(request_of(range(600))).route.first_s == pytest.approx(0.6)
    give(pod, 2)
    half_a_step = 2 * 0.01 / 2
    first_s = router.plan(request_of(range(600))).route.first_s
    assert first_s == pytest.approx(0.6 + 5 * 2 * 0.01 + half_a_step)
    for no_limit in (0, 1024):
        report.enough_prompt_tokens = no_limit
        assert PodLoad.of(report).model.enough_prompt_tokens == 512, "as alone"


async def test_unhealthy_and_excluded_pods_are_not_chosen(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = router_over(a, b)
    a.healthy = False
    assert router.choose(request_of(range(5))).decode is b
    assert router.choose(request_of(range(5)), frozenset({"b:1"})) is None


async def test_the_cache_of_a_pod_is_forgotten_when_it_leaves(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1", free_blocks=90)
    fleet = FixedFleet(a, b)
    router = Router(fleet, OutputLengths())
    assert router.choose(request_of(PROMPT)).decode is a
    fleet.members.remove(a)
    assert router.choose(request_of(range(5))).decode is b
    fleet.members.append(a)
    give(a, 1)
    assert router.choose(request_of(PROMPT)).decode is b, "a came back with an empty cache"


async def test_prefill_pods_are_ordered_least_busy_first(make_pod):
    pods = [make_pod("p:1", Role.PREFILL), make_pod("p:2", Role.PREFILL), make_pod("d:1")]
    pods[0].works.add(prompt(500))
    route = router_over(*pods).choose(request_of(range(5)))
    assert [pod.target for pod in route.prefill] == ["p:2", "p:1"]


async def test_kv_stays_in_a_zone_unless_another_one_is_clearly_faster(make_pod):
    near, far = make_pod("a:1", role=Role.PREFILL), make_pod("b:1", role=Role.PREFILL)
    decode = make_pod("d:1")
    decode.zone, near.zone, far.zone = "z1", "z1", "z2"
    router = router_over(decode, far, near)
    near.works.add(prompt(200))
    assert router.plan(request_of(PROMPT)).route.prefill == (near, far), "0.2 s later, but in the zone"
    another = prompt(200)
    near.works.add(another)
    assert router.plan(request_of(PROMPT)).route.prefill == (far, near), "0.4 s later"
    far.zone = ""
    near.works.remove(another)
    assert router.plan(request_of(PROMPT)).route.prefill == (far, near), "an unknown zone is not far"


async def test_a_decode_pod_is_chosen_in_the_zone_of_the_prefill_pod(make_pod):
    prefill = make_pod("p:1", role=Role.PREFILL)
    far, near = make_pod("a:1"), make_pod("b:1")
    far.zone, near.zone, prefill.zone = "z1", "z2", "z2"
    assert router_over(far, near, prefill).plan(request_of(PROMPT)).route.decode is near


async def test_a_prompt_returns_to_the_prefill_pod_that_computed_it(make_pod):
    one, two = make_pod("p:1", Role.PREFILL), make_pod("p:2", Role.PREFILL)
    router = router_over(one, two, make_pod("d:1"))
    other = prompt(1000)
    two.works.add(other)
    assert router.choose(request_of(PROMPT)).prefill[0] is one
    two.works.remove(other)
    one.works.add(other)
    assert router.choose(request_of(PROMPT)).prefill[0] is one, "2,560 cached tokens outweigh a second"
    assert router.choose(request_of(range(5))).prefill[0] is two
    one.works.add(prompt(4000))
    assert router.choose(request_of(PROMPT)).prefill[0] is two


async def test_a_faster_pod_gets_the_prompt(make_pod):
    slow = make_pod("p:1", Role.PREFILL, prefill=StepCost(per_token=0.003))
    fast = make_pod("p:2", Role.PREFILL)
    fast.works.add(prompt(3000))
    router = router_over(slow, fast, make_pod("d:1"))
    route = router.plan(request_of(PROMPT)).route
    assert route.prefill[0] is fast, "3 s of other prompts and 2.56 s are less than 7.68 s"
    assert route.prefill_s == pytest.approx(2.56)
    assert route.first_s == pytest.approx(3.0 - 0.512 / 2 + 2.56)


async def test_short_prompts_are_planned_where_the_decode_pod_computes_them(make_pod):
    decode = make_pod("d:1", local_prefill_tokens=50, idle_prefill_tokens=100)
    prefill = make_pod("p:1", Role.PREFILL)
    router = router_over(decode, prefill)
    assert router.plan(request_of(range(60))).route.computes_prompt is decode, "it is idle"
    decode.works.entered("r1")
    assert router.plan(request_of(range(60))).route.computes_prompt is prefill
    assert router.plan(request_of(range(40))).route.computes_prompt is decode
    router.choose(request_of(PROMPT))
    more = range(PROMPT.start, PROMPT.stop + 40)
    assert router.plan(request_of(more)).route.computes_prompt is decode, "most of it is cached"
    decode.works.left("r1")
    decode.works.load = replace(decode.load, num_requests=1)
    assert router.plan(request_of(range(60))).route.computes_prompt is prefill, "of another gateway"


@pytest.mark.parametrize(("num_tokens", "prompt_logprobs"), [(128, None), (640, 0)])
async def test_a_prompt_that_its_decode_pod_computes_is_not_in_the_cache_of_a_prefill_pod(
    make_pod, num_tokens, prompt_logprobs
):
    decode, prefill = make_pod("d:1", local_prefill_tokens=150), make_pod("p:1", Role.PREFILL)
    router = router_over(decode, prefill)
    first, longer = request_of(range(num_tokens)), request_of(range(1280))
    first = replace(first, sampling=replace(first.sampling, prompt_logprobs=prompt_logprobs))
    assert router.choose(first).computes_prompt is decode
    route = router.plan(longer).route
    assert (route.computes_prompt, route.start) == (prefill, 0)


async def test_the_last_token_of_a_cached_prompt_is_computed_again(make_pod):
    router = router_over(make_pod("d:1"))
    router.choose(request_of(PROMPT))
    assert router.plan(request_of(PROMPT)).route.start == len(PROMPT) - 1


async def test_the_work_of_a_request_is_divided_among_the_pods_of_a_role(make_pod):
    """The prompt takes 2.56 s, and the answer .1 s."""
    decode, *prefill = make_pod("d:1"), make_pod("p:1", Role.PREFILL), make_pod("p:2", Role.PREFILL)
    for num_prefill, work_s in ((0, 2.66), (1, 2.56), (2, 1.28)):
        route = router_over(decode, *prefill[:num_prefill]).plan(request_of(PROMPT)).route
        assert route.work_s == pytest.approx(work_s), "of two roles, the larger work"


async def test_a_plan_changes_nothing(make_pod):
    router = router_over(make_pod("d:1"))
    plans = [router.plan(request_of(PROMPT)).route for _ in range(2)]
    assert plans[0].first_s == plans[1].first_s
    assert plans[0].start == plans[1].start == 0, "only a request that is sent fills the cache"


async def test_the_time_per_token_includes_the_request_in_the_batch(make_pod):
    pod = make_pod("d:1", tokens_per_step=(2.0,), max_batch=4)
    give(pod, 3, num_tokens=1000)
    router = router_over(pod)
    route = router.plan(request_of(range(64))).route
    assert (route.token_s, route.alone["tpot"]) == (pytest.approx(0.002, rel=0.02), pytest.approx(0.0005))
    costs = replace(pod.load.model, tokens_per_step=(4.0, 2.0, 1.0))
    pod.works.load = replace(pod.load, model=costs)
    token_s = router.plan(request_of(range(64))).route.token_s
    assert token_s == pytest.approx(0.004 / 1.0, rel=0.02), "drafts gain less in a batch"


async def test_a_request_waits_for_a_place_in_a_full_batch(make_pod):
    pod = make_pod("d:1", max_batch=4)
    give(pod, 3, num_tokens=1000)
    give(pod, 1, num_tokens=200)
    route = router_over(pod).plan(request_of(range(64))).route
    assert route.first_s == pytest.approx(200 * 0.004 + 0.064 + 3 * 0.001, abs=0.004)
    assert route.token_s == pytest.approx(0.004)


async def test_sequences_that_end_before_the_answer_count_for_their_part_of_it(make_pod):
    pod = make_pod("d:1")
    for num_tokens in (50, 1000, 1):
        give(pod, 1, num_tokens)
    route = router_over(pod).plan(request_of(range(64))).route
    assert route.token_s == pytest.approx(0.001 * (1 + 0.5 + 1), rel=0.02)


async def test_prompts_on_the_decode_pod_delay_the_answer(make_pod):
    pod, prefill = make_pod("d:1", local_prefill_tokens=100), make_pod("p:1", Role.PREFILL)
    router = router_over(pod, prefill)
    request, longer = request_of(range(64)), request_of(range(200))
    alone, alone_elsewhere = (router.plan(one).route for one in (request, longer))
    pod.works.add(prompt(512, request.due - 1))
    pod.works.add(prompt(256, request.due + 1))
    route, before_s, behind_s = router.plan(request).route, 0.512 / 2, 0.256
    # The prompt behind it fits into the same step.
    assert route.first_s - alone.first_s == pytest.approx(before_s + behind_s)
    assert route.end_s - alone.end_s == pytest.approx(before_s + behind_s)
    elsewhere = router.plan(longer).route
    assert elsewhere.computes_prompt is prefill
    # The decode pod computes the prompts with earlier deadlines while the prefill pod computes this one.
    assert elsewhere.end_s - alone_elsewhere.end_s == pytest.approx(before_s + behind_s - 0.2, abs=0.01)


async def test_an_answer_begins_on_its_decode_pod_when_the_prefill_pod_has_computed_its_prompt(make_pod):
    decode, prefill = make_pod("d:1"), make_pod("p:1", Role.PREFILL)
    router = router_over(decode, prefill)
    placed, effects = place(router, request_of(PROMPT))
    assert effects.route.computes_prompt is prefill
    assert effects.route.first_s == pytest.approx(2.56)
    assert effects.route.end_s == pytest.approx(2.56 + 99 * 0.001)
    # The prompt of an earlier deadline comes first.
    urgent = replace(request_of(range(512)), due_s=1.0)
    before, after = router.plan(urgent).others[placed]
    assert before.first_s == pytest.approx(2.56 - 0.512 / 2), "half of a step has passed"
    assert before.end_s == pytest.approx(before.first_s + 99 * 0.001)
    assert after.first_s - before.first_s == pytest.approx(0.512)
    # With a later deadline only the time per token grows.
    before, after = router.plan(replace(urgent, due_s=100.0)).others[placed]
    assert after.first_s == pytest.approx(before.first_s)


async def test_a_prompt_that_is_computed_later_delays_the_end_of_its_answer(make_pod):
    one, other, prefill = make_pod("a:1"), make_pod("b:1"), make_pod("p:1", Role.PREFILL)
    urgent = replace(request_of(range(512)), due_s=1.0)
    router = router_over(one, other, prefill)
    placed, effects = place(router, request_of(PROMPT))
    assert effects.route.decode is one
    for num_tokens, excluded in ((99, "b:1"), (0, "a:1")):
        plan = router.plan(urgent, frozenset({excluded}))
        assert plan.route.decode.target != excluded
        before, after = plan.others[placed]
        assert after.end_s - before.end_s == pytest.approx(0.512, abs=1e-6 + 0.001 * num_tokens)
        assert after.end_s - after.first_s == pytest.approx(99 * 0.001, abs=1e-6 + 0.001 * num_tokens)


async def test_a_short_request_delays_only_answers_on_its_decode_pod(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = router_over(a, b)
    placed, _ = place(router, request_of(range(64)))
    placed.computed()
    placed.gained(1, 1000.0)
    on_a = router.plan(request_of(range(500, 564)), frozenset({"b:1"}))
    before, after = on_a.others[placed]
    assert after.end_s - before.end_s == pytest.approx(0.064 + (99 - 2) * 0.001, abs=0.003)
    assert router.plan(request_of(range(500, 564)), frozenset({"a:1"})).others == {}


async def test_a_prompt_on_a_decode_pod_delays_no_first_token_of_a_prefill_pod(make_pod):
    decode = make_pod("d:1", local_prefill_tokens=100, decode=StepCost(per_token=0.01))
    router = router_over(decode, make_pod("p:1", Role.PREFILL))
    placed, _ = place(router, request_of(range(300)))
    before, after = router.plan(request_of(range(500, 564))).others[placed]
    assert after.first_s == before.first_s
    assert after.end_s > before.end_s + 0.1, "they decode next to each other"


async def test_a_plan_can_be_reconsidered_next_to_requests_that_may_come(make_pod):
    pod = make_pod("a:1")
    router = router_over(pod)
    effects = router.plan(request_of(range(64)))
    coming = Job(0.0, 0, 500, 100, 550, ready_s=0.0)
    found = router.reconsider(effects, [coming])
    assert found.route.decode is pod
    assert found.route.first_s == pytest.approx(effects.route.first_s + 0.5, abs=0.002)
    without = router.times_without(effects, [coming])[coming]
    assert without == Times(pytest.approx(0.5), pytest.approx(0.5 + 99 * 0.001))
    assert found.coming[coming].end_s > without.end_s


async def test_several_places_slow_the_answer_as_separate_requests_do(make_pod):
    router = router_over(make_pod("a:1"))
    one, three = (router.plan(request_of(range(64)), num_places=num).route for num in (1, 3))
    assert three.token_s == pytest.approx(3 * one.token_s)
    later = router.plan(request_of(range(64)), other_tokens=200).route
    assert later.first_s == pytest.approx(one.first_s + 0.2), "other prompts of the call come first"


async def test_predictions_need_costs_that_the_pods_measured_and_fresh_reports(make_pod):
    pod = make_pod("a:1")
    router = router_over(pod)
    assert router.plan(request_of(range(64))).route.is_known
    pod.works.load = replace(pod.load, knows_prompts=False)
    assert not router.plan(request_of(range(64))).route.is_known
    pod.works.load, pod.last_seen = replace(pod.load, knows_prompts=True), None
    assert not router.plan(request_of(range(64))).route.is_known
    assert router_over().plan(request_of(range(64))) is None


def test_lengths_of_answers_are_learned_by_tenant_and_beginning():
    lengths = OutputLengths()
    order, other = request_of(range(64, 200)), request_of(range(300, 500))
    assert set(lengths.of(order)) == {100}, "before anything is known, max_tokens or 128"
    for _ in range(50):
        lengths.observe(order, 20)
    assert set(lengths.of(request_of(range(64, 190)))) == {20}
    assert set(lengths.of(other)) == {20}, "as the tenant's other answers"
    for _ in range(4):
        lengths.observe(other, 60)
    assert set(lengths.of(other)) == {60}
    assert set(lengths.of(request_of(range(64, 190), tenant="b"))) == {100}
    assert set(lengths.of(request_of(range(64, 190), max_tokens=5))) == {5}
    assert set(lengths.of(request_of(range(64, 190), min_tokens=70))) == {70}


def test_missing_lengths_count_as_the_usual_length():
    lengths, asked = OutputLengths(), request_of(range(64, 200))
    lengths.observe(asked, 10)
    assert sorted(lengths.of(asked)) == [10, 100, 100, 100]
    longer = request_of(range(64, 200), max_tokens=1000)
    assert sorted(lengths.of(longer)) == [10, 128, 128, 128], "not its max_tokens"


def test_a_cut_answer_counts_as_at_least_the_usual_length():
    lengths = OutputLengths()
    for _ in range(8):
        lengths.observe(request_of(range(64, 200), max_tokens=16), 16, is_cut=True)
    assert set(lengths.of(request_of(range(64, 200), max_tokens=16))) == {16}
    assert set(lengths.of(request_of(range(64, 200), max_tokens=1000))) == {128}, "as if nothing were known"
    for _ in range(16):
        lengths.observe(request_of(range(64, 200), max_tokens=300), 300, is_cut=True)
    assert set(lengths.of(request_of(range(64, 200), max_tokens=1000))) == {300}, "at least that long"


async def test_a_pod_without_requests_of_any_gateway_is_idle(pods, make_pod):
    other = await pods()
    pod = make_pod(other.target)
    await pod.poll()
    assert pod.is_idle
    other.num_running = 3
    await pod.poll()
    assert pod.is_idle, "they may be this gateway's, which ended meanwhile"
    await pod.poll()
    assert not pod.is_idle
    other.num_running = 0
    await pod.poll()
    assert pod.is_idle
    pod.works.entered("r1")
    assert not pod.is_idle


async def test_the_report_of_a_silent_engine_becomes_old(pods, make_pod):
    other = await pods()
    pod = make_pod(other.target)
    for age_s, is_fresh in ((4.0, True), (40.0, False)):
        other.age_seconds = age_s
        await pod.poll()
        pod.last_seen = time.monotonic()
        assert pod.is_fresh is is_fresh
    slow = StepCost(per_token=40.0 / pod.load.model.chunk_size)
    pod.works.load = replace(pod.load, model=replace(pod.load.model, prefill=slow))
    assert pod.is_fresh, "its longest step takes 40 s"


async def test_remaining_tokens_follow_from_longer_answers(make_pod):
    lengths, asked = OutputLengths(), request_of(range(64, 200))
    router = Router(FixedFleet(make_pod("d:1")), lengths)
    for length in (10, 10, 10, 50, 54):
        lengths.observe(asked, length)
    route = router.plan(asked).route
    assert route.num_output == 27
    assert [route.tokens_left(so_far) for so_far in (0, 9, 10, 49, 50)] == [27, 18, 42, 3, 4]
    assert route.tokens_left(54) == 13, "none was longer: a quarter more"


def test_the_index_forgets_the_end_of_the_oldest_prompt_first():
    index = PrefixIndex(max_blocks_per_pod=4)
    old, new = (b"a", b"b", b"c"), (b"x", b"y")
    index.add("pod", old)
    index.add("pod", new)
    assert index.num_matching("pod", new) == 2
    assert index.num_matching("pod", old) == 2
    index.forget("pod")
    assert index.num_matching("pod", new) == 0


def test_the_index_is_bounded_over_all_pods_and_the_fullest_gives_way():
    index = PrefixIndex(max_blocks_per_pod=100, max_blocks=200)
    index.add("quiet", [b"q"])
    for number in range(48):
        for pod in range(48):
            index.add(f"pod-{pod}", [b"%d-%d" % (number, block) for block in range(5)])
    assert index.num_blocks == 200
    assert index.num_matching("quiet", [b"q"]) == 1
