"""Tracks the pods of both roles and their health.

discovery lists a target      a Pod is added, unhealthy until it answers
poll, each second             SERVING -> healthy; NOT_SERVING -> unhealthy
UNAVAILABLE                   to a poll or a request: unhealthy at once, polled again soon
poll timed out                unhealthy after three in a row, because a busy pod may answer late once
discovery withholds a target  (it terminates, or is not ready) no new requests; running ones continue
discovery drops a target      the Pod is removed; its channel is closed after its requests have ended
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import time
from collections.abc import Mapping

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_proto.v1 import (
    common_pb2,
    decode_pb2,
    decode_pb2_grpc,
    gateway_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
)
from tandem_service import tls
from tandem_service.channels import open_channel
from tandem_service.discovery import Discovery
from tandem_service.tls import PodTls

from tandem_gateway.fleet.load import PodLoad, PodWorks

_POLL_TIMEOUT_S = 2.0
_MAX_MISSES = 3
_FRESH_S = 5.0
#: Failures that are less than this apart form one series, see `Fleet.note_failure`.
FAILURES_APART_S = 10.0
#: Most seconds that an engine may be silent; a prompt chunk of a large model on a CPU takes seconds.
_LONGEST_STEP_S = 60.0
#: Time that the requests of an unlisted pod have to end.
_LONGEST_REQUEST_S = 600.0
#: Poll interval of an unhealthy pod.
_RECHECK_S = 0.2
#: No warning is logged for an unreachable starting pod before this time; large models take longer to load.
_START_LIMIT_S = 60.0


class Role(enum.Enum):
    DECODE = "decode"
    PREFILL = "prefill"


class Pod:
    """One pod, the channel to it, and its work."""

    def __init__(self, role: Role, target: str, pod_tls: PodTls | None = None) -> None:
        self.role = role
        self.target = target
        self._tls = pod_tls
        self._open_channel()
        self.healthy = False
        #: Topology zone; "": unknown.
        self.zone = ""
        #: Why discovery withholds the pod; "": it may get new requests.
        self.withheld = ""
        self.works = PodWorks(decodes=role is Role.DECODE)
        #: Requests of other gateways at the last report.
        self.num_foreign = 0
        #: The value at the report before it. A request of this gateway that ends between two reports counts
        #: as foreign in one of them.
        self._num_foreign_before = 0
        #: The last report.
        self.report = common_pb2.PodStatus()
        #: Monotonic seconds of the last answer; None before the first.
        self.last_seen: float | None = None
        #: Monotonic seconds of the last message of any call.
        self.heard_at = -math.inf
        self.misses = 0
        #: Why it is unhealthy, for the log.
        self.cause = "not polled yet"
        #: The last logged cause; None: none yet.
        self.logged_cause: str | None = None
        self.found_at = time.monotonic()

    def is_heard(self, within_s: float) -> bool:
        """Whether a call received a message from it recently."""
        return time.monotonic() - self.heard_at < within_s

    def renew_channel(self) -> grpc.aio.Channel | None:
        """Opens a new channel if this gateway's certificates changed; returns the old one, whose calls
        continue until it is closed."""
        if self._tls is None or self._tls.pems() is self._pems:
            return None
        previous = self.channel
        self._open_channel()
        return previous

    def _open_channel(self) -> None:
        self._pems = None if self._tls is None else self._tls.pems()
        self.channel = open_channel(self.target, self._tls, tls.Role(self.role.value))

    @property
    def load(self) -> PodLoad:
        """The part of the last report that routing uses."""
        return self.works.load

    @property
    def in_flight(self) -> int:
        """Number of this gateway's requests on the pod."""
        return len(self.works.open_ids)

    @property
    def is_fresh(self) -> bool:
        """Whether the last report is new enough for predictions; pods report at the end of each step."""
        if self.last_seen is None:
            return False
        age_s = time.monotonic() - self.last_seen + self.report.age_seconds
        return age_s < _FRESH_S + self.load.model.prompt_seconds(0, self.load.model.chunk_size)

    @property
    def is_idle(self) -> bool:
        """Whether the pod has no requests of this gateway or of others."""
        return not self.in_flight and not (self.num_foreign and self._num_foreign_before)

    async def poll(self) -> bool:
        """Returns whether the pod serves; updates `load` and `report`. Raises AioRpcError."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        health = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_POLL_TIMEOUT_S)
        num_own = self.in_flight
        self.report = await self._get_status()
        load = PodLoad.of(self.report)
        self._num_foreign_before = self.num_foreign
        self.num_foreign = max(load.num_requests - num_own, 0)
        self.works.report(load, self.report.prompts, self.num_foreign)
        return bool(health.status == health_pb2.HealthCheckResponse.SERVING)

    async def _get_status(self) -> common_pb2.PodStatus:
        if self.role is Role.DECODE:
            decode = decode_pb2_grpc.DecodeServiceStub(self.channel)  # type: ignore[no-untyped-call]
            answer: decode_pb2.GetDecodeStatusResponse = await decode.GetDecodeStatus(
                decode_pb2.GetDecodeStatusRequest(), timeout=_POLL_TIMEOUT_S
            )
            return answer.status
        prefill = prefill_pb2_grpc.PrefillServiceStub(self.channel)  # type: ignore[no-untyped-call]
        reply: prefill_pb2.GetPrefillStatusResponse = await prefill.GetPrefillStatus(
            prefill_pb2.GetPrefillStatusRequest(), timeout=_POLL_TIMEOUT_S
        )
        return reply.status

    def to_proto(self, *, with_prompts: bool) -> gateway_pb2.PodHealth:
        shown = gateway_pb2.PodHealth(
            target=self.target,
            role=self.role.value,
            healthy=self.healthy,
            last_seen_seconds=float("inf") if self.last_seen is None else time.monotonic() - self.last_seen,
            status=self.report,
            cause=self.cause,
            zone=self.zone,
        )
        if not with_prompts:
            shown.status.ClearField("prompts")
        return shown


class Fleet:
    """Keeps the pods of both roles up to date. `await start()`, then `await close()`."""

    def __init__(
        self,
        discoveries: Mapping[Role, Discovery],
        *,
        model_revision: str,
        poll_interval_s: float,
        pod_tls: PodTls | None = None,
    ) -> None:
        self._pod_tls = pod_tls
        self._discoveries = dict(discoveries)
        self._model_revision = model_revision
        self._poll_interval_s = poll_interval_s
        self._pods: dict[Role, dict[str, Pod]] = {role: {} for role in Role}
        self._pollers: dict[Pod, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._discovered = asyncio.Event()
        #: Monotonic seconds of the first and the last failure in the current series, see `note_failure`.
        self.failing_since: float = -math.inf
        self._failed_at = -math.inf
        self._log = structlog.get_logger("tandem.fleet")

    async def start(self) -> None:
        """Finds the pods and starts to poll them; returns before the first answer."""
        for discovery in self._discoveries.values():
            await discovery.start(self._discovered.set)
        await self._follow_once()
        self._follower = asyncio.create_task(self._follow())

    async def close(self) -> None:
        tasks = [*self._pollers.values(), *self._closing]
        if self._follower is not None:
            tasks.append(self._follower)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(discovery.close() for discovery in self._discoveries.values()))
        await asyncio.gather(*(pod.channel.close(None) for pod in self.pods()))

    def pods(self) -> list[Pod]:
        return [pod for role in Role for pod in self._of(role)]

    def healthy(self, role: Role) -> list[Pod]:
        return [pod for pod in self._of(role) if pod.healthy]

    def _of(self, role: Role) -> list[Pod]:
        # A copy in one step, since scrapes read it from another thread.
        return list(self._pods[role].values())

    def mark_dead(self, pod: Pod, cause: str, *, is_expected: bool = False) -> None:
        """Marks a pod unhealthy after a request got UNAVAILABLE; it is unused until it answers a poll.
        `is_expected`: the pod had announced that it stops."""
        if not is_expected:
            self.note_failure()
        self._set_health(pod, cause=cause)

    def note_failure(self) -> None:
        """Records that a pod was lost without warning, or failed to compute a prompt. Predictions made before
        a series of failures cannot include them; predictions made during the series do."""
        now = time.monotonic()
        if now - self._failed_at > FAILURES_APART_S:
            self.failing_since = now
        self._failed_at = now

    async def wait_for_change(self, timeout_s: float) -> None:
        """Waits until the health of any pod changes, at most `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._discovered.wait(), self._poll_interval_s)
            self._discovered.clear()
            try:
                await self._follow_once()
            except Exception as error:
                self._log.exception("discovery failed; known pods are kept", exc_info=error)

    async def _follow_once(self) -> None:
        for role, discovery in self._discoveries.items():
            endpoints = await discovery.endpoints()
            known = self._pods[role]
            for endpoint in endpoints:
                pod = known.get(endpoint.target)
                if pod is None:
                    pod = known[endpoint.target] = Pod(role, endpoint.target, self._pod_tls)
                    self._pollers[pod] = asyncio.create_task(self._poll(pod))
                pod.zone = endpoint.zone
                if pod.withheld != endpoint.withheld:
                    pod.withheld = endpoint.withheld
                    # The next poll decides about its health, if it may be used again.
                    self._set_health(pod, cause=endpoint.withheld or "not polled since")
            for target in set(known) - {endpoint.target for endpoint in endpoints}:
                pod = known.pop(target)
                self._pollers.pop(pod).cancel()
                self._set_health(pod, cause="no longer listed")
                self._close_when_idle(pod.channel)

    def _close_when_idle(self, channel: grpc.aio.Channel) -> None:
        closing = asyncio.create_task(channel.close(_LONGEST_REQUEST_S))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _poll(self, pod: Pod) -> None:
        while True:
            previous = pod.renew_channel()
            if previous is not None:
                self._close_when_idle(previous)
            try:
                serving = await pod.poll()
                pod.misses = 0
                pod.last_seen = time.monotonic()
                revision = pod.report.model_revision
                cause, may_start = "" if serving else "not serving", not pod.withheld
                cause = pod.withheld or cause
                if revision and revision != self._model_revision:
                    cause = f"serves model revision {revision}, the gateway {self._model_revision}"
                    may_start = False
                if pod.report.age_seconds > _LONGEST_STEP_S:
                    cause = f"its engine has not answered for {pod.report.age_seconds:.0f} s"
                self._set_health(pod, cause=cause, may_start=may_start)
            except grpc.aio.AioRpcError as error:
                pod.misses += 1
                if error.code() is grpc.StatusCode.UNAVAILABLE or pod.misses >= _MAX_MISSES:
                    if pod.healthy:
                        self.note_failure()
                    self._set_health(pod, cause=f"{error.code().name}: {error.details()}", may_start=True)
            except Exception as error:
                # Without its poller the pod would stay healthy forever.
                self._log.exception("poll failed", target=pod.target, exc_info=error)
                self._set_health(pod, cause=f"poll failed: {error}")
            await asyncio.sleep(
                self._poll_interval_s if pod.healthy else min(_RECHECK_S, self._poll_interval_s)
            )

    def _set_health(self, pod: Pod, *, cause: str, may_start: bool = False) -> None:
        """`cause`: why the pod is unhealthy; "": it is healthy. `may_start`: a starting pod also has this
        cause, so no warning is logged at first."""
        was_healthy, pod.healthy = pod.healthy, not cause
        pod.cause = cause
        is_starting = pod.logged_cause is None and time.monotonic() - pod.found_at < _START_LIMIT_S
        if cause != pod.logged_cause and not (cause and may_start and is_starting):
            pod.logged_cause = cause
            log = self._log.warning if cause else self._log.info
            message = "pod is not usable" if cause else "pod is healthy"
            log(message, pod_role=pod.role.value, target=pod.target, cause=cause)
        if was_healthy != pod.healthy:
            # Current waiters hold the old event; later ones wait for the next change.
            self._changed.set()
            self._changed = asyncio.Event()
