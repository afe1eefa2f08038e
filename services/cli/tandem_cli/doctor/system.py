"""The status that the processes of a running system report, read once before the checks.

The gateways name the pods, or the state file of `tandem up` names all processes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_core.codec import slo_from_proto
from tandem_core.slo import SloTarget
from tandem_proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    gateway_pb2_grpc,
    lookahead_pb2,
    lookahead_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tandem_service.channels import open_channel, open_public_channel
from tandem_service.redis_client import RedisAddress
from tandem_service.tls import PodTls, Role

from tandem_cli.targets import key_metadata
from tandem_cli.up.state_file import FleetRecord

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class Access:
    """Credentials for calls to the system."""

    #: For calls to pods; None: plaintext.
    tls: PodTls | None = None
    #: Verifies the gateways' public ports; None: the system's authorities for https://, else plaintext.
    ca_file: Path | None = None
    api_key: str | None = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return key_metadata(self.api_key)


@dataclass(frozen=True)
class Clock:
    """Offset of the remote clock; the error is at most half the round trip."""

    ahead_s: float
    uncertainty_s: float


@dataclass(frozen=True)
class Pod:
    """A prefill or decode pod. Without an answer `status` is empty and `error` says why."""

    role: Role
    target: str
    status: common_pb2.PodStatus
    is_serving: bool = False
    clock: Clock | None = None
    error: str = ""

    @property
    def where(self) -> str:
        name = self.status.pod_id or self.target
        return f"{self.role.value} pod {name}" + (f" at {self.target}" if name != self.target else "")


@dataclass(frozen=True)
class Gateway:
    target: str
    fleet: gateway_pb2.GetFleetStatusResponse
    model: gateway_pb2.ModelInfo
    clock: Clock | None = None
    error: str = ""

    @property
    def where(self) -> str:
        return f"gateway {self.target}"

    @property
    def slo_classes(self) -> list[SloTarget]:
        return [slo_from_proto(message) for message in self.fleet.slo_classes]


@dataclass(frozen=True)
class Lookahead:
    target: str
    status: lookahead_pb2.GetLookaheadStatusResponse
    error: str = ""

    @property
    def where(self) -> str:
        return f"lookahead {self.target}"


@dataclass(frozen=True)
class System:
    access: Access
    gateways: tuple[Gateway, ...]
    pods: tuple[Pod, ...]
    lookahead: tuple[Lookahead, ...] = ()
    #: None if no address is known.
    redis: RedisAddress | None = None

    def of(self, role: Role) -> list[Pod]:
        """Pods of the role that answered."""
        return [pod for pod in self.pods if pod.role is role and not pod.error]

    @property
    def answering_gateways(self) -> list[Gateway]:
        return [gateway for gateway in self.gateways if not gateway.error]


async def ask_by_gateways(
    targets: Sequence[str],
    access: Access,
    redis: RedisAddress | None,
    lookahead: Sequence[str] = (),
    pods: Sequence[tuple[str, str]] | None = None,
) -> System:
    """Reads the status of all processes. `pods`: role and address of each; None: as gateways report."""
    gateways = await asyncio.gather(*(_ask_gateway(target, access) for target in targets))
    if pods is None:
        pods = sorted({(pod.role, pod.target) for gateway in gateways for pod in gateway.fleet.pods})
    answers = await asyncio.gather(*(_ask_pod(Role(role), target, access) for role, target in pods))
    services = await asyncio.gather(*(_ask_lookahead(target, access) for target in lookahead))
    return System(access, tuple(gateways), tuple(answers), tuple(services), redis)


async def ask_by_state(record: FleetRecord, access: Access) -> System:
    """Reads the processes of `tandem up`."""
    scheme = "https://" if record.serves_tls else ""
    return await ask_by_gateways(
        [scheme + target for target in record.targets(Role.GATEWAY)],
        access,
        RedisAddress(record.redis_url) if record.redis_url else None,
        record.targets(Role.LOOKAHEAD),
        [(role, target) for role in (Role.PREFILL, Role.DECODE) for target in record.targets(role)],
    )


async def _ask_gateway(target: str, access: Access) -> Gateway:
    fleet, model = gateway_pb2.GetFleetStatusResponse(), gateway_pb2.ModelInfo()
    try:
        async with open_public_channel(target, access.ca_file) as channel:
            stub = gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
            listed = await stub.ListModels(
                gateway_pb2.ListModelsRequest(), timeout=_TIMEOUT_S, metadata=access.metadata
            )
            began_at = time.time()
            fleet = await stub.GetFleetStatus(
                gateway_pb2.GetFleetStatusRequest(), timeout=_TIMEOUT_S, metadata=access.metadata
            )
            clock = _clock(began_at, fleet.unix_seconds)
            return Gateway(target, fleet, listed.models[0] if listed.models else model, clock)
    except grpc.aio.AioRpcError as error:
        return Gateway(target, fleet, model, error=describe_error(error))


async def _ask_pod(role: Role, target: str, access: Access) -> Pod:
    try:
        async with open_channel(target, access.tls, role) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S
            )
            began_at = time.time()
            status = await _status(role, channel)
            is_serving = health.status == health_pb2.HealthCheckResponse.SERVING
            return Pod(role, target, status, is_serving, _clock(began_at, status.unix_seconds))
    except grpc.aio.AioRpcError as error:
        return Pod(role, target, common_pb2.PodStatus(), error=describe_error(error))


async def _status(role: Role, channel: grpc.aio.Channel) -> common_pb2.PodStatus:
    if role is Role.DECODE:
        decode = decode_pb2_grpc.DecodeServiceStub(channel)  # type: ignore[no-untyped-call]
        answer: decode_pb2.GetDecodeStatusResponse = await decode.GetDecodeStatus(
            decode_pb2.GetDecodeStatusRequest(), timeout=_TIMEOUT_S
        )
        return answer.status
    prefill = prefill_pb2_grpc.PrefillServiceStub(channel)  # type: ignore[no-untyped-call]
    reply: prefill_pb2.GetPrefillStatusResponse = await prefill.GetPrefillStatus(
        prefill_pb2.GetPrefillStatusRequest(), timeout=_TIMEOUT_S
    )
    return reply.status


async def _ask_lookahead(target: str, access: Access) -> Lookahead:
    try:
        async with open_channel(target, access.tls, Role.LOOKAHEAD) as channel:
            stub = lookahead_pb2_grpc.LookaheadServiceStub(channel)  # type: ignore[no-untyped-call]
            status = await stub.GetLookaheadStatus(
                lookahead_pb2.GetLookaheadStatusRequest(), timeout=_TIMEOUT_S
            )
            return Lookahead(target, status)
    except grpc.aio.AioRpcError as error:
        return Lookahead(target, lookahead_pb2.GetLookaheadStatusResponse(), describe_error(error))


def _clock(began_at: float, theirs: float) -> Clock | None:
    """The clock's offset; None if the process is too old to send its time."""
    ended_at = time.time()
    if not theirs:
        return None
    return Clock(theirs - (began_at + ended_at) / 2, (ended_at - began_at) / 2)


def describe_error(error: grpc.aio.AioRpcError) -> str:
    """The error's code and the first line of its details, without a full stop."""
    details = (error.details() or "").splitlines() or [""]
    return f"{error.code().name}: {details[0].rstrip('.')}"
