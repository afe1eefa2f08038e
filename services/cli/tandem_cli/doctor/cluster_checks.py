"""Of manifests and the cluster that they are for: what they need of it and it does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem_cli.doctor.cluster import Cluster
from tandem_cli.doctor.finding import Finding, Severity
from tandem_cli.doctor.manifests import GPU, Objects, Workload
from tandem_cli.doctor.network import NAMESPACE_LABEL, Peer, addresses, lets_out
from tandem_cli.doctor.rollout_checks import surge

#: The first with preStop.sleep.
_LEAST_VERSION = (1, 30)
_PART_OF = "app.kubernetes.io/name"


@dataclass(frozen=True)
class Target:
    """An installation and the cluster that is to have it."""

    objects: Objects
    cluster: Cluster


def kubernetes_version(target: Target) -> Iterator[Finding]:
    major, minor = target.cluster.version
    if (major, minor) < _LEAST_VERSION:
        yield Finding(
            "API server",
            f"It is Kubernetes {major}.{minor}, which does not know preStop.sleep, so it refuses the pods.",
            "Take Kubernetes 1.30 or newer.",
        )


def rights_to_ask(target: Target) -> Iterator[Finding]:
    for what in target.cluster.refused:
        yield Finding(
            "kubeconfig",
            f"Its user may not list {what}, so what depends on them is not examined.",
            f"Use a user that may list {what}.",
            Severity.WARNING,
        )


def custom_kind(target: Target) -> Iterator[Finding]:
    for one in target.objects.custom:
        if one.api_version not in target.cluster.api_versions:
            yield Finding(
                f"{one.kind} {one.name}",
                f"The cluster has no {one.api_version}, so it refuses the object.",
                "Install the operator that brings it, or leave the component out.",
            )


def secret(target: Target) -> Iterator[Finding]:
    """Secrets that pods name exist, with the keys that they use."""
    if target.cluster.secrets is None:
        return
    there = dict(target.cluster.secrets)
    for made in target.objects.of("Secret"):
        there[made.metadata.name] = frozenset({*(made.data or ()), *(made.string_data or ())})
    wanted: dict[str, tuple[set[str], str]] = {}
    for workload in target.objects.workloads:
        for name, key in _named_secrets(workload):
            wanted.setdefault(name, (set(), workload.where))[0].update({key} - {""})
    for name, (keys, where) in sorted(wanted.items()):
        missing = sorted(keys - there.get(name, frozenset()))
        if name not in there:
            what = f"The Secret {name} is not in the namespace {target.cluster.namespace}, so no pod starts."
        elif missing:
            what = f"The Secret {name} has no {', '.join(missing)}, so no pod starts."
        else:
            continue
        yield Finding(where, what, "Make it before, as the head of the overlay's kustomization.yaml shows.")


def _named_secrets(workload: Workload) -> Iterator[tuple[str, str]]:
    """Names with a key, or "" where a whole Secret is mounted."""
    for container in workload.containers:
        for variable in container.env or ():
            reference = variable.value_from and variable.value_from.secret_key_ref
            if reference and not reference.optional:
                yield reference.name, reference.key
        for source in container.env_from or ():
            if source.secret_ref is not None and not source.secret_ref.optional:
                yield source.secret_ref.name, ""
    for volume in workload.pod.volumes or ():
        if volume.secret is not None and not volume.secret.optional:
            yield volume.secret.secret_name, ""


def storage_class(target: Target) -> Iterator[Finding]:
    classes, claims = target.cluster.storage_classes, target.cluster.claims or frozenset()
    if classes is None:
        return
    for where, spec, name in _claims(target.objects):
        if name in claims:  # bound already, or said by Kubernetes
            continue
        if spec.storage_class_name is None and not any(classes.values()):
            yield Finding(
                where,
                "It names no StorageClass and the cluster has no default one, so it stays Pending.",
                f"Set storageClassName, one of {', '.join(sorted(classes)) or 'none there yet'}.",
            )
        elif spec.storage_class_name and spec.storage_class_name not in classes:
            yield Finding(
                where,
                f"The cluster has no StorageClass {spec.storage_class_name}, so it stays Pending.",
                f"Name one of {', '.join(sorted(classes)) or 'none there yet'}.",
            )


def _claims(objects: Objects) -> Iterator[tuple[str, Any, str]]:
    for claim in objects.of("PersistentVolumeClaim"):
        yield f"PersistentVolumeClaim {claim.metadata.name}", claim.spec, claim.metadata.name
    for workload in objects.workloads:
        if workload.object.kind == "StatefulSet":
            for template in workload.object.spec.volume_claim_templates or ():
                name = f"{template.metadata.name}-{workload.name}-0"
                yield f"{workload.where}, claim {template.metadata.name}", template.spec, name


def node(target: Target) -> Iterator[Finding]:
    """Some node takes the pods of each workload."""
    if target.cluster.nodes is None:
        return
    for workload in target.objects.workloads:
        if not _nodes_for(target.cluster, workload):
            yield Finding(
                workload.where,
                "No schedulable node has the labels of its nodeSelector and only taints that it tolerates.",
                "Label a node, or correct nodeSelector and tolerations.",
            )


def free_gpus(target: Target) -> Iterator[Finding]:
    """For all pods and, where a rollout starts one before it stops one, a spare."""
    if target.cluster.nodes is None or target.cluster.pods is None:
        return
    groups: dict[frozenset[str], list[Workload]] = {}
    for workload in target.objects.workloads:
        nodes = frozenset(one.metadata.name for one in _nodes_for(target.cluster, workload))
        if workload.num_gpus and nodes:
            groups.setdefault(nodes, []).append(workload)
    for names, workloads in groups.items():
        free = sum(
            _gpus(one.status.allocatable) for one in target.cluster.nodes if one.metadata.name in names
        )
        free -= sum(_used_gpus(pod) for pod in target.cluster.pods if _is_other(pod, names, target))
        steady = sum(one.replicas * one.num_gpus for one in workloads)
        # One role rolls at a time.
        spare = max(surge(one)[0] * one.num_gpus if not surge(one)[1] else 0 for one in workloads)
        if free < steady + spare:
            named = ", ".join(one.name for one in workloads)
            rest = f" and {spare} for a rollout" if spare else ""
            yield Finding(
                named,
                f"They need {steady} {GPU}{rest}, and the nodes that take them have {free} free.",
                "Add nodes, or lower replicas; maxSurge: 0 and maxUnavailable: 1 need no spare GPU.",
            )


def dns(target: Target) -> Iterator[Finding]:
    """The cluster's DNS is where the NetworkPolicies let pods ask it."""
    if target.cluster.dns_slices is None:
        return
    ports = {
        int(port.port)
        for one in target.cluster.dns_slices
        if one.endpoints
        for port in one.ports or ()
        if port.protocol == "UDP"
    }
    asking = {one.workload.name: one.workload for one in addresses(target.objects) if one.service}
    if not ports:
        yield Finding(
            "kube-system, Service kube-dns",
            "It has no pods: DNS is down, or runs in a namespace that the NetworkPolicies do not allow.",
            "Start it, or allow its namespace and port in the NetworkPolicy tandem-default.",
            Severity.WARNING,
        )
        return
    peer = Peer({"k8s-app": "kube-dns"}, {NAMESPACE_LABEL: "kube-system"})
    for workload in asking.values():
        if not any(lets_out(target.objects, workload, peer, port, "UDP") for port in ports):
            yield Finding(
                f"NetworkPolicies of {workload.name}",
                f"DNS pods listen on port {', '.join(map(str, sorted(ports)))}, which they do not allow.",
                "Add this port to the rule for kube-system in the NetworkPolicy tandem-default.",
            )


