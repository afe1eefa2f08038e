"""The scale subresource of a Deployment or StatefulSet: its number of replicas."""

from __future__ import annotations

from dataclasses import dataclass

from kubernetes.aio import client

_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class WorkloadRef:
    """`str()` gives the form of the settings: deployment/NAME or statefulset/NAME."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}/{self.name}"

    @property
    def resource(self) -> str:
        """The name of the resource in a Role."""
        return f"{self.kind}s/scale of {self.name}"


KINDS = ("deployment", "statefulset")


def parse_workload(text: str) -> WorkloadRef:
    kind, _, name = text.strip().partition("/")
    if kind not in KINDS or not name:
        raise ValueError(f"{text!r} is no deployment/NAME or statefulset/NAME")
    return WorkloadRef(kind, name)


class Workload:
    """Reads and sets the replicas of a workload. Raises ApiException and connection errors."""

    def __init__(self, api: client.ApiClient, namespace: str, ref: WorkloadRef) -> None:
        self.ref, self._namespace = ref, namespace
        kind = "deployment" if ref.kind == "deployment" else "stateful_set"
        apps = client.AppsV1Api(api)
        self._read = getattr(apps, f"read_namespaced_{kind}_scale")
        self._replace = getattr(apps, f"replace_namespaced_{kind}_scale")

    async def read(self) -> client.V1Scale:
        return await self._read(self.ref.name, self._namespace, _request_timeout=_TIMEOUT_S)

    async def set_replicas(self, scale: client.V1Scale, replicas: int) -> None:
        """Fails with 409 if the workload has changed since `scale` was read."""
        scale.spec = client.V1ScaleSpec(replicas=replicas)
        await self._replace(self.ref.name, self._namespace, scale, _request_timeout=_TIMEOUT_S)
