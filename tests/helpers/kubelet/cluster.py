"""A cluster of processes on this machine: `kubectl apply` and what follows from it, on addresses in 127/8.

    apply       reads rendered manifests; each Deployment reaches its state by its rolling update rules
    delete_pod, scale, drain      as kubectl's commands; drain keeps PodDisruptionBudgets
    EndpointSlices                are served by an API stub, with ready, serving, terminating and zone
    Services with an address      are proxied to ready pods

Not here: images and init containers (the processes are those of a virtual environment), network policies,
resources, Pod Security.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from kubelet.api_stub import ENDPOINT_SLICES, ApiStub, endpoint, endpoint_slice
from kubelet.manifests import Manifest, Service, Workload, revision, services, workloads
from kubelet.process_pod import ProcessPod
from kubelet.service_proxy import ServiceProxy

NAMESPACE = "tandem"
_CONTROL_S = 0.05
_MOST_RESTARTS = 3


@dataclass
class _Deployment:
    workload: Workload
    replicas: int
    #: Programs of the pods that are to be there.
    bin_folder: Path

    @property
    def wanted(self) -> tuple[str, Path]:
        return revision(self.workload.template), self.bin_folder


@dataclass
class Cluster:
    folder: Path
    bin_folder: Path
    #: Second byte of all addresses, so that two clusters do not meet.
    network: int
    #: Folders of this machine by the path where pods mount them.
    paths: dict[str, str]
    #: Node names and their zones.
    nodes: dict[str, str] = field(default_factory=lambda: {"node-a": "zone-a", "node-b": "zone-b"})
    pods: list[ProcessPod] = field(default_factory=list)
    #: Pods that have ended, for what a test asks about them.
    ended: list[ProcessPod] = field(default_factory=list)
    api: ApiStub = field(default_factory=ApiStub)
    _cordoned: set[str] = field(default_factory=set)
    _deployments: dict[str, _Deployment] = field(default_factory=dict)
    _services: list[Service] = field(default_factory=list)
    _proxies: dict[str, ServiceProxy] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(2))
    _made: dict[int, tuple[str, Path]] = field(default_factory=dict)
    _controller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.api.start()
        self._kubeconfig = self.api.kubeconfig(self.folder, NAMESPACE)
        self._controller = asyncio.create_task(self._control())

    async def close(self) -> None:
        if self._controller is not None:
            self._controller.cancel()
        await asyncio.gather(*(pod.kill() for pod in self.pods))
        for proxy in self._proxies.values():
            proxy.close()
        await self.api.stop()

    def service_address(self, name: str) -> str:
        return self._proxies[name].address

    # -- kubectl -----------------------------------------------------------------------------------

    async def apply(self, manifests: Sequence[Manifest], bin_folder: Path | None = None) -> None:
        self._services = services(manifests)
        for number, service in enumerate(self._services, 1):
            if service.name not in self._proxies:
                address = f"127.{self.network}.0.{number}"
                proxy = ServiceProxy(address, service.ports, lambda of=service.workload: self._ready(of))
                self._proxies[service.name] = proxy
                await proxy.start()
        for workload in workloads(manifests):
            known = self._deployments.get(workload.name)
            replicas = workload.replicas or (known.replicas if known else 1)
            folder = bin_folder or (known.bin_folder if known else self.bin_folder)
            self._deployments[workload.name] = _Deployment(workload, replicas, folder)

    def set_programs(self, name: str, bin_folder: Path) -> None:
        """As `kubectl set image`."""
        self._deployments[name].bin_folder = bin_folder

    def restart(self, name: str, reason: str) -> None:
        """As `kubectl rollout restart`: a change of the template that means nothing to the process."""
        deployment = self._deployments[name]
        workload = deployment.workload
        environment = dict(workload.template.environment) | {"RESTARTED_FOR": reason}
        template = replace(workload.template, environment=tuple(sorted(environment.items())))
        deployment.workload = replace(workload, template=template)

    def scale(self, name: str, replicas: int) -> None:
        self._deployments[name].replicas = replicas

    def delete_pod(self, pod: ProcessPod) -> None:
        pod.delete()

    async def drain(self, node: str, limit_s: float = 300.0) -> None:
        """Cordons the node and evicts its pods as their budgets allow; ends when they are gone."""
        self._cordoned.add(node)
        give_up_at = time.monotonic() + limit_s
        while here := [pod for pod in self.pods if pod.node == node]:
            assert time.monotonic() < give_up_at, f"{[pod.name for pod in here]} are still on {node}"
            for pod in here:
                if not pod.is_terminating and self._may_evict(pod):
                    pod.delete()
            await asyncio.sleep(_CONTROL_S)

    def uncordon(self, node: str) -> None:
        self._cordoned.discard(node)

    async def until_rolled_out(self, limit_s: float = 300.0) -> None:
        """As `kubectl rollout status`: each has its pods, of its template, ready, and no others."""
        await self.until(
            lambda: all(
                [pod.is_ready and not pod.is_terminating for pod in self.of(name)]
                == [True] * deployment.replicas
                and all(self._made[id(pod)] == deployment.wanted for pod in self.of(name))
                for name, deployment in self._deployments.items()
            ),
            limit_s,
        )

    async def until(self, condition: Callable[[], bool], limit_s: float = 300.0) -> None:
        give_up_at = time.monotonic() + limit_s
        while not condition():
            states = [(p.name, p.is_ready, p.is_terminating, p.num_restarts) for p in self.pods]
            assert time.monotonic() < give_up_at, f"not within {limit_s:g} s: {states}; logs in {self.folder}"
            for pod in self.pods:
                assert pod.num_restarts < _MOST_RESTARTS, (
                    f"{pod.name} ends again and again:\n{pod.log()[-2000:]}"
                )
            await asyncio.sleep(_CONTROL_S)

    def of(self, name: str) -> list[ProcessPod]:
        """The pods of a workload, those that terminate too."""
        return [pod for pod in self.pods if pod.workload == name]

    # -- controllers -------------------------------------------------------------------------------

    async def _control(self) -> None:
        while True:
            for pod in [pod for pod in self.pods if pod.is_gone]:
                self.pods.remove(pod)
                self.ended.append(pod)
            for name, deployment in self._deployments.items():
                self._reconcile(name, deployment)
            await asyncio.sleep(_CONTROL_S)

    def _reconcile(self, name: str, deployment: _Deployment) -> None:
        workload, replicas = deployment.workload, deployment.replicas
        staying = [pod for pod in self.of(name) if not pod.is_terminating]
        new = [pod for pod in staying if self._made[id(pod)] == deployment.wanted]
        old = [pod for pod in staying if pod not in new]
        if workload.max_surge is None or workload.max_unavailable is None:  # Recreate
            for pod in old:
                pod.delete()
            if not [pod for pod in self.of(name) if pod not in new]:
                for _ in range(replicas - len(new)):
                    self._create(deployment)
        else:
            for _ in range(min(replicas - len(new), replicas + workload.max_surge - len(staying))):
                self._create(deployment)
            num_ready = sum(pod.is_ready for pod in staying)
            for pod in sorted(old, key=lambda pod: pod.is_ready):
                if not pod.is_ready or num_ready > replicas - workload.max_unavailable:
                    num_ready -= pod.is_ready
                    pod.delete()
        # Those that are not ready first, then the newest.
        for pod in sorted(new, key=lambda pod: pod.is_ready)[: max(0, len(new) - replicas)]:
            pod.delete()

    def _create(self, deployment: _Deployment) -> None:
        number, name = next(self._numbers), deployment.workload.name
        free = [node for node in self.nodes if node not in self._cordoned]
        # As topologySpreadConstraints with matchLabelKeys say: spread among the pods of one template.
        alike = [
            pod.node
            for pod in self.of(name)
            if not pod.is_terminating and self._made[id(pod)] == deployment.wanted
        ]
        node = min(free, key=alike.count)
        pod = ProcessPod(
            f"{name}-{number}",
            name,
            node,
            self.nodes[node],
            f"127.{self.network}.{1 + number // 250}.{1 + number % 250}",
            deployment.workload.template,
            hosts={name: proxy.address for name, proxy in self._proxies.items()},
            paths=self.paths,
            environment={"KUBECONFIG": str(self._kubeconfig), "PYTHONFAULTHANDLER": "1"},
            bin_folder=deployment.bin_folder,
            folder=self.folder,
            on_change=self._publish,
        )
        self._made[id(pod)] = deployment.wanted
        self.pods.append(pod)
        pod.start()
        self._publish()

    def _publish(self) -> None:
        for service in self._services:
            endpoints = [
                endpoint(
                    pod.address,
                    ready=pod.is_ready,
                    terminating=pod.is_terminating,
                    zone=pod.zone,
                    pod=pod.name,
                )
                for pod in self.of(service.workload)
                if not pod.is_gone
            ]
            self.api.put(ENDPOINT_SLICES, endpoint_slice(service.name, *endpoints, namespace=NAMESPACE))

    def _ready(self, workload: str) -> list[str]:
        return [pod.address for pod in self.of(workload) if pod.is_ready and not pod.is_terminating]

    def _may_evict(self, pod: ProcessPod) -> bool:
        deployment = self._deployments[pod.workload]
        if deployment.workload.budget is None or not pod.is_ready:  # AlwaysAllow
            return True
        return len(self._ready(pod.workload)) > deployment.replicas - deployment.workload.budget
