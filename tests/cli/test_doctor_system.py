"""`tandem doctor` on a running system: real pods and gateways in this process, with faults in their reports
or their connections."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis.asyncio as redis
from redis_servers import RedisServer, answers
from tandem_cli.doctor.examine import examine_system, run_checks
from tandem_cli.doctor.finding import Finding
from tandem_cli.doctor.probes import certificates as shown_certificates
from tandem_cli.doctor.probes import kv_path, redis_rights, shared_answers
from tandem_cli.doctor.system import Access, Gateway, Lookahead, Pod, System, ask_by_gateways
from tandem_cli.doctor.system_checks import SYSTEM_CHECKS
from tandem_cli.up import certificates
from tandem_cli.up.up_plan import certificate_files
from tandem_core import codec
from tandem_core.slo import SloTarget
from tandem_core.step_cost import StepCost
from tandem_decode.main import open_pod as open_decode
from tandem_decode.settings import DecodeSettings
from tandem_gateway.main import GatewayProcess
from tandem_gateway.settings import GatewaySettings
from tandem_prefill.main import open_pod as open_prefill
from tandem_prefill.settings import PrefillSettings
from tandem_proto.v1 import gateway_pb2, lookahead_pb2
from tandem_service.redis_client import RedisAddress
from tandem_service.tls import PodTls, Role
from toy_models import SIZES
from waiting import until_async


@asynccontextmanager
async def running(
    model: Path, *, num_gateways: int = 1, redis_url: str = "", tls_dir: Path | None = None
) -> AsyncIterator[list[str]]:
    """A prefill pod, a decode pod and gateways; yields the gateways' addresses."""
    async with AsyncExitStack() as stack:
        engine = {**SIZES, **role_tls(tls_dir, Role.PREFILL)}
        p = await stack.enter_async_context(open_prefill(PrefillSettings(model=model, pod_id="p0", **engine)))
        engine = {"local_prefill_tokens": 32, "idle_prefill_tokens": 32, **SIZES}
        engine |= {"speculation": "local", **role_tls(tls_dir, Role.DECODE)}
        d = await stack.enter_async_context(open_decode(DecodeSettings(model=model, pod_id="d0", **engine)))
        targets = []
        for number in range(num_gateways):
            settings = GatewaySettings(
                model=model,
                grpc_port=0,
                http_port=0,
                pod_id=f"g{number}",
                decode=f"127.0.0.1:{d.port}",
                prefill=f"127.0.0.1:{p.port}",
                poll_interval_s=0.2,
                redis_url=redis_url,
                **role_tls(tls_dir, Role.GATEWAY),
            )
            process = GatewayProcess(settings)
            await process.start()
            stack.push_async_callback(process.stop)
            targets.append(f"127.0.0.1:{process.grpc_port}")
        yield targets


def role_tls(folder: Path | None, role: Role) -> dict[str, object]:
    """The settings pod_tls_* of a role."""
    if folder is None:
        return {}
    files = certificate_files(folder, role)
    return {"pod_tls_cert": files.cert, "pod_tls_key": files.key, "pod_tls_ca": files.ca}


async def healthy(targets: list[str], access: Access, address: RedisAddress | None = None) -> System:
    """Waits until each gateway uses both pods; returns the system."""
    found: list[System] = []

    async def is_there() -> bool:
        found[:] = [await ask_by_gateways(targets, access, address)]
        return all(
            len(gateway.fleet.pods) == 2 and all(pod.healthy for pod in gateway.fleet.pods)
            for gateway in found[0].gateways
        )

    await until_async(is_there)
    return found[0]


@pytest.fixture(scope="module")
def system(tiny_model: Path) -> System:
    """The status of a healthy system."""

    async def ask() -> System:
        async with running(tiny_model) as targets:
            return await healthy(targets, Access())

    return asyncio.run(ask())


async def test_a_healthy_system_has_no_findings(tiny_model: Path, tmp_path: Path) -> None:
    """Two gateways that share a Redis, TLS between pods."""
    certificates.prepare(tmp_path / "tls")
    server = RedisServer(tmp_path / "redis")
    await server.start()
    try:
        await answers(redis.Redis.from_url(server.url))
        access = Access(PodTls(certificate_files(tmp_path / "tls", Role.GATEWAY)))
        async with running(
            tiny_model, num_gateways=2, redis_url=server.url, tls_dir=tmp_path / "tls"
        ) as targets:
            found = await healthy(targets, access, RedisAddress(server.url))
            assert await examine_system(found) == []
    finally:
        await server.stop()


# -- reports of the processes ----------------------------------------------------------------------


def pod(system: System, role: Role) -> Pod:
    (found,) = system.of(role)
    return found


def with_pod(system: System, changed: Pod) -> System:
    return replace(system, pods=tuple(changed if one.role is changed.role else one for one in system.pods))


