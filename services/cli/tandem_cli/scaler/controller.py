"""The loop of `tandem scaler`: scrape, decide, set replicas.

every scaler      scrapes and decides, so that a new leader has a history
the leader        sets replicas while its lease is valid
no gateway answers, or the API server does not     nothing changes
a process does not answer                           no pod is removed
a workload changed since it was read                decides again from its new state
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

import httpx
import structlog
from kubernetes.aio import client
from prometheus_client import CollectorRegistry
from tandem_service import metric_table as table
from tandem_service.discovery import Discovery

from tandem_cli.scaler.exposition import Exposition
from tandem_cli.scaler.law import Decision, Memory, Pods, Policy, RoleDecision, decide
from tandem_cli.scaler.lease import Leadership, explain
from tandem_cli.scaler.readings import Readings, Scrapes
from tandem_cli.scaler.workloads import Workload

_SCRAPE_TIMEOUT_S = 4.0
#: Assumed until a start has been measured.
_FIRST_START_S = 60.0
ROLES = ("prefill", "decode")


class ScalerMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.wanted = table.SCALER_DESIRED.make(registry)
        self.replicas = table.SCALER_REPLICAS.make(registry)
        self.ready = table.SCALER_READY.make(registry)
        self.start_s = table.SCALER_START.make(registry)
        self.bias = table.SCALER_BIAS.make(registry)
        self.leads = table.SCALER_LEADS.make(registry)
        self.changes = table.SCALER_CHANGES.make(registry)
        self.failures = table.SCALER_FAILURES.make(registry)
        for role in ROLES:
            for direction in ("up", "down"):
                self.changes.labels(role, direction)
        for cause in ("metrics", "api", "rights", "conflict"):
            self.failures.labels(cause)


class StartTime:
    """Start time of a role's pods: from an increase of the wanted number until all are ready."""

    def __init__(self) -> None:
        self.seconds = _FIRST_START_S
        self._wanted: int | None = None
        self._since: float | None = None

    def see(self, now: float, wanted: int, ready: int) -> None:
        if self._wanted is not None and wanted > self._wanted and ready < wanted:
            self._since = now
        elif self._since is not None and ready >= wanted:
            # If the wanted number has fallen meanwhile, nothing was measured.
            if wanted == self._wanted:
                self.seconds = (self.seconds + now - self._since) / 2
            self._since = None
        self._wanted = wanted


