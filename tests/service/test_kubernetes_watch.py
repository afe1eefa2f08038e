"""Discovery of a Service's pods, against an API server that watches as Kubernetes does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubelet.api_stub import ENDPOINT_SLICES, ApiStub, endpoint, endpoint_slice
from tandem_service import kubernetes_watch
from tandem_service.discovery import Discovery, Endpoint
from waiting import pause_async, until, until_async


class Followed:
    """A discovery of `k8s://decode:21200`, and whether it has changed."""

    def __init__(self) -> None:
        self.discovery = Discovery(["k8s://decode:21200"])
        self.changed = asyncio.Event()

    async def start(self) -> None:
        await self.discovery.start(self.changed.set)

    async def usable(self) -> list[str]:
        return [found.target for found in await self.discovery.endpoints() if not found.withheld]

    async def until(self, *targets: str) -> None:
        async def is_so() -> bool:
            return await self.usable() == list(targets)

        await until_async(is_so)


@pytest.fixture
async def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ApiStub]:
    stub = ApiStub()
    await stub.start()
    monkeypatch.setenv("KUBECONFIG", str(stub.kubeconfig(tmp_path)))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    yield stub
    await stub.stop()


@pytest.fixture
async def followed(api: ApiStub) -> AsyncIterator[Followed]:
    api.put(ENDPOINT_SLICES, endpoint_slice("decode", endpoint("10.0.0.1", zone="a"), endpoint("10.0.0.2")))
    api.put(ENDPOINT_SLICES, endpoint_slice("prefill", endpoint("10.0.9.9")))
    followed = Followed()
    await followed.start()
    await followed.until("10.0.0.1:21200", "10.0.0.2:21200")
    yield followed
    await followed.discovery.close()


async def test_the_pods_of_the_service_are_listed_with_their_zones(followed: Followed) -> None:
    assert await followed.discovery.endpoints() == (
        Endpoint("10.0.0.1:21200", zone="a"),
        Endpoint("10.0.0.2:21200"),
    )


async def test_a_terminating_or_unready_pod_gets_no_new_requests(api: ApiStub, followed: Followed) -> None:
    api.put(
        ENDPOINT_SLICES,
        endpoint_slice(
            "decode",
            endpoint("10.0.0.1", terminating=True),
            endpoint("10.0.0.2"),
            endpoint("10.0.0.3", ready=False),
        ),
    )
    await followed.until("10.0.0.2:21200")
    assert await followed.discovery.endpoints() == (
        Endpoint("10.0.0.1:21200", withheld="it terminates"),
        Endpoint("10.0.0.2:21200"),
        Endpoint("10.0.0.3:21200", withheld="it is not ready"),
    )


async def test_a_change_is_known_within_a_fraction_of_a_second(api: ApiStub, followed: Followed) -> None:
    took = []
    for count in range(100):
        gone = count % 2 == 0
        followed.changed.clear()
        changed_at = time.monotonic()
        api.put(
            ENDPOINT_SLICES,
            endpoint_slice("decode", endpoint("10.0.0.1", terminating=gone), endpoint("10.0.0.2")),
        )
        await followed.changed.wait()
        took.append(time.monotonic() - changed_at)
    assert sorted(took)[98] < 0.5


async def test_a_service_without_pods_has_none(api: ApiStub, followed: Followed) -> None:
    api.delete(ENDPOINT_SLICES, "default", "decode-abcde")
    await followed.until()
    assert await followed.discovery.endpoints() == ()


async def test_a_cut_watch_continues_from_its_version(api: ApiStub, followed: Followed) -> None:
    await until(lambda: "watch" in api.requests)
    api.disconnect()
    api.put(ENDPOINT_SLICES, endpoint_slice("decode", endpoint("10.0.0.3")))
    await followed.until("10.0.0.3:21200")
    assert api.requests.count("list") == 1


async def test_bookmarks_advance_the_version_without_changes(api: ApiStub) -> None:
    api.bookmark_s = 0.05
    followed = Followed()
    api.put(ENDPOINT_SLICES, endpoint_slice("decode", endpoint("10.0.0.1")))
    await followed.start()
    await followed.until("10.0.0.1:21200")
    for number in range(20):  # of another Service
        api.put(ENDPOINT_SLICES, endpoint_slice("prefill", endpoint(f"10.0.9.{number}")))
    await pause_async(0.3)
    api.compact()
    api.disconnect()
    num_watches = api.requests.count("watch")
    await until(lambda: api.requests.count("watch") > num_watches)
    await pause_async(0.3)
    assert api.requests.count("list") == 1, "the version of the last bookmark is not forgotten"
    await followed.discovery.close()


@pytest.mark.parametrize("is_open", [True, False])
async def test_an_expired_version_causes_a_new_list(api: ApiStub, followed: Followed, is_open: bool) -> None:
    """410 is an event of the open watch, or the answer to the next one."""
    await until(lambda: "watch" in api.requests)
    if not is_open:
        await api.stop()
    api.put(ENDPOINT_SLICES, endpoint_slice("decode", endpoint("10.0.0.4")))
    api.compact()
    if not is_open:
        await api.start()
    await followed.until("10.0.0.4:21200")


@pytest.mark.parametrize("outage_s", [1.0, pytest.param(60.0, marks=pytest.mark.wide)])
async def test_known_pods_stay_while_the_api_server_is_down(
    api: ApiStub, followed: Followed, outage_s: float
) -> None:
    await api.stop()
    until = time.monotonic() + outage_s
    while time.monotonic() < until:
        assert await followed.usable() == ["10.0.0.1:21200", "10.0.0.2:21200"]
        await pause_async(0.1)
    api.put(ENDPOINT_SLICES, endpoint_slice("decode", endpoint("10.0.0.5")))
    await api.start()
    await followed.until("10.0.0.5:21200")


@pytest.mark.parametrize("verb", ["list", "watch"])
async def test_a_missing_role_is_named_and_retried_with_pauses(
    api: ApiStub, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    api.forbidden = {verb}
    followed = Followed()
    await followed.start()
    await pause_async(1.5)
    assert len(api.requests) < 12
    assert "may not list and watch endpointslices.discovery.k8s.io" in capsys.readouterr().out
    api.put(ENDPOINT_SLICES, endpoint_slice("decode", endpoint("10.0.0.1")))
    api.forbidden = set()
    await followed.until("10.0.0.1:21200")
    await followed.discovery.close()


async def test_a_watch_that_ends_at_once_is_retried_with_pauses(api: ApiStub) -> None:
    api.longest_watch_s = 0.01
    followed = Followed()
    await followed.start()
    await pause_async(1.5)
    assert 1 <= api.requests.count("watch") <= 3
    await followed.discovery.close()


def test_a_pod_with_two_addresses_or_in_two_slices_counts_once() -> None:
    from kubernetes.aio import client

    def made(*addresses: tuple[str, bool], family: str = "IPv4") -> client.V1EndpointSlice:
        return client.V1EndpointSlice(
            address_type=family,
            endpoints=[
                client.V1Endpoint(
                    addresses=[address], conditions=client.V1EndpointConditions(terminating=leaves)
                )
                for address, leaves in addresses
            ],
            metadata=client.V1ObjectMeta(name="x"),
        )

    v4, v6 = made(("10.0.0.1", False)), made(("fd::1", False), family="IPv6")
    assert [e.target for e in kubernetes_watch.endpoints_of([v6, v4], 7)] == ["10.0.0.1:7"]
    assert [e.target for e in kubernetes_watch.endpoints_of([v6], 7)] == ["[fd::1]:7"]
    for slices in ([v4, made(("10.0.0.1", True))], [made(("10.0.0.1", True)), v4]):
        (found,) = kubernetes_watch.endpoints_of(slices, 7)
        assert found.withheld
