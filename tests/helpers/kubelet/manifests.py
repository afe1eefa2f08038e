"""What the process kubelet reads of rendered manifests: Deployments and StatefulSets of one container each,
with their Services, ConfigMaps, Secrets and PodDisruptionBudgets."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

NAME = "app.kubernetes.io/name"

Manifest = dict[str, Any]


def render(folder: Path) -> list[Manifest]:
    kubectl = Path(sys.executable).parent / "kubectl"
    rendered = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=True)
    return list(yaml.safe_load_all(rendered.stdout))


@dataclass(frozen=True)
class Probe:
    #: "": a TCP connection to the port, or a command that is not run here, is enough.
    path: str
    port: int
    period_s: float
    timeout_s: float
    failure_threshold: int


@dataclass(frozen=True)
class Template:
    """Of a workload's pods."""

    command: tuple[str, ...]
    #: With "$(NAME)", and "<status.podIP>" and "<metadata.name>" for what is known per pod.
    environment: tuple[tuple[str, str], ...]
    ports: tuple[tuple[str, int], ...]
    startup: Probe
    readiness: Probe
    liveness: Probe
    pre_stop_s: float
    grace_s: float
    image: str
    annotations: tuple[tuple[str, str], ...]
    #: Names of mounted Secrets by path. A change of what they hold changes no template.
    secrets: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Workload:
    name: str
    template: Template
    #: None: as many as there are, or one.
    replicas: int | None
    #: Both None: Recreate.
    max_surge: int | None
    max_unavailable: int | None
    #: Of its PodDisruptionBudget; None: there is no budget.
    budget: int | None


@dataclass(frozen=True)
class Service:
    name: str
    workload: str
    is_headless: bool
    ports: tuple[int, ...]


def workloads(manifests: Sequence[Manifest]) -> list[Workload]:
    data = _data(manifests)
    budgets = {
        item["spec"]["selector"]["matchLabels"][NAME]: int(item["spec"]["maxUnavailable"])
        for item in manifests
        if item["kind"] == "PodDisruptionBudget"
    }
    found = []
    for item in manifests:
        if item["kind"] not in ("Deployment", "StatefulSet"):
            continue
        spec, name = item["spec"], item["metadata"]["name"]
        rolling = spec.get("strategy", {}).get("rollingUpdate", {})
        found.append(
            Workload(
                name,
                _template(spec["template"], data),
                spec.get("replicas"),
                rolling.get("maxSurge"),
                rolling.get("maxUnavailable"),
                budgets.get(name),
            )
        )
    return found


def secrets(manifests: Sequence[Manifest]) -> dict[str, dict[str, str]]:
    """Values by key, of each Secret."""
    return {name: values for (kind, name), values in _data(manifests).items() if kind == "Secret"}


def services(manifests: Sequence[Manifest]) -> list[Service]:
    return [
        Service(
            item["metadata"]["name"],
            item["spec"]["selector"][NAME],
            item["spec"].get("clusterIP") == "None",
            tuple(port["port"] for port in item["spec"]["ports"]),
        )
        for item in manifests
        if item["kind"] == "Service"
    ]


def _data(manifests: Sequence[Manifest]) -> dict[tuple[str, str], dict[str, str]]:
    """Of ConfigMaps and Secrets, by kind and name."""
    found = {}
    for item in manifests:
        key = (item["kind"], item["metadata"]["name"])
        if item["kind"] == "ConfigMap":
            found[key] = dict(item["data"])
        elif item["kind"] == "Secret":
            found[key] = {name: base64.b64decode(text).decode() for name, text in item["data"].items()}
    return found


def _template(template: Manifest, data: Mapping[tuple[str, str], Mapping[str, str]]) -> Template:
    spec = template["spec"]
    (container,) = spec["containers"]
    environment: dict[str, str] = {}
    for source in container.get("envFrom", []):
        environment |= data["ConfigMap", source["configMapRef"]["name"]]
    for variable in container.get("env", []):
        source = variable.get("valueFrom", {})
        if "fieldRef" in source:
            environment[variable["name"]] = f"<{source['fieldRef']['fieldPath']}>"
        elif "secretKeyRef" in source:
            secret = source["secretKeyRef"]
            environment[variable["name"]] = data["Secret", secret["name"]][secret["key"]]
        else:
            environment[variable["name"]] = variable["value"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container.get("volumeMounts", [])}
    mounted = {
        mounts[volume["name"]]: volume["secret"]["secretName"]
        for volume in spec.get("volumes", [])
        if "secret" in volume
    }
    for name in mounted.values():
        data["Secret", name]  # a pod does not start without it
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    probes = {name: _probe(container[f"{name}Probe"], ports) for name in ("startup", "readiness", "liveness")}
    return Template(
        tuple(container["command"]),
        tuple(sorted(environment.items())),
        tuple(sorted(ports.items())),
        **probes,
        pre_stop_s=container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0),
        grace_s=spec.get("terminationGracePeriodSeconds", 30),
        image=container.get("image", ""),
        annotations=tuple(sorted(template.get("metadata", {}).get("annotations", {}).items())),
        secrets=tuple(sorted(mounted.items())),
    )


def _probe(probe: Manifest, ports: Mapping[str, int]) -> Probe:
    get = probe.get("httpGet", {})
    port = get.get("port") or probe.get("tcpSocket", {}).get("port") or next(iter(ports.values()))
    return Probe(
        get.get("path", ""),
        ports[port] if isinstance(port, str) else port,
        probe.get("periodSeconds", 10),
        probe.get("timeoutSeconds", 1),
        probe.get("failureThreshold", 3),
    )


def revision(template: Template) -> str:
    """Equal for equal templates; in the cluster it is the pod-template-hash."""
    what = (template.command, template.environment, template.ports, template.grace_s)
    return json.dumps([*what, template.image, template.annotations, template.secrets])
