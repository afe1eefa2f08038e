"""Which pods there are, and which of them live.

discovery lists a target -> Pod, unhealthy until it answers
every second               health SERVING and a status -> healthy; NOT_SERVING -> unhealthy
UNAVAILABLE                unhealthy at once, whoever met it (a poll or a request); looked at again soon
no answer in time          unhealthy after three in a row: a busy pod may be late once
discovery drops a target -> the pod is forgotten, its channel closed when its requests are done
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections.abc import Mapping

import grpc
import grpc.aio
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_proto.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from tandem_service.channels import open_channel
from tandem_service.discovery import DnsDiscovery

from tandem_gateway.metrics import GatewayMetrics
from tandem_gateway.request import PodLoad

_POLL_TIMEOUT_S = 2.0
_MAX_MISSES = 3
#: What a pod that is no longer listed still runs may finish.
_LONGEST_REQUEST_S = 600.0
#: How soon a pod that was UNAVAILABLE is looked at again.
_RECHECK_S = 0.2


class Role(enum.Enum):
    DECODE = "decode"
    PREFILL = "prefill"


class Pod:
    """One pod and the channel to it. `in_flight` counts this gateway's own requests on it."""

    def __init__(self, role: Role, target: str) -> None:
        self.role = role
        self.target = target
        self.channel = open_channel(target)
        self.healthy = False
        self.in_flight = 0
        self.load = PodLoad()
        #: The last report as it came, for the fleet view.
        self.report = common_pb2.PodStatus()
        #: Monotonic seconds of the last answer; None before the first.
        self.last_seen: float | None = None
        self.misses = 0
        #: Why it is unhealthy, for the log.
        self.trouble = "not asked yet"

    async def ask(self) -> bool:
        """One look: whether it serves; fills `load` and `report`. Raises AioRpcError."""
        stub = health_pb2_grpc.HealthStub(self.channel)
        health = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_POLL_TIMEOUT_S)
        self.report = await self._ask_status()
        self.load = _load(self.report)
        return bool(health.status == health_pb2.HealthCheckResponse.SERVING)

    async def _ask_status(self) -> common_pb2.PodStatus:
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


class Fleet:
    """Keeps the pods of both roles up to date. `await start()`, then `await close()`."""

    def __init__(
        self,
        discoveries: Mapping[Role, DnsDiscovery],
        *,
        model_revision: str,
        poll_interval_s: float,
        metrics: GatewayMetrics,
    ) -> None:
        self._discoveries = dict(discoveries)
        self._model_revision = model_revision
        self._poll_interval_s = poll_interval_s
        self._metrics = metrics
        self._pods: dict[Role, dict[str, Pod]] = {role: {} for role in Role}
        self._pollers: dict[Pod, asyncio.Task[None]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._follower: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._log = structlog.get_logger("tandem.fleet")

    async def start(self) -> None:
        """Find the pods and begin to look at them; returns before any has answered."""
        await self._follow_once()
        self._follower = asyncio.create_task(self._follow())

    async def close(self) -> None:
        tasks = [*self._pollers.values(), *self._closing]
        if self._follower is not None:
            tasks.append(self._follower)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(pod.channel.close(None) for pod in self.pods()))

    def pods(self) -> list[Pod]:
        return [pod for pods in self._pods.values() for pod in pods.values()]

    def healthy(self, role: Role) -> list[Pod]:
        return [pod for pod in self._pods[role].values() if pod.healthy]

    def mark_dead(self, pod: Pod, trouble: str) -> None:
        """A request met UNAVAILABLE on it; use it no more until it answers."""
        self._set_health(pod, healthy=False, trouble=trouble)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until some pod's health changes, at most so long."""
        changed = self._changed
        try:
            async with asyncio.timeout(timeout_s):
                await changed.wait()
        except TimeoutError:
            return

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._poll_interval_s)
            try:
                await self._follow_once()
            except Exception as error:
                self._log.exception("discovery failed; keeping the pods known", exc_info=error)

    async def _follow_once(self) -> None:
        for role, discovery in self._discoveries.items():
            targets = await discovery.targets()
            known = self._pods[role]
            for target in targets:
                if target not in known:
                    pod = known[target] = Pod(role, target)
                    self._pollers[pod] = asyncio.create_task(self._poll(pod))
            for target in set(known) - set(targets):
                pod = known.pop(target)
                self._pollers.pop(pod).cancel()
                self._set_health(pod, healthy=False, trouble="no longer listed")
                closing = asyncio.create_task(pod.channel.close(_LONGEST_REQUEST_S))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)

    async def _poll(self, pod: Pod) -> None:
        while True:
            try:
                self._judge(pod, serving=await pod.ask())
            except grpc.aio.AioRpcError as error:
                pod.misses += 1
                if error.code() is grpc.StatusCode.UNAVAILABLE or pod.misses >= _MAX_MISSES:
                    trouble = f"{error.code().name}: {error.details()}"
                    self._set_health(pod, healthy=False, trouble=trouble)
            except Exception as error:
                # A poller that dies would leave its pod healthy for ever.
                self._log.exception("poll failed", target=pod.target, exc_info=error)
                self._set_health(pod, healthy=False, trouble=f"poll failed: {error}")
            await asyncio.sleep(
                self._poll_interval_s if pod.healthy else min(_RECHECK_S, self._poll_interval_s)
            )

    def _judge(self, pod: Pod, *, serving: bool) -> None:
        """The pod has answered; is it one we can use?"""
        pod.misses = 0
        pod.last_seen = time.monotonic()
        trouble = "" if serving else "not serving"
        revision = pod.report.model_revision
        if pod.role is Role.DECODE and revision and revision != self._model_revision:
            trouble = f"serves model revision {revision}, the gateway {self._model_revision}"
        self._set_health(pod, healthy=not trouble, trouble=trouble)

    def _set_health(self, pod: Pod, *, healthy: bool, trouble: str) -> None:
        if (healthy, trouble) != (pod.healthy, pod.trouble):
            log = self._log.info if healthy else self._log.warning
            log(
                "pod is healthy" if healthy else "pod is not usable",
                pod_role=pod.role.value,
                target=pod.target,
                trouble=trouble,
            )
        was_healthy, pod.healthy, pod.trouble = pod.healthy, healthy, trouble
        if was_healthy != healthy:
            self._metrics.healthy_pods.labels(pod.role.value).set(len(self.healthy(pod.role)))
            # Waiters hold the old event; whoever comes later waits for the next change.
            self._changed.set()
            self._changed = asyncio.Event()


def _load(status: common_pb2.PodStatus) -> PodLoad:
    usage = status.usage
    return PodLoad(
        # Cached blocks are evicted when a request needs them.
        free_blocks=usage.blocks_free + usage.blocks_cached,
        total_blocks=usage.blocks_total,
        block_size=status.block_size,
        num_requests=usage.requests_waiting + usage.requests_running,
    )
