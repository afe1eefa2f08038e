"""A cluster for the scaler: an API server with two Deployments and a Lease, and processes that serve /metrics
from rows of the metric table, as gateways and pods do."""

from __future__ import annotations

from dataclasses import dataclass, field

from kubelet.api_stub import ApiStub
from prometheus_client import CollectorRegistry, start_http_server
from tandem_service import metric_table as table

NAMESPACE = "tandem"
ROLES = ("prefill", "decode")


class Served:
    """A process that serves /metrics on a free port of loopback."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._server, self._thread = start_http_server(0, addr="127.0.0.1", registry=self.registry)
        self.target = f"127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class ServedGateway(Served):
    """Requests of the class chat: TTFT 1 s, TPOT 150 ms."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        self._received = table.SLO_RECEIVED.make(registry)
        self._refused = table.REFUSED.make(registry)
        self._prompt = table.REQUEST_PROMPT_TOKENS.make(registry)
        self._output = table.REQUEST_OUTPUT_TOKENS.make(registry)
        self._ttft, self._tpot = table.TTFT_SECONDS.make(registry), table.TPOT_SECONDS.make(registry)
        self._e2e = table.E2E_SECONDS.make(registry)
        self._cached = table.CACHED_PROMPT_TOKENS.make(registry)
        self.in_flight = table.IN_FLIGHT.make(registry)
        self.waiting = table.QUEUE_LENGTH.make(registry)
        targets = table.SLO_TARGET_SECONDS.make(registry)
        targets.labels("chat", "ttft").set(1.0)
        targets.labels("chat", "tpot").set(0.15)
        targets.labels("interactive", "ttft").set(2.5)
        targets.labels("interactive", "e2e").set(5.0)

    def receive(self, count: int, name: str = "chat") -> None:
        self._received.labels(name, "default").inc(count)

    def refuse(self, count: int, reason: str) -> None:
        self._refused.labels(reason).inc(count)

    def finish(
        self,
        count: int,
        *,
        prompt: int = 1000,
        output: int = 200,
        cached: int = 0,
        ttft_s: float = 0.3,
        tpot_s: float = 0.05,
        name: str = "chat",
    ) -> None:
        for _ in range(count):
            self._prompt.labels(name).observe(prompt)
            self._output.labels(name).observe(output)
            self._ttft.labels(name).observe(ttft_s)
            self._tpot.labels(name).observe(tpot_s)
            self._e2e.labels(name).observe(ttft_s + tpot_s * (output - 1))
            self._cached.labels(name, "default").inc(cached)


class ServedPod(Served):
    """A pod whose prompt tokens take .1 ms each, and whose decode steps 20 ms and .5 ms a sequence."""

    def __init__(self) -> None:
        super().__init__()
        registry = self.registry
        costs, limits = table.STEP_COST.make(registry), table.STEP_LIMIT.make(registry)
        for steps, per, seconds in (
            ("prefill", "token", 1e-4),
            ("decode", "step", 0.02),
            ("decode", "token", 0.0005),
        ):
            costs.labels(steps, per).set(seconds)
        limits.labels("chunk").set(512)
        limits.labels("batch").set(64)
        table.KV_BLOCK_TOKENS.make(registry).set(64)
        table.TOKENS_PER_STEP.make(registry).set(1.0)
        self.blocks = table.KV_BLOCKS.make(registry)
        self.blocks.labels("free").set(3000)
        self.blocks.labels("used").set(1000)
        self.requests = table.POD_REQUESTS.make(registry)
        self.backlog = table.PROMPT_BACKLOG.make(registry)
        self._prompts = table.PREFILL_REQUESTS.make(registry)
        self._tokens = table.PREFILL_PROMPT_TOKENS.make(registry)

    def compute(self, count: int, tokens: int = 1000) -> None:
        self._prompts.labels("ok").inc(count)
        self._tokens.inc(count * tokens)


@dataclass
class ScalerFleet:
    api: ApiStub
    gateway: ServedGateway = field(default_factory=ServedGateway)
    prefill: list[ServedPod] = field(default_factory=lambda: [ServedPod()])
    decode: list[ServedPod] = field(default_factory=lambda: [ServedPod()])

    def __post_init__(self) -> None:
        for role in ROLES:
            self.set_replicas(role, 1)
        lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {}}
        self.api.put(
            "leases", {**lease, "metadata": {"name": "tandem-scaler-leader", "namespace": NAMESPACE}}
        )

    def set_replicas(self, role: str, replicas: int) -> None:
        metadata = {"name": f"tandem-{role}", "namespace": NAMESPACE}
        deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata}
        self.api.put("deployments", {**deployment, "spec": {"replicas": replicas}})

    def replicas(self, role: str) -> int:
        return int(self.api.get("deployments", NAMESPACE, f"tandem-{role}")["spec"]["replicas"])

    @property
    def holder(self) -> str:
        return str(
            self.api.get("leases", NAMESPACE, "tandem-scaler-leader")["spec"].get("holderIdentity", "")
        )

    def load(self, count: int) -> None:
        """Counts requests that end in time."""
        self.gateway.receive(count)
        self.gateway.finish(count)
        self.prefill[0].compute(count)

    def close(self) -> None:
        for served in (self.gateway, *self.prefill, *self.decode):
            served.close()