def with_status(role: Role, **fields: object) -> Callable[[System], System]:
    def seed(system: System) -> System:
        one = pod(system, role)
        status = type(one.status)()
        status.CopyFrom(one.status)
        for name, value in fields.items():
            if isinstance(value, int | float | str):
                setattr(status, name, value)
            else:
                getattr(status, name).CopyFrom(value)
        return with_pod(system, replace(one, status=status))

    return seed


def with_gateway(change: Callable[[Gateway], Gateway]) -> Callable[[System], System]:
    return lambda system: replace(system, gateways=tuple(change(one) for one in system.gateways))


def with_class(slo: SloTarget) -> Callable[[System], System]:
    def change(gateway: Gateway) -> Gateway:
        fleet = gateway_pb2.GetFleetStatusResponse()
        fleet.CopyFrom(gateway.fleet)
        fleet.slo_classes.append(codec.slo_to_proto(slo))
        return replace(gateway, fleet=fleet)

    return with_gateway(change)


def without_decode_pods(gateway: Gateway) -> Gateway:
    fleet = gateway_pb2.GetFleetStatusResponse()
    fleet.CopyFrom(gateway.fleet)
    del fleet.pods[:]
    return replace(gateway, fleet=fleet)


def with_unused_pod(gateway: Gateway) -> Gateway:
    fleet = gateway_pb2.GetFleetStatusResponse()
    fleet.CopyFrom(gateway.fleet)
    fleet.pods[0].healthy, fleet.pods[0].cause = False, "connection refused"
    return replace(gateway, fleet=fleet)


def late_clock(system: System) -> System:
    one = pod(system, Role.DECODE)
    assert one.clock is not None
    return with_pod(system, replace(one, clock=replace(one.clock, ahead_s=-30.0)))


def with_violation(system: System) -> System:
    one = pod(system, Role.PREFILL)
    status = type(one.status)()
    status.CopyFrom(one.status)
    status.usage.violations.append("block 7 is owned twice")
    return with_pod(system, replace(one, status=status))


@dataclass(frozen=True)
class Fault:
    check: str
    says: str
    seed: Callable[[System], System]


