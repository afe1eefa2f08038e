"""A cluster of processes on this machine: `kubectl apply` and what follows from it, on addresses in 127/8.

    apply       reads rendered manifests; each Deployment reaches its state by its rolling update rules
    delete_pod, scale, drain      as kubectl's commands; drain keeps PodDisruptionBudgets
    kubectl     does the same through the API server: pods, Deployments and nodes are objects there
    EndpointSlices                are served by an API stub, with ready, serving, terminating and zone
    Services with an address      are proxied to ready pods

Not here: images and init containers (the processes are those of a virtual environment), network policies,
resources, Pod Security.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kubelet.api_stub import ENDPOINT_SLICES, endpoint, endpoint_slice
from kubelet.kubectl_api import KubectlApi
from kubelet.manifests import NAME, Manifest, Service, Workload, revision, secrets, services, workloads
from kubelet.process_pod import ProcessPod
from kubelet.service_proxy import ServiceProxy

NAMESPACE = "tandem"
#: Kinds of objects from which workloads are made.
_READ = ("configmaps", "secrets", "services", "poddisruptionbudgets", "deployments", "statefulsets")
_CONTROL_S = 0.05
_MOST_RESTARTS = 3


@dataclass
class _Deployment:
    workload: Workload
    replicas: int
    #: Programs of the pods that are to be there.
    bin_folder: Path
    #: Of the last restart.
    reason: str = ""

    @property
    def wanted(self) -> tuple[str, Path, str]:
        return revision(self.workload.template), self.bin_folder, self.reason


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
    api: KubectlApi = field(default_factory=KubectlApi)
    #: Programs by image; pods of other images run those of `bin_folder`.
    images: dict[str, Path] = field(default_factory=dict)
    _cordoned: set[str] = field(default_factory=set)
    _deployments: dict[str, _Deployment] = field(default_factory=dict)
    _services: list[Service] = field(default_factory=list)
    _secrets: dict[str, dict[str, str]] = field(default_factory=dict)
    _proxies: dict[str, ServiceProxy] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(2))
    _made: dict[int, tuple[str, Path, str]] = field(default_factory=dict)
    #: Whether a client has written what workloads are made from.
    _is_written: bool = False
    _controller: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.api.after_write, self.api.delete_pod, self.api.evict = self._written, self._delete, self._evict
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
        self._secrets |= secrets(manifests)
        for pod in self.pods:  # a kubelet takes up to a minute
            pod.write_secrets(self._secrets)
        for number, service in enumerate(self._services, 1):
            if service.name not in self._proxies:
                address = f"127.{self.network}.0.{number}"
                proxy = ServiceProxy(address, service.ports, lambda of=service.workload: self._ready(of))
                self._proxies[service.name] = proxy
                await proxy.start()
        for workload in workloads(manifests):
            known = self._deployments.get(workload.name)
            replicas = workload.replicas
            if replicas is None:
                replicas = known.replicas if known else 1
            folder = bin_folder or self.images.get(workload.template.image)
            folder = folder or (known.bin_folder if known else self.bin_folder)
            reason = known.reason if known else ""
            self._deployments[workload.name] = _Deployment(workload, replicas, folder, reason)

    async def kubectl(self, *arguments: str) -> str:
        """What the command prints. Raises AssertionError with what it says if it fails."""
        process = await asyncio.create_subprocess_exec(
            str(Path(sys.prefix) / "bin" / "kubectl"),
            *("--kubeconfig", str(self._kubeconfig), "--cache-dir", str(self.folder / "kubectl-cache")),
            *arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        printed = (await process.communicate())[0].decode()
        assert process.returncode == 0, f"kubectl {' '.join(arguments)}: {printed}"
        return printed

    def set_programs(self, name: str, bin_folder: Path) -> None:
        """As `kubectl set image`."""
        self._deployments[name].bin_folder = bin_folder

    def restart(self, name: str, reason: str) -> None:
        """As `kubectl rollout restart`: a change of the template that means nothing to the process."""
        self._deployments[name].reason = reason

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
                self.api.forget("pods", NAMESPACE, pod.name)
            if self._is_written:
                self._is_written = False
                # Without a ConfigMap or Secret that is yet to come, pods wait for it.
                with contextlib.suppress(KeyError):
                    await self.apply(self.api.all(*_READ))
            for name, deployment in self._deployments.items():
                self._reconcile(name, deployment)
            self._show()
            await asyncio.sleep(_CONTROL_S)

    def _show(self) -> None:
        """Nodes, pods and the states of Deployments, for kubectl."""
        for node in self.nodes:
            spec = {"unschedulable": True} if node in self._cordoned else {}
            self.api.put_changed(
                "nodes", {"kind": "Node", "apiVersion": "v1", "metadata": {"name": node}, "spec": spec}
            )
        for pod in self.pods:
            self.api.put_changed("pods", _pod_object(pod))
        for item in self.api.all("deployments"):
            deployment = self._deployments.get(item["metadata"]["name"])
            if deployment is not None:
                self.api.put_changed("deployments", {**item, "status": self._status(item, deployment)})

    def _status(self, item: Manifest, deployment: _Deployment) -> Manifest:
        staying = [pod for pod in self.of(deployment.workload.name) if not pod.is_terminating]
        num_ready = sum(pod.is_ready for pod in staying)
        return {
            "observedGeneration": item["metadata"].get("generation", 0) - self._is_written,
            "replicas": len(staying),
            "updatedReplicas": sum(self._made[id(pod)] == deployment.wanted for pod in staying),
            "readyReplicas": num_ready,
            "availableReplicas": num_ready,
            "unavailableReplicas": max(deployment.replicas - num_ready, 0),
        }

    def _written(self, plural: str, item: Manifest) -> None:
        self._is_written = self._is_written or plural in _READ
        if plural == "nodes":
            name, is_cordoned = item["metadata"]["name"], item.get("spec", {}).get("unschedulable", False)
            (self._cordoned.add if is_cordoned else self._cordoned.discard)(name)

    def _delete(self, name: str) -> None:
        next(pod for pod in self.pods if pod.name == name).delete()

    def _evict(self, name: str) -> bool:
        pod = next(pod for pod in self.pods if pod.name == name)
        if not pod.is_terminating:
            if not self._may_evict(pod):
                return False
            pod.delete()
        return True

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
            secrets=self._secrets,
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


def _pod_object(pod: ProcessPod) -> Manifest:
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": pod.workload, "uid": pod.workload}
    metadata: Manifest = {
        "name": pod.name,
        "namespace": NAMESPACE,
        "labels": {NAME: pod.workload},
        "ownerReferences": [{**owner, "controller": True}],
    }
    if pod.is_terminating:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    return {
        "kind": "Pod",
        "apiVersion": "v1",
        "metadata": metadata,
        "spec": {"nodeName": pod.node, "containers": [{"name": pod.workload, "image": pod.template.image}]},
        "status": {
            "phase": "Running",
            "podIP": pod.address,
            "conditions": [{"type": "Ready", "status": str(pod.is_ready)}],
        },
    }
