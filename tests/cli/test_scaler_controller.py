"""`tandem scaler` against an API server: leadership, replicas and failures."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from kubelet.api_stub import ApiStub
from kubernetes.aio import client
from prometheus_client import CollectorRegistry
from scaler_fleet import NAMESPACE, ScalerFleet, ServedPod
from tandem_cli.scaler.controller import Controller, ScalerMetrics, StartTime
from tandem_cli.scaler.law import Bounds, Decision, Policy
from tandem_cli.scaler.lease import Leadership
from tandem_cli.scaler.workloads import Workload, WorkloadRef, parse_workload
from tandem_service.discovery import Discovery
from waiting import until

POLICY = Policy(Bounds(0, 8), Bounds(0, 8), settle_s=2.0, window_s=1.0)


class Scaler:
    """A scaler in this process that decides when the test calls it."""

    def __init__(
        self, fleet: ScalerFleet, api: client.ApiClient, name: str = "one", lease_s: float = 60.0
    ) -> None:
        self.fleet, self.registry = fleet, CollectorRegistry()
        self.leadership = Leadership(api, NAMESPACE, "tandem-scaler-leader", name, lease_s=lease_s)
        self.controller = Controller(
            {
                "gateway": Discovery([fleet.gateway.target]),
                "prefill": Discovery([pod.target for pod in fleet.prefill]),
                "decode": Discovery([pod.target for pod in fleet.decode]),
            },
            {
                role: Workload(api, NAMESPACE, WorkloadRef("deployment", f"tandem-{role}"))
                for role in ("prefill", "decode")
            },
            self.leadership,
            POLICY,
            ScalerMetrics(self.registry),
        )

    async def tick(self, requests: int = 0, seconds: float = 0.1) -> Decision | None:
        """Counts requests, then decides."""
        self.fleet.load(requests)
        await asyncio.sleep(seconds)
        return await self.controller.tick()

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[ScalerFleet]:
    stub = ApiStub()
    await stub.start()
    made = ScalerFleet(stub)
    yield made
    made.close()
    await stub.stop()


@pytest.fixture
async def api(fleet: ScalerFleet) -> AsyncIterator[client.ApiClient]:
    settings = client.Configuration()
    settings.host = f"http://127.0.0.1:{fleet.api.port}"
    async with client.ApiClient(settings) as made:
        yield made


async def test_the_holder_of_the_lease_scales_both_roles_by_their_metrics(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    scaler = Scaler(fleet, api)
    assert await scaler.tick() is None, "one scrape tells no rate"
    await scaler.leadership.try_once()
    decision = await scaler.tick(requests=20)
    assert decision is not None
    assert fleet.replicas("prefill") == decision.prefill.wanted > 1
    assert fleet.replicas("decode") == decision.decode.wanted > 1
    assert scaler.value("tandem_scaler_changes_total", role="prefill", direction="up") == 1
    assert scaler.value("tandem_scaler_desired_replicas", role="decode") == decision.decode.wanted
    assert "requests/s" in decision.prefill.reason


async def test_a_scaler_without_the_lease_decides_but_changes_nothing(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    leader, other = Scaler(fleet, api), Scaler(fleet, api, "two")
    await leader.leadership.try_once()
    await other.leadership.try_once()
    assert (leader.leadership.leads, other.leadership.leads) == (True, False)
    await other.tick()
    decision = await other.tick(requests=20)
    assert decision is not None
    assert decision.prefill.wanted > 1
    assert fleet.replicas("prefill") == 1


async def test_a_lease_is_taken_over_after_its_time_and_never_held_twice(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    leader, other = Scaler(fleet, api, lease_s=1.0), Scaler(fleet, api, "two", lease_s=1.0)
    await leader.leadership.try_once()
    began = time.monotonic()
    while not other.leadership.leads:
        await other.leadership.try_once()
        assert not (leader.leadership.leads and other.leadership.leads)
        await asyncio.sleep(0.02)
    assert 1.0 <= time.monotonic() - began < 3.0
    assert fleet.holder == "two"
    await leader.leadership.try_once()
    assert not leader.leadership.leads


async def test_a_lease_is_released_at_a_normal_end(fleet: ScalerFleet, api: client.ApiClient) -> None:
    leader, other = Scaler(fleet, api, lease_s=60.0), Scaler(fleet, api, "two", lease_s=60.0)
    running = asyncio.create_task(leader.leadership.run())
    await until(lambda: leader.leadership.leads)
    running.cancel()
    await asyncio.wait([running])
    assert fleet.holder == ""
    await other.leadership.try_once()
    assert other.leadership.leads


async def test_one_of_two_concurrent_candidates_gets_a_free_lease(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    scalers = [Scaler(fleet, api, name, lease_s=30.0) for name in ("one", "two", "three")]
    await asyncio.gather(*(one.leadership.try_once() for one in scalers))
    assert sum(one.leadership.leads for one in scalers) == 1


async def test_a_concurrent_change_of_replicas_stays_and_decides_anew(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    scaler = Scaler(fleet, api)
    await scaler.leadership.try_once()
    await scaler.tick()

    def interfere(plural: str, name: str) -> None:
        if name == "tandem-prefill":
            fleet.api.after_get = None
            fleet.set_replicas("prefill", 2)

    fleet.api.after_get = interfere
    await scaler.tick(requests=20)
    assert fleet.replicas("prefill") == 2
    assert scaler.value("tandem_scaler_failures_total", cause="conflict") == 1
    decision = await scaler.tick(requests=20)
    assert decision is not None
    assert fleet.replicas("prefill") == decision.prefill.wanted > 2


async def test_an_outage_of_the_api_server_changes_nothing_and_needs_no_restart(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    scaler = Scaler(fleet, api, lease_s=3.0)
    await scaler.leadership.try_once()
    await scaler.tick()
    await fleet.api.stop()
    assert await scaler.tick(requests=20) is None
    assert scaler.value("tandem_scaler_failures_total", cause="api") == 1
    with pytest.raises(Exception):  # noqa: B017 - any error of a connection
        await scaler.leadership.try_once()
    await until(lambda: not scaler.leadership.leads)
    await fleet.api.start()
    await scaler.leadership.try_once()
    assert await scaler.tick(requests=20) is not None
    assert fleet.replicas("prefill") > 1


async def test_missing_rights_are_named_and_nothing_changes(
    fleet: ScalerFleet, api: client.ApiClient, caplog: pytest.LogCaptureFixture
) -> None:
    scaler = Scaler(fleet, api)
    await scaler.leadership.try_once()
    await scaler.tick()
    fleet.api.forbidden = {"update"}
    await scaler.tick(requests=20)
    assert fleet.replicas("prefill") == 1
    assert scaler.value("tandem_scaler_failures_total", cause="rights") == 2
    fleet.api.forbidden = {"get"}
    assert await scaler.tick(requests=20) is None
    fleet.api.forbidden = set()
    await scaler.tick(requests=20)
    assert fleet.replicas("prefill") > 1


async def test_no_pod_is_removed_while_one_does_not_answer(fleet: ScalerFleet, api: client.ApiClient) -> None:
    fleet.prefill.append(ServedPod())
    fleet.set_replicas("prefill", 2)
    scaler = Scaler(fleet, api, lease_s=60.0)
    await scaler.leadership.try_once()
    fleet.prefill.pop().close()
    wanted = [2]
    while wanted[-1] and len(wanted) < 200:
        decision = await scaler.tick()
        wanted += [decision.prefill.wanted] if decision is not None else []
    assert wanted[-1] == 0, "there are no requests"
    assert fleet.replicas("prefill") == 2
    assert (scaler.value("tandem_scaler_failures_total", cause="metrics") or 0) > 0


async def test_without_an_answering_gateway_nothing_is_decided(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    scaler = Scaler(fleet, api)
    await scaler.tick()
    fleet.gateway.close()
    fleet.gateway.registry = CollectorRegistry()
    assert await scaler.controller.tick() is None
    fleet.gateway = type(fleet.gateway)()


async def test_an_idle_fleet_is_scaled_to_zero_and_a_held_request_brings_it_back(
    fleet: ScalerFleet, api: client.ApiClient
) -> None:
    scaler = Scaler(fleet, api, lease_s=60.0)
    await scaler.leadership.try_once()
    for _ in range(200):
        await scaler.tick()
        if not fleet.replicas("prefill") + fleet.replicas("decode"):
            break
    assert (fleet.replicas("prefill"), fleet.replicas("decode")) == (0, 0)
    for pod in (*fleet.prefill, *fleet.decode):
        pod.close()
    gone = Scaler(ScalerFleetWithoutPods(fleet), api, lease_s=60.0)
    gone.leadership = scaler.leadership
    gone.controller._leadership = scaler.leadership
    fleet.gateway.in_flight.set(1)
    await gone.tick()
    await gone.tick()
    assert (fleet.replicas("prefill"), fleet.replicas("decode")) == (1, 1)
    fleet.prefill, fleet.decode = [], []


class ScalerFleetWithoutPods:
    """The cluster after its pods have ended."""

    def __init__(self, fleet: ScalerFleet) -> None:
        self.gateway, self.prefill, self.decode = fleet.gateway, list[ServedPod](), list[ServedPod]()

    def load(self, count: int) -> None:
        self.gateway.receive(count)


def test_the_start_time_is_learnt_from_starts() -> None:
    starts = StartTime()
    for now, wanted, ready in ((0, 1, 1), (10, 3, 1), (50, 3, 2), (100, 3, 3)):
        starts.see(now, wanted, ready)
    assert starts.seconds == pytest.approx((60 + 90) / 2)
    for now, wanted, ready in ((200, 4, 3), (210, 3, 3), (300, 3, 3)):
        starts.see(now, wanted, ready)
    assert starts.seconds == pytest.approx(75), "what was taken back tells nothing"


@pytest.mark.parametrize("text", ["tandem-decode", "job/x", "deployment/", ""])
def test_a_workload_that_cannot_be_scaled_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="deployment/NAME or statefulset/NAME"):
        parse_workload(text)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--least-decode", "9", "--most-decode", "8"], "--least-decode 9 is more than --most-decode 8"),
        (["--interval-s", "60"], "--interval-s 60 is more than a tenth of --settle-s 300"),
        (["--prefill-workload", "pod/x"], "is no deployment/NAME or statefulset/NAME"),
        (["--gateways", "nowhere"], "is no host:port"),
    ],
)
def test_contradictory_settings_are_refused_in_one_sentence(flags: list[str], said: str) -> None:
    command = [Path(sys.executable).with_name("tandem"), "scaler", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.e2e
async def test_the_second_scaler_process_takes_over_when_the_first_is_killed(
    fleet: ScalerFleet, tmp_path: Path
) -> None:
    environment = {
        **{key: value for key, value in os.environ.items() if not key.startswith(("TANDEM_", "KUBERNETES_"))},
        "KUBECONFIG": str(fleet.api.kubeconfig(tmp_path, NAMESPACE)),
    }
    flags = ["--interval-s", "0.2", "--settle-s", "600", "--lease-s", "1", "--log-format", "json"]
    flags += ["--gateways", fleet.gateway.target]
    flags += ["--prefill", fleet.prefill[0].target, "--decode", fleet.decode[0].target]
    command = [Path(sys.executable).with_name("tandem"), "scaler", *flags]

    def start(name: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.log").open("wb") as log:
            return subprocess.Popen([*command, "--pod-id", name], env=environment, stderr=log)

    processes = {name: start(name) for name in ("one", "two")}
    try:
        await until(lambda: fleet.holder != "", limit_s=60.0)
        leader = fleet.holder
        (other,) = {"one", "two"} - {leader}
        await until(lambda: "scaler runs" in (tmp_path / f"{other}.log").read_text(), limit_s=60.0)
        processes[leader].send_signal(signal.SIGKILL)
        assert fleet.replicas("prefill") == 1
        await until(lambda: fleet.holder == other, limit_s=30.0)

        async def feed() -> None:
            while True:
                fleet.load(4)
                await asyncio.sleep(0.1)

        feeding = asyncio.create_task(feed())
        await until(lambda: fleet.replicas("prefill") > 1, limit_s=30.0)
        feeding.cancel()
        processes[other].send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(processes[other].wait, 20) == 0
        assert fleet.holder == "", "released"
        lines = [json.loads(line) for line in (tmp_path / f"{other}.log").read_text().splitlines()]
        (scaled,) = [line for line in lines if line["event"] == "scaled" and line["pod_role"] == "prefill"][
            :1
        ]
        assert scaled["before"] == 1
        assert "requests/s" in scaled["why"]
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
