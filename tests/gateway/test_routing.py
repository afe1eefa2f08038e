"""Routing: prefix affinity against load, room, and prompts that share nothing across tenants."""

import asyncio
from dataclasses import replace

import pytest
from tandem_core.sampling import SamplingParams
from tandem_core.slo import SLO_CLASSES
from tandem_gateway.fleet import Pod, PodLoad, Role
from tandem_gateway.request import TokenizedRequest
from tandem_gateway.routing import PrefixIndex, Router


class FixedFleet:
    """A fleet that never changes by itself; the router asks for healthy pods only."""

    def __init__(self, *pods: Pod) -> None:
        self.pods = list(pods)

    def healthy(self, role: Role) -> list[Pod]:
        return [pod for pod in self.pods if pod.role is role and pod.healthy]


@pytest.fixture
async def make_pod():
    made = []

    def make(target: str, role: Role = Role.DECODE, **load: int) -> Pod:
        pod = Pod(role, target)
        pod.healthy = True
        pod.load = PodLoad(**{"free_blocks": 100, "total_blocks": 100, "block_size": 64, **load})
        made.append(pod)
        return pod

    yield make
    await asyncio.gather(*(pod.channel.close() for pod in made))


def _request(tokens: range, tenant: str = "default") -> TokenizedRequest:
    return TokenizedRequest("r", tenant, tuple(tokens), SamplingParams(), SLO_CLASSES["batch"], 0.0, 1.0)


PROMPT = range(1000, 1000 + 40 * 64)


async def test_a_conversation_returns_to_the_pod_that_holds_its_prefix(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = Router(FixedFleet(a, b))
    b.in_flight = 1
    assert router.choose(_request(PROMPT)).decode is a
    a.in_flight, b.in_flight = 2, 0
    longer = range(PROMPT.start, PROMPT.stop + 100)
    assert router.choose(_request(longer)).decode is a, "2560 cached tokens outweigh two requests"
    assert router.choose(_request(longer, tenant="other")).decode is b, "tenants share no cache"
    assert router.choose(_request(range(5))).decode is b


async def test_a_much_busier_pod_loses_even_its_own_prefixes(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = Router(FixedFleet(a, b))
    assert router.choose(_request(PROMPT)).decode is a
    a.load = PodLoad(free_blocks=100, total_blocks=100, block_size=64, num_requests=8)
    assert router.choose(_request(PROMPT)).decode is b


async def test_prefixes_are_counted_in_each_pods_own_blocks(make_pod):
    small, large = make_pod("a:1", block_size=16, free_blocks=50), make_pod("b:1", block_size=128)
    router = Router(FixedFleet(small, large))
    short, medium = range(1000, 1060), range(2000, 2120)
    assert router.choose(_request(short), frozenset({"b:1"})).decode is small
    assert router.choose(_request(short)).decode is small, "three blocks of 16 are cached"
    assert router.choose(_request(medium), frozenset({"a:1"})).decode is large
    large.load = replace(large.load, free_blocks=40)
    assert router.choose(_request(medium)).decode is small, "120 tokens fill no block of 128"


async def test_a_pod_without_room_for_the_prompt_comes_last(make_pod):
    full, roomy = make_pod("a:1", free_blocks=39), make_pod("b:1", free_blocks=40, num_requests=20)
    router = Router(FixedFleet(full, roomy))
    assert router.choose(_request(PROMPT)).decode is roomy
    assert router.choose(_request(PROMPT), frozenset({"b:1"})).decode is full


async def test_with_equal_load_the_pod_with_most_free_blocks_wins(make_pod):
    router = Router(FixedFleet(make_pod("a:1", free_blocks=50), make_pod("b:1", free_blocks=60)))
    assert router.choose(_request(range(5))).decode.target == "b:1"


async def test_unhealthy_and_excluded_pods_are_not_chosen(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1")
    router = Router(FixedFleet(a, b))
    a.healthy = False
    assert router.choose(_request(range(5))).decode is b
    assert router.choose(_request(range(5)), frozenset({"b:1"})) is None


async def test_what_a_pod_held_is_forgotten_when_it_leaves(make_pod):
    a, b = make_pod("a:1"), make_pod("b:1", free_blocks=90)
    fleet = FixedFleet(a, b)
    router = Router(fleet)
    assert router.choose(_request(PROMPT)).decode is a
    fleet.pods.remove(a)
    assert router.choose(_request(range(5))).decode is b
    fleet.pods.append(a)
    a.in_flight = 1
    assert router.choose(_request(PROMPT)).decode is b, "a came back with an empty cache"


async def test_prefill_pods_are_ordered_least_busy_first(make_pod):
    pods = [make_pod("p:1", Role.PREFILL, num_requests=2), make_pod("p:2", Role.PREFILL), make_pod("d:1")]
    route = Router(FixedFleet(*pods)).choose(_request(range(5)))
    assert [pod.target for pod in route.prefill] == ["p:2", "p:1"]


async def test_a_prompt_returns_to_the_prefill_pod_that_computed_it(make_pod):
    one, two = make_pod("p:1", Role.PREFILL), make_pod("p:2", Role.PREFILL)
    router = Router(FixedFleet(one, two, make_pod("d:1")))
    two.in_flight = 1
    assert router.choose(_request(PROMPT)).prefill[0] is one
    one.in_flight, two.in_flight = 1, 0
    assert router.choose(_request(PROMPT)).prefill[0] is one, "2,560 cached tokens outweigh one request"
    assert router.choose(_request(range(5))).prefill[0] is two
    one.in_flight = 2
    assert router.choose(_request(PROMPT)).prefill[0] is two


def test_the_index_forgets_the_end_of_the_oldest_prompt_first():
    index = PrefixIndex(max_blocks_per_pod=4)
    old, new = (b"a", b"b", b"c"), (b"x", b"y")
    index.add("pod", old)
    index.add("pod", new)
    assert index.num_matching("pod", new) == 2
    assert index.num_matching("pod", old) == 2
    index.forget("pod")
    assert index.num_matching("pod", new) == 0
