"""Tenants on a decode pod: connected at their first request, evicted when there are too many."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
from tandem_core.speculation import SpeculationMode
from tandem_decode.lookahead_sync import LookaheadSync
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb
from waiting import until

NOWHERE = "127.0.0.1:1"


class Pod:
    """A drafter, and clients of a service that is away."""

    def __init__(self, max_tenants: int, max_bytes: int = 1 << 30) -> None:
        self.drafter = Drafter(None, DraftPolicy(mode=SpeculationMode.GLOBAL))
        self.mirrors: list[tuple[str, weakref.ref[GlobalMirror]]] = []
        self.sync = LookaheadSync(self.drafter, self.make, 100, self.call, max_tenants, max_bytes)

    def make(self, tenant: str, mirror: GlobalMirror) -> LookaheadClient:
        self.mirrors.append((tenant, weakref.ref(mirror)))
        client = LookaheadClient(NOWHERE, pb.Namespace(tenant=tenant), "pod", mirror)
        client.start()
        return client

    async def call(self, function: Callable[[], None]) -> None:
        function()

    def serve(self, tenant: str) -> None:
        self.sync.begin(tenant)
        self.sync.end(tenant)

    def alive(self) -> list[str]:
        gc.collect()
        return [tenant for tenant, mirror in self.mirrors if mirror() is not None]


@pytest.fixture
async def pod():
    pod = Pod(max_tenants=2)
    yield pod
    await pod.sync.close()


async def test_the_least_recently_used_tenant_is_freed(pod: Pod) -> None:
    for tenant in ("a", "b", "a", "c"):
        pod.serve(tenant)
    await until(lambda: pod.alive() == ["a", "c"])
    pod.serve("b")  # connects anew
    await until(lambda: pod.alive() == ["c", "b"])
    assert pod.sync.num_tenants == 2


async def test_a_tenant_with_a_running_request_stays(pod: Pod) -> None:
    for tenant in ("a", "b", "c"):
        pod.sync.begin(tenant)
    pod.sync.push("a", "r", 0, [1, 2])
    assert pod.sync.num_tenants == 3
    pod.sync.begin("b")
    pod.sync.end("b")
    assert pod.sync.num_tenants == 3, "another request of b runs"
    pod.sync.end("b")
    await until(lambda: pod.alive() == ["a", "c"])


async def test_many_tenants_hold_no_more_than_a_few(pod: Pod) -> None:
    for number in range(200):
        pod.serve(f"tenant-{number}")
        assert pod.sync.num_tenants <= 2
    await until(lambda: pod.alive() == ["tenant-198", "tenant-199"])


async def test_a_late_eviction_leaves_the_tenants_new_mirror(pod: Pod) -> None:
    old, new = GlobalMirror(tenant="a", vocab_size=100), GlobalMirror(tenant="a", vocab_size=100)
    pod.drafter.attach(old)
    pod.drafter.attach(new)
    pod.drafter.detach("a", old)
    assert pod.drafter._mirrors == {"a": new}


def fill(mirror: GlobalMirror, num_tokens: int) -> None:
    text = tuple(range(1, 51)) * 10
    spans = [AcceptedSpan(f"r{i}", 0, text) for i in range(num_tokens // len(text))]
    mirror.apply_delta(spans, "1")


async def test_idle_tenants_leave_when_the_mirrors_have_too_many_bytes() -> None:
    pod = Pod(max_tenants=100, max_bytes=24 << 20)
    try:
        for number in range(12):
            pod.serve(str(number))
            _, mirror = pod.mirrors[-1]
            fill(mirror(), 50_000)
        pod.serve("last")
        await until(lambda: len(pod.alive()) < 12)
        assert pod.sync.num_bytes <= 24 << 20
        assert pod.alive()[-1] == "last"
    finally:
        await pod.sync.close()


async def test_running_tenants_divide_the_bytes() -> None:
    pod = Pod(max_tenants=100, max_bytes=48 << 20)
    try:
        for number in range(4):
            pod.sync.begin(str(number))
            _, mirror = pod.mirrors[-1]
            fill(mirror(), 300_000)
        before = pod.sync.num_bytes
        pod.sync.begin("last")
        await until(lambda: pod.sync.num_bytes <= 48 << 20)
        assert before > 48 << 20
        assert pod.sync.num_tenants == 5, "none with a running request leaves"
        assert all(mirror().num_tokens > 100_000 for _, mirror in pod.mirrors[:4])
    finally:
        await pod.sync.close()
