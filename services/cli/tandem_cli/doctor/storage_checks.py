"""Of manifests: whether volumes and limits hold the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kubernetes.utils.quantity import parse_quantity

from tandem_cli.doctor.finding import Finding, Severity
from tandem_cli.doctor.manifests import Objects, Workload

#: Of a model's file: the file, and the weights as converted from it, which may be larger.
_DISK_FACTOR = 2.0


def model_volume(objects: Objects) -> Iterator[Finding]:
    """The volume with the model holds it. Models that are not in the catalogue are not judged."""
    for workload in objects.of_role("decode") + objects.of_role("prefill"):
        volume, model = _model_volume(workload), workload.known_model
        if volume is None or model is None:
            continue
        needed = model.disk_bytes + (_DISK_FACTOR - 1) * model.num_bytes
        label, room = _room(objects, volume)
        if room is not None and room < needed:
            yield Finding(
                f"{workload.where}, {label}",
                f"It has {room / 1e9:.3g} GB, while {workload.model} needs {needed / 1e9:.3g} GB.",
                f"Make it {_gibibytes(needed)}Gi or more, or take components/model-pvc.",
            )


def ephemeral_storage(objects: Objects) -> Iterator[Finding]:
    """A pod that writes more than its limit is evicted."""
    for workload in objects.of_role("decode") + objects.of_role("prefill"):
        volume, model = _model_volume(workload), workload.known_model
        if volume is None or volume.empty_dir is None or model is None:
            continue
        needed = model.disk_bytes + (_DISK_FACTOR - 1) * model.num_bytes
        for container in workload.containers:
            limits = (container.resources.limits if container.resources else None) or {}
            limit = limits.get("ephemeral-storage")
            if limit is not None and parse_quantity(limit) < needed:
                yield Finding(
                    f"{workload.where}, container {container.name}",
                    f"Its limit of ephemeral-storage, {limit}, is less than {workload.model} needs, "
                    f"{needed / 1e9:.3g} GB, so the pod is evicted.",
                    f"Make it {_gibibytes(needed)}Gi or more.",
                )


def model_claim(objects: Objects) -> Iterator[Finding]:
    """Pods of several nodes can read one claim."""
    for workload in objects.workloads:
        for volume in workload.pod.volumes or ():
            claim = volume.persistent_volume_claim
            if claim is None:
                continue
            found = objects.find("PersistentVolumeClaim", claim.claim_name)
            if found is None:
                yield Finding(
                    f"{workload.where}, volume {volume.name}",
                    f"The claim {claim.claim_name} is not among the manifests.",
                    "Make it before, or add it.",
                    Severity.WARNING,
                )
            elif not {"ReadWriteMany", "ReadOnlyMany"} & set(found.spec.access_modes or ()):
                yield Finding(
                    f"PersistentVolumeClaim {claim.claim_name}",
                    f"One node at a time can mount it, while pods of {workload.name} run on several.",
                    "Give it the access mode ReadWriteMany, or ReadOnlyMany of a filled volume.",
                )


def _model_volume(workload: Workload) -> Any | None:
    """The volume with the folder of TANDEM_MODEL."""
    folder = workload.environment.get("TANDEM_MODEL", "")
    for mount in workload.container.volume_mounts or ():
        if folder.startswith(mount.mount_path.rstrip("/") + "/"):
            return next((one for one in workload.pod.volumes or () if one.name == mount.name), None)
    return None


def _room(objects: Objects, volume: Any) -> tuple[str, float | None]:
    """Bytes; None: without a limit, or not known."""
    if volume.empty_dir is not None:
        limit = volume.empty_dir.size_limit
        return f"volume {volume.name}", None if limit is None else float(parse_quantity(limit))
    if volume.persistent_volume_claim is not None:
        name = volume.persistent_volume_claim.claim_name
        claim = objects.find("PersistentVolumeClaim", name)
        if claim is not None:
            return f"claim {name}", float(parse_quantity(claim.spec.resources.requests["storage"]))
    return f"volume {volume.name}", None


def _gibibytes(num_bytes: float) -> int:
    return int(num_bytes // 2**30) + 1


STORAGE_CHECKS = (model_volume, ephemeral_storage, model_claim)
