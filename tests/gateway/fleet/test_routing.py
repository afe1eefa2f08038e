"""Routing: prefix affinity against load, room, and prompts that share nothing across tenants."""

import asyncio
import time
from dataclasses import replace

import pytest
from tandem_core.codec import step_cost_to_proto
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_core.step_cost import StepCost
from tandem_gateway.fleet.pod_load import PodLoad
from tandem_gateway.fleet.pods import Pod, Role
from tandem_gateway.fleet.routing import OutputLengths, PrefixIndex, Router
from tandem_gateway.request import TokenizedRequest
from tandem_proto.v1 import common_pb2

#: A millisecond per prompt token, and per output token and sequence of the batch.
COSTS = {"prefill_cost": StepCost(per_token=0.001), "decode_cost": StepCost(per_token=0.001)}


class FixedFleet:
    """A fleet that never changes by itself; the router asks for healthy pods only."""

    def __init__(self, *pods: Pod) -> None:
        self.pods = list(pods)

    def healthy(self, role: Role) -> list[Pod]:
        return [pod for pod in self.pods if pod.role is role and pod.healthy]


@pytest.fixture
async def make_pod():
    made = []

    def make(target: str, role: Role = Role.DECODE, **load: object) -> Pod:
        pod = Pod(role, target)
        pod.healthy = True
        pod.load = PodLoad(**{"free_blocks": 100, "total_blocks": 100, "block_size": 64, **COSTS, **load})
        made.append(pod)
        return pod

    yield make
    await asyncio.gather(*(pod.channel.close() for pod in made))


def _request(
    tokens: range, tenant: str = "default", max_tokens: int = 100, min_tokens: int = 0
) -> TokenizedRequest:
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return TokenizedRequest("r", tenant, tuple(tokens), sampling, DEFAULT_SLO_CLASSES["batch"], 0.0, 1.0)


def _router(*pods: Pod) -> Router:
    return Router(FixedFleet(*pods), OutputLengths())


PROMPT = range(1000, 1000 + 40 * 64)