def image(target: Target) -> Iterator[Finding]:
    """An image without a registry's host is one that some node has."""
    if target.cluster.nodes is None:
        return
    known = {
        name.removeprefix("docker.io/library/")
        for one in target.cluster.nodes
        for held in one.status.images or ()
        for name in held.names or ()
    }
    for workload in target.objects.workloads:
        for name in sorted({str(container.image) for container in workload.containers}):
            if "/" not in name and name not in known:
                yield Finding(
                    f"{workload.where}, image {name}",
                    "It names no registry and no node has it, so nodes look for it at docker.io.",
                    "Push it, and name your registry in images: of your overlay.",
                )


def _nodes_for(cluster: Cluster, workload: Workload) -> list[Any]:
    wanted = (workload.pod.node_selector or {}).items()
    return [
        one
        for one in cluster.nodes or ()
        if not one.spec.unschedulable
        and wanted <= (one.metadata.labels or {}).items()
        and all(
            taint.effect == "PreferNoSchedule" or _tolerates(workload, taint)
            for taint in one.spec.taints or ()
        )
    ]


def _tolerates(workload: Workload, taint: Any) -> bool:
    return any(
        (not one.key or one.key == taint.key)
        and (not one.effect or one.effect == taint.effect)
        and (one.operator == "Exists" or (one.value or "") == (taint.value or ""))
        for one in workload.pod.tolerations or ()
    )


def _gpus(resources: Any) -> int:
    return int((resources or {}).get(GPU, 0))


def _used_gpus(pod: Any) -> int:
    if pod.status.phase in ("Succeeded", "Failed"):
        return 0
    return sum(_gpus(one.resources.limits if one.resources else None) for one in pod.spec.containers)


def _is_other(pod: Any, nodes: frozenset[str], target: Target) -> bool:
    """Whether it is on one of the nodes, and not of this installation."""
    own = {one.labels.get(_PART_OF) for one in target.objects.workloads}
    is_own = pod.metadata.namespace == target.cluster.namespace and (
        (pod.metadata.labels or {}).get(_PART_OF) in own
    )
    return pod.spec.node_name in nodes and not is_own


CLUSTER_CHECKS = (
    kubernetes_version,
    rights_to_ask,
    custom_kind,
    secret,
    storage_class,
    node,
    free_gpus,
    dns,
    image,
)
