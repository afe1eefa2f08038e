"""Checks of manifests for drains, grace periods, probes and the size of the model volume."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tandem_cli.doctor.finding import Finding
from tandem_cli.doctor.manifests import Objects, Workload, at

#: A process without a model starts within this time.
_START_S = 10.0
#: Rate at which a slow disk reads and converts weights at the first start.
_LOAD_BYTES_PER_S = 50e6
#: Disk space per byte of the model's file: the file and the converted weights, which may be larger.
_DISK_FACTOR = 2.0


def grace_period(objects: Objects) -> Iterator[Finding]:
    """The grace period is longer than the drain."""
    for workload in objects.workloads:
        if not workload.role:
            continue
        drain_s, pre_stop_s = workload.number("drain_s"), _pre_stop_s(workload)
        grace_s = at(workload.pod, "terminationGracePeriodSeconds")
        grace_s = 30 if grace_s is None else grace_s
        if grace_s < drain_s + pre_stop_s:
            yield Finding(
                f"{workload.where}, terminationGracePeriodSeconds",
                f"It is killed after {grace_s} s, while preStop and TANDEM_DRAIN_S take "
                f"{pre_stop_s + drain_s:g} s.",
                f"Set terminationGracePeriodSeconds to {math.ceil(pre_stop_s + drain_s) + 5} or more.",
            )


def pre_stop(objects: Objects) -> Iterator[Finding]:
    """Callers learn that a pod stops before it refuses calls."""
    for workload in objects.of_role("gateway") + objects.of_role("decode") + objects.of_role("prefill"):
        if not _pre_stop_s(workload):
            yield Finding(
                f"{workload.where}, lifecycle",
                "It has no preStop pause, so calls still arrive when it stops.",
                "Set lifecycle.preStop.sleep.seconds to 7, a gateway's to 10.",
            )


def _pre_stop_s(workload: Workload) -> float:
    return float(at(workload.container, "lifecycle", "preStop", "sleep", "seconds") or 0)


def startup_probe(objects: Objects) -> Iterator[Finding]:
    """A pod is not killed while it loads its model."""
    for workload in objects.workloads:
        if not workload.role:
            continue
        model = workload.known_model if workload.role in ("decode", "prefill") else None
        needed_s = _START_S + (model.num_bytes / _LOAD_BYTES_PER_S if model else 0.0)
        probe = at(workload.container, "startupProbe") or at(workload.container, "livenessProbe")
        if probe is None:
            continue
        period_s, failures = probe.get("periodSeconds") or 10, probe.get("failureThreshold") or 3
        allowed_s = (probe.get("initialDelaySeconds") or 0) + period_s * failures
        if allowed_s < needed_s:
            what = f"loading {workload.model}" if model else "its start"
            yield Finding(
                f"{workload.where}, startupProbe",
                f"It is killed after {allowed_s} s, while {what} may take {needed_s:.0f} s.",
                f"Set failureThreshold to {math.ceil(needed_s / period_s)} or more in a startupProbe.",
            )


def readiness(objects: Objects) -> Iterator[Finding]:
    """The kubelet can probe a pod that uses mutual TLS."""
    for workload in objects.workloads:
        is_grpc = at(workload.container, "readinessProbe", "grpc") is not None
        if workload.role and is_grpc and workload.setting("pod_tls_cert"):
            yield Finding(
                f"{workload.where}, readinessProbe",
                "It is a gRPC probe, which has no certificate for the pod's mutual TLS.",
                "Set httpGet of /readyz at the port metrics.",
            )


def model_volume(objects: Objects) -> Iterator[Finding]:
    """The model fits on its volume and into limits of ephemeral storage, beyond which a pod is evicted.

    Models that are not in the catalogue are skipped.
    """
    for workload in objects.of_role("decode") + objects.of_role("prefill"):
        volume, model = _model_volume(workload), workload.known_model
        if volume is None or model is None:
            continue
        needed = model.disk_bytes + (_DISK_FACTOR - 1) * model.num_bytes
        rooms = [_room(objects, volume)]
        if "emptyDir" in volume:
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
    for mount in workload.container.get("volumeMounts") or ():
        if folder.startswith(mount["mountPath"].rstrip("/") + "/"):
            volumes = workload.pod.get("volumes") or ()
            return next((one for one in volumes if one["name"] == mount["name"]), None)
    return None


def _room(objects: Objects, volume: Any) -> tuple[str, Any]:
    """The volume's name and its size; None: unlimited or unknown."""
    if name := at(volume, "persistentVolumeClaim", "claimName"):
        claim = objects.find("PersistentVolumeClaim", name)
        return f"claim {name}", at(claim, "spec", "resources", "requests", "storage")
    return f"volume {volume['name']}", at(volume, "emptyDir", "sizeLimit")


def _ephemeral_room(container: Any) -> tuple[str, Any]:
    limit = at(container, "resources", "limits", "ephemeral-storage")
    return f"ephemeral-storage of container {container['name']}", limit


LIFECYCLE_CHECKS = (grace_period, pre_stop, startup_probe, readiness, model_volume)