class Controller:
    """`discoveries`: started, of the /metrics of "gateway", "prefill" and "decode". `workloads`: by role."""

    def __init__(
        self,
        discoveries: Mapping[str, Discovery],
        workloads: Mapping[str, Workload],
        leadership: Leadership,
        policy: Policy,
        metrics: ScalerMetrics,
        *,
        dry_run: bool = False,
    ) -> None:
        self._discoveries, self._workloads = discoveries, workloads
        self._leadership, self._policy, self._metrics, self._dry_run = leadership, policy, metrics, dry_run
        self._http = httpx.AsyncClient(timeout=_SCRAPE_TIMEOUT_S, trust_env=False)
        self._readings = Readings(policy.window_s)
        self._memory = Memory()
        self._starts = {role: StartTime() for role in ROLES}
        #: The last warning of each cause, which is not logged again.
        self._warned: dict[str, str] = {}
        self._log = structlog.get_logger("tandem.scaler")

    async def run(self, interval_s: float) -> None:
        """Runs until cancelled."""
        try:
            while True:
                began = time.monotonic()
                try:
                    await self.tick()
                except Exception:
                    self._log.exception("a decision failed; nothing is changed")
                await asyncio.sleep(max(began + interval_s - time.monotonic(), 0.0))
        finally:
            await self._http.aclose()

    async def tick(self) -> Decision | None:
        """Scrapes, decides and applies; None if too little is known."""
        self._metrics.leads.set(self._leadership.leads)
        scrapes, ready = await self._scrape()
        now = time.monotonic()
        if not scrapes.gateways:
            self._failed("metrics", "no gateway serves its metrics; replicas stay as they are")
            return None
        self._readings.add(now, scrapes)
        scales: dict[str, client.V1Scale] = {}
        for role, workload in self._workloads.items():
            try:
                scales[role] = await workload.read()
            except Exception as error:
                self._api_failed(error, workload)
                return None
        if scrapes.is_complete:
            self._works("metrics")
        self._works("api")
        if not self._readings.is_known:
            return None
        pods = {}
        for role, scale in scales.items():
            wanted = scale.spec.replicas or 0
            self._starts[role].see(now, wanted, ready[role])
            pods[role] = Pods(wanted, ready[role], self._starts[role].seconds)
        snapshot = self._readings.snapshot(now, pods["prefill"], pods["decode"])
        decision, self._memory = decide(snapshot, self._memory, self._policy)
        self._show(decision, pods)
        for role, decided in (("prefill", decision.prefill), ("decode", decision.decode)):
            if decided.wanted < pods[role].wanted and not scrapes.is_complete:
                self._log.info("no pod is removed because some do not answer", pod_role=role)
            elif decided.wanted != pods[role].wanted:
                await self._set(role, scales[role], decided)
        return decision

    async def _set(self, role: str, scale: client.V1Scale, decided: RoleDecision) -> None:
        before = scale.spec.replicas or 0
        if self._dry_run or not self._leadership.leads:
            if self._dry_run:
                self._log.info(
                    "would scale", pod_role=role, before=before, to=decided.wanted, why=decided.reason
                )
            return
        try:
            await self._workloads[role].set_replicas(scale, decided.wanted)
        except client.ApiException as error:
            if error.status == 409:
                self._metrics.failures.labels("conflict").inc()
                self._log.info("the workload has changed since it was read; deciding again", pod_role=role)
                return
            self._api_failed(error, self._workloads[role])
        except Exception as error:
            self._api_failed(error, self._workloads[role])
        else:
            self._works("rights")
            self._metrics.changes.labels(role, "up" if decided.wanted > before else "down").inc()
            self._log.info("scaled", pod_role=role, before=before, to=decided.wanted, why=decided.reason)

    # -- scrapes -----------------------------------------------------------------------------------

    async def _scrape(self) -> tuple[Scrapes, dict[str, int]]:
        """Scrapes all processes concurrently; also returns the number of ready pods by role."""
        found: dict[str, dict[str, Exposition]] = {}
        ready, asked, failures = {}, 0, []
        for role, discovery in self._discoveries.items():
            targets = [one.target for one in await discovery.endpoints() if not one.withheld]
            answers = await asyncio.gather(*(self._get(target) for target in targets))
            found[role] = {}
            for target, answer in zip(targets, answers, strict=True):
                if isinstance(answer, Exposition):
                    found[role][target] = answer
                else:
                    failures.append(f"{role} {target}: {answer}")
            ready[role], asked = len(targets), asked + len(targets)
        if failures:
            self._failed("metrics", f"{len(failures)} of {asked} do not serve their metrics: {failures[0]}")
        return Scrapes(found["gateway"], found["prefill"], found["decode"], is_complete=not failures), ready

    async def _get(self, target: str) -> Exposition | str:
        """The metrics of a process, or the error."""
        try:
            answer = await self._http.get(f"http://{target}/metrics")
            answer.raise_for_status()
            return Exposition(answer.text)
        except (httpx.HTTPError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    # -- log and metrics ---------------------------------------------------------------------------

    def _show(self, decision: Decision, pods: Mapping[str, Pods]) -> None:
        metrics = self._metrics
        for role, decided, memory in (
            ("prefill", decision.prefill, self._memory.prefill),
            ("decode", decision.decode, self._memory.decode),
        ):
            metrics.wanted.labels(role).set(decided.wanted)
            metrics.replicas.labels(role).set(pods[role].wanted)
            metrics.ready.labels(role).set(pods[role].ready)
            metrics.start_s.labels(role).set(pods[role].start_s)
            metrics.bias.labels(role).set(memory.bias)
            self._log.debug("decided", pod_role=role, wanted=decided.wanted, why=decided.reason)

    def _api_failed(self, error: Exception, workload: Workload) -> None:
        is_right = isinstance(error, client.ApiException) and error.status == 403
        self._failed("rights" if is_right else "api", explain(error, workload.ref.resource))

    def _failed(self, cause: str, reason: str) -> None:
        self._metrics.failures.labels(cause).inc()
        if self._warned.get(cause) != reason:
            self._warned[cause] = reason
            self._log.warning("cannot scale", cause=cause, reason=reason)

    def _works(self, *causes: str) -> None:
        for cause in causes:
            if self._warned.pop(cause, None):
                self._log.info("works again", cause=cause)