async def test_a_conversation_returns_to_the_pod_that_holds_its_prefix(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = _router(a, b)
    b.tokens_left = {"1": 100}
    assert router.choose(_request(PROMPT)).decode is a
    a.tokens_left, b.tokens_left = {"2": 100, "3": 100}, {}
    longer = range(PROMPT.start, PROMPT.stop + 100)
    assert router.choose(_request(longer)).decode is a, "2.56 s of prefill outweigh two more sequences"
    assert router.choose(_request(longer, tenant="other")).decode is b, "tenants share no cache"
    assert router.choose(_request(range(5))).decode is b


async def test_a_much_busier_pod_loses_even_its_own_prefixes(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = _router(a, b)
    assert router.choose(_request(PROMPT)).decode is a
    a.num_foreign = 30
    assert router.choose(_request(PROMPT)).decode is b


async def test_prefixes_are_counted_in_each_pods_own_blocks(make_pod):
    small, large = make_pod("a:1", block_size=16, free_blocks=50), make_pod("b:1", block_size=128)
    router = _router(small, large)
    short, medium = range(1000, 1060), range(2000, 2120)
    assert router.choose(_request(short), frozenset({"b:1"})).decode is small
    assert router.choose(_request(short)).decode is small, "three blocks of 16 are cached"
    assert router.choose(_request(medium), frozenset({"a:1"})).decode is large
    large.load = replace(large.load, free_blocks=40)
    assert router.choose(_request(medium)).decode is small, "120 tokens fill no block of 128"


async def test_a_pod_without_room_for_the_prompt_comes_last(make_pod):
    full, roomy = make_pod("a:1", free_blocks=39), make_pod("b:1", free_blocks=40, num_requests=20)
    router = _router(full, roomy)
    assert router.choose(_request(PROMPT)).decode is roomy
    assert router.choose(_request(PROMPT), frozenset({"b:1"})).decode is full


async def test_with_equal_load_the_pod_with_most_free_blocks_wins(make_pod):
    router = _router(make_pod("a:1", free_blocks=50), make_pod("b:1", free_blocks=60))
    assert router.choose(_request(range(5))).decode.target == "b:1"


async def test_a_prompt_shares_its_steps_with_the_sequences_that_decode(make_pod):
    costs = {"decode_cost": StepCost(per_step=0.02, per_token=0.01), "chunk_size": 512}
    pod = make_pod("a:1", local_prefill_tokens=4096, **costs)
    router = _router(pod)
    assert router.plan(_request(range(600))).ttft_s == pytest.approx(0.6)
    pod.tokens_left = {"1": 100, "2": 100}
    of_chunks, half_a_step = 2 * 2 * 0.01, (0.02 + 2 * 0.01) / 2
    assert router.plan(_request(range(600))).join_s == pytest.approx(of_chunks + half_a_step)
    pod.tokens_left["3"] = 100
    pod.backlog.add("3", 0.0, 0.1)  # its prompt is computed now
    assert router.plan(_request(range(600))).join_s == pytest.approx(3 * 2 * 0.01)


async def test_a_prompt_beside_texts_takes_more_steps(make_pod):
    pod = make_pod("a:1", local_prefill_tokens=4096)
    report = common_pb2.PodStatus(chunk_size=512, enough_prompt_tokens=128, local_prefill_tokens=4096)
    report.decode_cost.CopyFrom(step_cost_to_proto(StepCost(per_token=0.01)))
    pod.load = PodLoad.of(report)
    router = _router(pod)
    assert router.plan(_request(range(600))).join_s == 0.0
    pod.tokens_left = {"1": 100, "2": 100}
    half_a_step = 2 * 0.01 / 2
    assert router.plan(_request(range(600))).join_s == pytest.approx(5 * 2 * 0.01 + half_a_step)
    report.enough_prompt_tokens = 0
    assert PodLoad.of(report).chunk_beside_texts == 512, "without such a limit, as alone"


async def test_sequences_decode_in_the_steps_of_prompts(make_pod):
    pod = make_pod("a:1", decode_cost=StepCost(per_step=0.02, per_token=0.01), tokens_per_step=(2.0,))
    alone_s = pod.load.answer_seconds(10, 1, 100, num_prompts=0, prompts_s=0.0)
    assert alone_s == pytest.approx(10 / 2 * 0.03)
    beside_s = pod.load.answer_seconds(10, 1, 100, num_prompts=3, prompts_s=0.6)
    assert beside_s == pytest.approx(0.6 + 3 * 0.01 + (10 - 3 * 2) / 2 * 0.03)
    many_s = pod.load.answer_seconds(10, 1, 100, num_prompts=10, prompts_s=2.0)
    assert many_s == pytest.approx((2.0 + 10 * 0.01) / 2), "it ends in the fifth of ten steps"


async def test_unhealthy_and_excluded_pods_are_not_chosen(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = _router(a, b)
    a.healthy = False
    assert router.choose(_request(range(5))).decode is b
    assert router.choose(_request(range(5)), frozenset({"b:1"})) is None


async def test_what_a_pod_held_is_forgotten_when_it_leaves(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1", free_blocks=90)
    fleet = FixedFleet(a, b)
    router = Router(fleet, OutputLengths())
    assert router.choose(_request(PROMPT)).decode is a
    fleet.pods.remove(a)
    assert router.choose(_request(range(5))).decode is b
    fleet.pods.append(a)
    a.tokens_left = {"1": 100}
    assert router.choose(_request(PROMPT)).decode is b, "a came back with an empty cache"


async def test_prefill_pods_are_ordered_least_busy_first(make_pod):
    pods = [make_pod("p:1", Role.PREFILL), make_pod("p:2", Role.PREFILL), make_pod("d:1")]
    pods[0].backlog.add("r1", 0.0, 0.5)
    route = _router(*pods).choose(_request(range(5)))
    assert [pod.target for pod in route.prefill] == ["p:2", "p:1"]


async def test_kv_stays_in_a_zone_unless_another_one_is_clearly_faster(make_pod):
    near, far = make_pod("a:1", role=Role.PREFILL), make_pod("b:1", role=Role.PREFILL)
    decode = make_pod("d:1")
    decode.zone, near.zone, far.zone = "z1", "z1", "z2"
    router = _router(decode, far, near)
    near.backlog.add("other", 0.5, 0.2)
    assert router.plan(_request(PROMPT)).prefill == (near, far), "0.2 s later, but in the zone"
    near.backlog.add("another", 0.5, 0.2)
    assert router.plan(_request(PROMPT)).prefill == (far, near), "0.4 s later"
    far.zone = ""
    near.backlog.remove("another")
    assert router.plan(_request(PROMPT)).prefill == (far, near), "an unknown zone is not far"


async def test_a_decode_pod_is_chosen_in_the_zone_of_the_prefill_pod(make_pod):
    prefill = make_pod("p:1", role=Role.PREFILL)
    far, near = make_pod("a:1"), make_pod("b:1")
    far.zone, near.zone, prefill.zone = "z1", "z2", "z2"
    assert _router(far, near, prefill).plan(_request(PROMPT)).decode is near


async def test_a_prompt_returns_to_the_prefill_pod_that_computed_it(make_pod):
    one, two = make_pod("p:1", Role.PREFILL), make_pod("p:2", Role.PREFILL)
    router = _router(one, two, make_pod("d:1"))
    two.backlog.add("r1", 0.0, 1.0)
    assert router.choose(_request(PROMPT)).prefill[0] is one
    two.backlog.remove("r1")
    one.backlog.add("r1", 0.0, 1.0)
    assert router.choose(_request(PROMPT)).prefill[0] is one, "2,560 cached tokens outweigh a second"
    assert router.choose(_request(range(5))).prefill[0] is two
    one.backlog.add("r2", 0.0, 4.0)
    assert router.choose(_request(PROMPT)).prefill[0] is two


async def test_a_faster_pod_gets_the_prompt(make_pod):
    slow = make_pod("p:1", Role.PREFILL, prefill_cost=StepCost(per_token=0.003))
    fast = make_pod("p:2", Role.PREFILL)
    fast.backlog.add("r1", 0.0, 3.0)
    router = _router(slow, fast, make_pod("d:1"))
    route = router.plan(_request(PROMPT))
    assert route.prefill[0] is fast, "3 s of others' prompts and 2.56 s are less than 7.68 s"
    assert (route.wait_s, route.prefill_s) == (pytest.approx(3.0, abs=0.1), pytest.approx(2.56))


async def test_short_prompts_are_planned_where_the_decode_pod_computes_them(make_pod):
    decode = make_pod("d:1", local_prefill_tokens=50, idle_prefill_tokens=100)
    prefill = make_pod("p:1", Role.PREFILL)
    router = _router(decode, prefill)
    assert router.plan(_request(range(60))).computes_prompt is decode, "it is idle"
    decode.in_flight = 1
    assert router.plan(_request(range(60))).computes_prompt is prefill
    assert router.plan(_request(range(40))).computes_prompt is decode
    router.choose(_request(PROMPT))
    more = range(PROMPT.start, PROMPT.stop + 40)
    assert router.plan(_request(more)).computes_prompt is decode, "most of it is cached"


async def test_a_plan_remembers_nothing(make_pod):
    router = _router(make_pod("d:1"))
    assert router.plan(_request(PROMPT)).prefill_s == router.plan(_request(PROMPT)).prefill_s


async def test_the_time_per_token_is_that_of_the_batch_with_the_request(make_pod):
    pod = make_pod("d:1", tokens_per_step=(2.0,), max_batch=4)
    pod.num_foreign = 3
    router = _router(pod)
    route = router.plan(_request(range(64)))
    assert (route.token_s, route.alone_token_s) == (pytest.approx(0.002), pytest.approx(0.0005))
    pod.num_foreign = 7
    assert router.plan(_request(range(64))).token_s == pytest.approx(0.004), "eight take turns in four places"
    pod.load, pod.num_foreign = replace(pod.load, tokens_per_step=(4.0, 2.0, 1.0)), 1
    assert router.plan(_request(range(64))).token_s == pytest.approx(0.002 / 2.0), (
        "drafts get less of a batch"
    )
    pod.num_foreign = 3
    assert router.plan(_request(range(64))).token_s == pytest.approx(0.004 / 1.0)


async def test_sequences_that_end_before_the_answer_count_for_their_part_of_it(make_pod):
    pod = make_pod("d:1")
    pod.tokens_left = {"half": 50, "longer": 1000, "at its end": 1}
    pod.num_foreign = 1
    route = _router(pod).plan(_request(range(64), max_tokens=100))
    assert route.num_beside == pytest.approx(0.5 + 1 + 0.01 + 1)
    assert route.token_s == pytest.approx(0.001 * (1 + route.num_beside))


async def test_prompts_that_the_decode_pod_computes_meanwhile_make_the_answer_later(make_pod):
    pod, prefill = make_pod("d:1", local_prefill_tokens=100), make_pod("p:1", Role.PREFILL)
    router = _router(pod, prefill)
    request = _request(range(64))
    alone = router.plan(request)
    pod.backlog.add("before", request.due - 1, 0.5)
    pod.backlog.add("behind", request.due + 1, 0.25)
    route = router.plan(request)
    assert (route.wait_s, route.beside_s) == (pytest.approx(0.5, abs=0.01), pytest.approx(0.25, abs=0.01))
    assert route.e2e_s - alone.e2e_s == pytest.approx(0.75, abs=0.02)
    elsewhere = router.plan(_request(range(200)))
    assert elsewhere.computes_prompt is prefill
    assert elsewhere.beside_s == pytest.approx(0.75 - 0.2, abs=0.02), "they are computed while the prompt is"


def test_lengths_of_answers_are_learned_by_tenant_and_beginning():
    lengths = OutputLengths()
    order, other = _request(range(64, 200)), _request(range(300, 500))
    assert set(lengths.of(order)) == {100}, "before anything is known, max_tokens or 128"
    for _ in range(50):
        lengths.observe(order, 20)
    assert set(lengths.of(_request(range(64, 190)))) == {20}
    assert set(lengths.of(other)) == {20}, "as the tenant's other answers"
    for _ in range(4):
        lengths.observe(other, 60)
    assert set(lengths.of(other)) == {60}
    assert set(lengths.of(_request(range(64, 190), tenant="b"))) == {100}
    assert set(lengths.of(_request(range(64, 190), max_tokens=5))) == {5}
    assert set(lengths.of(_request(range(64, 190), min_tokens=70))) == {70}


def test_the_first_answers_that_end_are_short_and_tell_little():
    lengths, asked = OutputLengths(), _request(range(64, 200))
    lengths.observe(asked, 10)
    assert sorted(lengths.of(asked)) == [10, 100, 100, 100]
    longer = _request(range(64, 200), max_tokens=1000)
    assert sorted(lengths.of(longer)) == [10, 128, 128, 128], "not its max_tokens"


def test_an_answer_that_was_cut_tells_little_of_longer_ones():
    lengths = OutputLengths()
    for _ in range(8):
        lengths.observe(_request(range(64, 200), max_tokens=16), 16, is_cut=True)
    assert set(lengths.of(_request(range(64, 200), max_tokens=16))) == {16}
    assert set(lengths.of(_request(range(64, 200), max_tokens=1000))) == {128}, "as if nothing were known"
    for _ in range(16):
        lengths.observe(_request(range(64, 200), max_tokens=300), 300, is_cut=True)
    assert set(lengths.of(_request(range(64, 200), max_tokens=1000))) == {300}, "so many at least"


async def test_a_pod_is_idle_if_it_has_requests_of_no_gateway(pods, make_pod):
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
    pod.in_flight = 1
    assert not pod.is_idle


async def test_a_report_of_an_engine_that_says_nothing_becomes_old(pods, make_pod):
    other = await pods()
    pod = make_pod(other.target)
    assert not pod.is_fresh
    for age_s, is_fresh in ((4.0, True), (40.0, False)):
        other.age_seconds = age_s
        await pod.poll()
        pod.last_seen = time.monotonic()
        assert pod.is_fresh is is_fresh
    pod.load = replace(pod.load, prefill_cost=StepCost(per_token=40.0 / pod.load.chunk_size))
    assert pod.is_fresh, "its longest step takes 40 s"


async def test_what_is_left_of_an_answer_follows_from_those_that_were_longer(make_pod):
    lengths, asked = OutputLengths(), _request(range(64, 200))
    router = Router(FixedFleet(make_pod("d:1")), lengths)
    for length in (10, 10, 10, 50, 54):
        lengths.observe(asked, length)
    route = router.plan(asked)
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