FAULTS = [
    Fault(
        "reachable",
        "UNAVAILABLE",
        lambda s: with_pod(s, replace(pod(s, Role.DECODE), error="UNAVAILABLE: refused", is_serving=False)),
    ),
    Fault(
        "serving", "does not serve", lambda s: with_pod(s, replace(pod(s, Role.PREFILL), is_serving=False))
    ),
    Fault("used-pods", "It knows no decode pod", with_gateway(without_decode_pods)),
    Fault("used-pods", "connection refused", with_gateway(with_unused_pod)),
    Fault("revision", "different models or revisions", with_status(Role.PREFILL, model_revision="f" * 64)),
    Fault("kv-layout", "dtype", with_status(Role.PREFILL, kv_layout="model_revision=x; dtype=bfloat16")),
    Fault("version", "9.9.9", with_status(Role.DECODE, version="9.9.9")),
    Fault("clocks", "30.0 s behind", late_clock),
    Fault("objectives", "No pod can meet TTFT", with_class(SloTarget("fast", ttft_s=1e-6, is_strict=True))),
    Fault("objectives", "No pod can meet TPOT", with_class(SloTarget("fast", tpot_s=1e-7))),
    Fault("objectives", "No pod can meet E2E", with_class(SloTarget("fast", e2e_s=1e-5))),
    Fault("kv-room", "--max-model-len", with_status(Role.DECODE, max_model_len=512)),
    Fault("kv-room", "(blocks)", with_status(Role.PREFILL, block_size=8)),
    Fault("invariants", "block 7 is owned twice", with_violation),
    Fault(
        "lookahead-redis",
        "does not reach Redis",
        lambda s: replace(
            s, lookahead=(Lookahead("127.0.0.1:1", lookahead_pb2.GetLookaheadStatusResponse()),)
        ),
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.says}")
def test_exactly_the_reported_fault_is_found(system: System, fault: Fault) -> None:
    assert list(run_checks(SYSTEM_CHECKS, system)) == []
    findings = list(run_checks(SYSTEM_CHECKS, fault.seed(system)))
    assert {one.check for one in findings} == {fault.check}, findings
    assert any(fault.says in one.what for one in findings), findings
    assert all(one.where and one.what.endswith(".") and one.remedy.endswith(".") for one in findings)


def test_every_check_of_a_system_has_a_seeded_fault() -> None:
    assert {check.__name__.replace("_", "-") for check in SYSTEM_CHECKS} == {one.check for one in FAULTS}


def test_an_objective_that_no_pod_meets_is_an_error_only_if_strict(system: System) -> None:
    for is_strict, severity in ((True, "error"), (False, "warning")):
        seeded = with_class(SloTarget("fast", ttft_s=1e-6, is_strict=is_strict))(system)
        (finding,) = run_checks(SYSTEM_CHECKS, seeded)
        assert finding.severity == severity


def test_pods_that_report_no_costs_are_not_judged(system: System) -> None:
    unknown = codec.step_cost_to_proto(StepCost())
    silent = with_status(Role.DECODE, decode_cost=unknown)(with_class(SloTarget("f", ttft_s=1e-6))(system))
    assert list(run_checks(SYSTEM_CHECKS, silent)) == []


# -- trials ----------------------------------------------------------------------------------------


async def found_by(probe: Callable[[System], AsyncIterator[Finding]], system: System) -> list[Finding]:
    return [finding async for finding in probe(system)]


async def test_kv_that_a_prefill_pod_cannot_send_is_named(tiny_model: Path) -> None:
    """The decode pod names an address at which nothing listens for KV."""
    async with running(tiny_model) as targets:
        found = await healthy(targets, Access())
        assert await found_by(kv_path, found) == []
        dead = replace(pod(found, Role.PREFILL), target="127.0.0.1:1")
        (finding,) = await found_by(kv_path, with_pod(found, dead))
        assert "No KV arrived" in finding.what
        assert finding.where == "KV from prefill pod p0 at 127.0.0.1:1 to " + pod(found, Role.DECODE).where
        short = with_status(Role.DECODE, local_prefill_tokens=2000)(found)
        (finding,) = await found_by(kv_path, short)
        assert "Not tested" in finding.what
        assert finding.severity == "warning"


async def test_a_trial_without_an_answer_in_time_may_be_due_to_load(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny_model) as targets:
        found = await healthy(targets, Access())
        monkeypatch.setattr("tandem_cli.doctor.probes._REQUEST_TIMEOUT_S", 0.0)
        (finding,) = await found_by(kv_path, found)
        assert "DEADLINE_EXCEEDED" in finding.what
        assert "repeat without load" in finding.remedy


async def test_an_operator_s_certificate_cannot_test_the_kv_path(tiny_model: Path, tmp_path: Path) -> None:
    certificates.prepare(tmp_path)
    async with running(tiny_model, tls_dir=tmp_path) as targets:
        access = Access(PodTls(certificate_files(tmp_path, Role.OPERATOR)))
        (finding,) = await found_by(kv_path, await healthy(targets, access))
        assert "PERMISSION_DENIED" in finding.what
        assert "certificate of a gateway" in finding.remedy
        # Without a certificate, no pod answers.
        plain = await ask_by_gateways(targets, Access(), None)
        findings = list(run_checks(SYSTEM_CHECKS, plain))
        assert [one.check for one in findings] == ["reachable", "reachable"]
        assert all("--pod-tls-cert" in one.remedy for one in findings)


async def test_gateways_without_a_common_redis_are_named(tiny_model: Path) -> None:
    async with running(tiny_model, num_gateways=2) as targets:
        found = await healthy(targets, Access())
        findings = await found_by(shared_answers, found)
        assert len(findings) == 2
        assert "cannot be resumed" in findings[0].what


class TestRedis:
    async def rights(self, url: str) -> list[Finding]:
        return await found_by(redis_rights, System(Access(), (), (), (), RedisAddress(url)))

    async def test_redis_must_answer(self, tmp_path: Path) -> None:
        (finding,) = await self.rights(f"unix://{tmp_path}/none.sock")
        assert "does not answer" in finding.what

    async def test_missing_redis_rights_and_an_eviction_policy_are_named(self, tmp_path: Path) -> None:
        server = RedisServer(tmp_path / "redis")
        await server.start()
        try:
            admin = redis.Redis.from_url(server.url)
            await answers(admin)
            assert await self.rights(server.url) == []
            assert await admin.keys("*") == []  # nothing is left
            await admin.execute_command(
                "ACL", "SETUSER", "narrow", "on", ">secret", "~tandem:answer:*", "~tandem:gateway:*", "+@all"
            )
            url = server.url.replace("unix://", "unix://narrow:secret@")
            (finding,) = await self.rights(url)
            assert "SET tandem:lookahead:2:*" in finding.what
            assert "tandem:answer" not in finding.what
            assert "secret" not in finding.where
            await admin.config_set("maxmemory-policy", "allkeys-lru")
            (finding,) = await self.rights(server.url)
            assert "allkeys-lru" in finding.what
            assert finding.severity == "warning"
            await admin.aclose()
        finally:
            await server.stop()


async def test_a_certificate_that_ends_soon_is_named(tiny_model: Path, tmp_path: Path) -> None:
    certificates.prepare(tmp_path)
    certificates.issue(tmp_path, Role.PREFILL, datetime.timedelta(seconds=100))
    async with running(tiny_model, tls_dir=tmp_path) as targets:
        access = Access(PodTls(certificate_files(tmp_path, Role.GATEWAY)))
        (finding,) = await found_by(shown_certificates, await healthy(targets, access))
        assert finding.where.startswith("prefill pod p0")
        assert "two thirds of its time are over" in finding.what
        assert finding.severity == "warning"
