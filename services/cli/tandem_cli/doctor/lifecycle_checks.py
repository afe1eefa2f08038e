"""Of manifests: what cuts answers short, kills a pod that loads, or leaves no room for the model."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tandem_cli.doctor.finding import Finding
from tandem_cli.doctor.manifests import Objects, Workload

#: A process without a model is there after this time.
_START_S = 10.0
#: Of a model's weights that are read and converted at the first start, on a slow disk.
_LOAD_BYTES_PER_S = 50e6
#: Of a model's file: the file, and the weights as converted from it, which may be larger.
_DISK_FACTOR = 2.0


def grace_period(objects: Objects) -> Iterator[Finding]:
    """SIGKILL does not come before the drain has ended."""
    for workload in objects.workloads:
        if not workload.role:
            continue
        drain_s, pre_stop_s = workload.number("drain_s"), _pre_stop_s(workload)
        grace_s = workload.pod.termination_grace_period_seconds
        grace_s = 30 if grace_s is None else grace_s
        if grace_s < drain_s + pre_stop_s:
            yield Finding(
                f"{workload.where}, terminationGracePeriodSeconds",
                f"It is killed after {grace_s} s, while preStop and TANDEM_DRAIN_S take "
                f"{pre_stop_s + drain_s:g} s.",
                f"Set terminationGracePeriodSeconds to {math.ceil(pre_stop_s + drain_s) + 5} or more.",
            )


def pre_stop(objects: Objects) -> Iterator[Finding]:
    """Callers learn that a pod leaves before it refuses calls."""
    for workload in objects.of_role("gateway") + objects.of_role("decode") + objects.of_role("prefill"):
        if not _pre_stop_s(workload):
            yield Finding(
                f"{workload.where}, lifecycle",
                "It has no preStop pause, so calls still arrive when it stops.",
                "Set lifecycle.preStop.sleep.seconds to 7, a gateway's to 10.",
            )


def _pre_stop_s(workload: Workload) -> float:
    lifecycle = workload.container.lifecycle
    stop = lifecycle.pre_stop if lifecycle else None
    return float(stop.sleep.seconds) if stop and stop.sleep else 0.0


def startup_probe(objects: Objects) -> Iterator[Finding]:
    """A pod is not killed while it loads its model."""
    for workload in objects.workloads:
        if not workload.role:
            continue
        model = workload.known_model if workload.role in ("decode", "prefill") else None
        needed_s = _START_S + (model.num_bytes / _LOAD_BYTES_PER_S if model else 0.0)
        probe = workload.container.startup_probe or workload.container.liveness_probe
        if probe is None:
            continue
        period_s, failures = probe.period_seconds or 10, probe.failure_threshold or 3
        allowed_s = (probe.initial_delay_seconds or 0) + period_s * failures
        if allowed_s < needed_s:
            what = f"loading {workload.model}" if model else "its start"
            yield Finding(
                f"{workload.where}, startupProbe",
                f"It is killed after {allowed_s} s, while {what} may take {needed_s:.0f} s.",
                f"Set failureThreshold to {math.ceil(needed_s / period_s)} or more in a startupProbe.",
            )


def readiness(objects: Objects) -> Iterator[Finding]:
    """The kubelet can ask a pod that speaks mutual TLS."""
    for workload in objects.workloads:
        probe = workload.container.readiness_probe
        if workload.role and workload.setting("pod_tls_cert") and probe and probe.grpc is not None:
            yield Finding(
                f"{workload.where}, readinessProbe",
                "It is a gRPC probe, which has no certificate for the pod's mutual TLS.",
                "Set httpGet of /readyz at the port metrics.",
            )


def model_volume(objects: Objects) -> Iterator[Finding]:
    """The volume with the model holds it, and so do limits of ephemeral storage: a pod that writes more is
    evicted. Models that are not in the catalogue are not judged."""
    for workload in objects.of_role("decode") + objects.of_role("prefill"):
        volume, model = _model_volume(workload), workload.known_model
        if volume is None or model is None:
            continue
        needed = model.disk_bytes + (_DISK_FACTOR - 1) * model.num_bytes
        rooms = [_room(objects, volume)]
        if volume.empty_dir is not None:
            rooms += [_ephemeral_room(container) for container in workload.containers]
        for label, quantity in rooms:
            if quantity is not None and parse_quantity(quantity) < needed:
                yield Finding(
                    f"{workload.where}, {label}",
                    f"It has {quantity}, while {workload.model} needs {needed / 1e9:.3g} GB.",
                    f"Make it {int(needed // 2**30) + 1}Gi or more, or take components/model-pvc.",
                )


def _model_volume(workload: Workload) -> Any | None:
    """The volume with the folder of TANDEM_MODEL."""
    folder = workload.environment.get("TANDEM_MODEL", "")
    for mount in workload.container.volume_mounts or ():
        if folder.startswith(mount.mount_path.rstrip("/") + "/"):
            return next((one for one in workload.pod.volumes or () if one.name == mount.name), None)
    return None


def _room(objects: Objects, volume: Any) -> tuple[str, str | None]:
    """A quantity; None: without a limit, or not known."""
    if volume.empty_dir is not None:
        return f"volume {volume.name}", volume.empty_dir.size_limit
    if volume.persistent_volume_claim is not None:
        name = volume.persistent_volume_claim.claim_name
        claim = objects.find("PersistentVolumeClaim", name)
        if claim is not None:
            return f"claim {name}", claim.spec.resources.requests["storage"]
    return f"volume {volume.name}", None


def _ephemeral_room(container: Any) -> tuple[str, str | None]:
    limits = (container.resources.limits if container.resources else None) or {}
    return f"ephemeral-storage of container {container.name}", limits.get("ephemeral-storage")


def model_claim(objects: Objects) -> Iterator[Finding]:
    """Pods of several nodes can read one claim."""
    for workload in objects.workloads:
        for volume in workload.pod.volumes or ():
            name = volume.persistent_volume_claim.claim_name if volume.persistent_volume_claim else ""
            claim = objects.find("PersistentVolumeClaim", name)
            if claim and not {"ReadWriteMany", "ReadOnlyMany"} & set(claim.spec.access_modes or ()):
                yield Finding(
                    f"PersistentVolumeClaim {name}",
                    f"One node at a time can mount it, while pods of {workload.name} run on several.",
                    "Give it the access mode ReadWriteMany, or ReadOnlyMany of a filled volume.",
                )


LIFECYCLE_CHECKS = (grace_period, pre_stop, startup_probe, readiness, model_volume, model_claim)
