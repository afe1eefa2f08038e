"""Of manifests: what stops a rollout, a node's drain or an autoscaler, and what cuts answers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from tandem_cli.doctor.finding import Finding, Severity
from tandem_cli.doctor.manifests import GPU, Objects, Workload

#: A process without a model is there after this time.
_START_S = 10.0
#: Of a model's weights that are read and converted at the first start, on a slow disk.
_LOAD_BYTES_PER_S = 50e6


def disruption_budget(objects: Objects) -> Iterator[Finding]:
    for budget in objects.of("PodDisruptionBudget"):
        selector = (budget.spec.selector.match_labels or {}).items()
        for workload in objects.workloads:
            if not selector <= workload.labels.items() or _evictions(budget.spec, workload.replicas) > 0:
                continue
            yield Finding(
                f"PodDisruptionBudget {budget.metadata.name}",
                f"It never lets a pod of {workload.name} go while there are {workload.replicas}, so a node "
                "with one cannot be drained.",
                "Set maxUnavailable: 1 in place of minAvailable.",
            )


def _evictions(spec: Any, replicas: int) -> int:
    least, most = spec.min_available, spec.max_unavailable
    if least is not None:
        return replicas - _share(least, replicas, math.ceil)
    return _share(most if most is not None else 0, replicas, math.ceil)


def _share(value: int | str, replicas: int, rounded: Callable[[float], int]) -> int:
    """Of a number or of "25%"."""
    if isinstance(value, str) and value.endswith("%"):
        return rounded(replicas * float(value[:-1]) / 100)
    return int(value)


def surge(workload: Workload) -> tuple[int, int]:
    """Pods more, and pods fewer, than `replicas` that a rollout may make."""
    strategy = workload.object.spec.strategy if workload.object.kind == "Deployment" else None
    if strategy is None and workload.object.kind == "Deployment":
        more, fewer = "25%", "25%"
    elif strategy is None or strategy.type == "Recreate":
        return 0, workload.replicas
    else:
        rolling = strategy.rolling_update
        more = "25%" if rolling is None or rolling.max_surge is None else rolling.max_surge
        fewer = "25%" if rolling is None or rolling.max_unavailable is None else rolling.max_unavailable
    return (
        _share(more, workload.replicas, math.ceil),
        _share(fewer, workload.replicas, math.floor),
    )


def spare_gpu(objects: Objects) -> Iterator[Finding]:
    for workload in objects.workloads:
        more, fewer = surge(workload)
        if workload.num_gpus and more and not fewer:
            yield Finding(
                workload.where,
                f"A rollout starts a pod before it stops one, which needs {more * workload.num_gpus} spare "
                f"{GPU}.",
                "Keep as many free, or set maxSurge: 0 and maxUnavailable: 1.",
                Severity.WARNING,
            )


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
    """A pod is asked by the path that says whether it takes calls."""
    for workload in objects.workloads:
        if not workload.role:
            continue
        probe = workload.container.readiness_probe
        if probe is None:
            yield Finding(
                f"{workload.where}, readinessProbe",
                "It has none, so it gets calls before it has loaded.",
                "Set httpGet of /readyz at the port metrics.",
            )
        elif probe.grpc is not None and workload.setting("pod_tls_cert"):
            yield Finding(
                f"{workload.where}, readinessProbe",
                "It is a gRPC probe, which has no certificate for the pod's mutual TLS.",
                "Set httpGet of /readyz at the port metrics.",
            )


def fixed_replicas(objects: Objects) -> Iterator[Finding]:
    scaled = {
        scaler.spec.scale_target_ref.name: scaler.metadata.name
        for scaler in objects.of("HorizontalPodAutoscaler")
    } | {one.scales: one.name for one in objects.custom if one.scales}
    for workload in objects.workloads:
        if workload.name in scaled and workload.object.spec.replicas is not None:
            yield Finding(
                f"{workload.where}, replicas",
                f"Each `kubectl apply` undoes what the autoscaler {scaled[workload.name]} has chosen.",
                "Remove replicas (components/two-of-each).",
            )


def image_tag(objects: Objects) -> Iterator[Finding]:
    for workload in objects.workloads:
        for container in workload.containers:
            image = str(container.image or "")
            tag = image.rpartition("/")[2].partition(":")[2]
            if "@" not in image and tag in ("", "latest"):
                yield Finding(
                    f"{workload.where}, image {image}",
                    "Its tag moves, so pods of one Deployment may run different versions.",
                    "Name a version or a digest in images: of your overlay.",
                    Severity.WARNING,
                )
                break


ROLLOUT_CHECKS = (
    disruption_budget,
    spare_gpu,
    grace_period,
    pre_stop,
    startup_probe,
    readiness,
    fixed_replicas,
    image_tag,
)
