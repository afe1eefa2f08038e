"""`tandem doctor` on manifests and a cluster: an API server that tells of nodes, Secrets and classes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubelet.api_stub import ENDPOINT_SLICES, ApiStub, endpoint, endpoint_slice
from rendered_overlays import Manifests
from tandem_cli.doctor.before import examine_cluster
from tandem_cli.doctor.cluster import ClusterError, ask_cluster
from tandem_cli.doctor.cluster_checks import CLUSTER_CHECKS
from tandem_cli.doctor.finding import Finding
from tandem_cli.doctor.manifests import parse
from tandem_cli.main import app
from typer.testing import CliRunner

GPU = "nvidia.com/gpu"
H200 = {"nvidia.com/gpu.product": "NVIDIA-H200"}


def node(
    name: str, *, gpus: int = 0, images: tuple[str, ...] = ("docker.io/library/tandem:0.1.0-cpu",)
) -> Any:
    labels = {"kubernetes.io/hostname": name, **(H200 if gpus else {})}
    taints = [{"key": GPU, "effect": "NoSchedule", "value": "present"}] if gpus else []
    allocatable = {"cpu": "64", "memory": "512Gi", **({GPU: str(gpus)} if gpus else {})}
    return {
        "metadata": {"name": name, "namespace": "", "labels": labels},
        "spec": {"taints": taints},
        "status": {"allocatable": allocatable, "images": [{"names": list(images)}]},
    }


def secret(name: str, *keys: str) -> Any:
    return {"metadata": {"name": name, "namespace": "tandem"}, "data": dict.fromkeys(keys, "eA==")}


def storage_class(name: str, *, is_default: bool = False) -> Any:
    notes = {"storageclass.kubernetes.io/is-default-class": "true"} if is_default else {}
    return {"metadata": {"name": name, "namespace": "", "annotations": notes}, "provisioner": "x"}


def gpu_pod(name: str, on: str, gpus: int, namespace: str = "other") -> Any:
    container = {"name": "main", "image": "x", "resources": {"limits": {GPU: str(gpus)}}}
    return {
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"nodeName": on, "containers": [container]},
        "status": {"phase": "Running"},
    }


def dns(port: int) -> Any:
    made = endpoint_slice("kube-dns", endpoint("10.0.0.10"), namespace="kube-system")
    return {**made, "ports": [{"name": "dns", "port": port, "protocol": "UDP"}]}


def healthy(api: ApiStub) -> None:
    """A cluster that can have every overlay."""
    api.put("nodes", node("cpu-1"))
    api.put("nodes", node("gpu-1", gpus=4, images=("tandem:0.1.0-cuda",)))
    api.put("secrets", secret("tandem-api-keys", "keys.jsonl"))
    api.put("secrets", secret("tandem-redis", "password"))
    for role in ("gateway", "decode", "prefill", "lookahead", "redis"):
        api.put("secrets", secret(f"tandem-{role}-tls", "tls.crt", "tls.key", "ca.crt"))
    api.put("storageclasses", storage_class("fast", is_default=True))
    api.put(ENDPOINT_SLICES, dns(53))


@dataclass(frozen=True)
class Fault:
    check: str
    says: str
    seed: Callable[[ApiStub, Manifests], object]
    overlay: str = "cpu"


def no_default_class(api: ApiStub, _: Manifests) -> None:
    api.put("storageclasses", storage_class("fast"))


def unknown_class(_: ApiStub, m: Manifests) -> None:
    m.get("PersistentVolumeClaim", "tandem-model")["spec"]["storageClassName"] = "nfs"


def scaled_object(_: ApiStub, m: Manifests) -> None:
    m.all.append(
        {
            "apiVersion": "keda.sh/v1alpha1",
            "kind": "ScaledObject",
            "metadata": {"name": "decode", "namespace": "tandem"},
            "spec": {},
        }
    )


def no_spare_gpu(_: ApiStub, m: Manifests) -> None:
    m.spec("decode")["strategy"]["rollingUpdate"] = {"maxSurge": 1, "maxUnavailable": 0}


FAULTS = [
    Fault("kubernetes-version", "Kubernetes 1.28", lambda api, m: setattr(api, "kubernetes", ("1", "28"))),
    Fault("rights-to-ask", "may not list nodes", lambda api, m: api.forbidden.add("nodes")),
    Fault("custom-kind", "no keda.sh/v1alpha1", scaled_object),
    Fault(
        "secret",
        "The Secret tandem-redis is not in the namespace tandem",
        lambda api, m: api.delete("secrets", "tandem", "tandem-redis"),
    ),
    Fault("secret", "has no password", lambda api, m: api.put("secrets", secret("tandem-redis", "pass"))),
    Fault(
        "secret",
        "tandem-decode-tls",
        lambda api, m: api.delete("secrets", "tandem", "tandem-decode-tls"),
        "tls",
    ),
    Fault("storage-class", "no default one", no_default_class, "gpu-h200"),
    Fault("storage-class", "no StorageClass nfs", unknown_class, "gpu-h200"),
    Fault(
        "node",
        "No schedulable node",
        lambda api, m: [m.pod(role).pop("tolerations") for role in ("decode", "prefill")],
        "gpu-h200",
    ),
    Fault(
        "free-gpus",
        "They need 4 nvidia.com/gpu, and the nodes that take them have 3 free",
        lambda api, m: api.put("pods", gpu_pod("trainer", "gpu-1", 1)),
        "gpu-h200",
    ),
    Fault("dns", "DNS pods listen on port 5353", lambda api, m: api.put(ENDPOINT_SLICES, dns(5353))),
    Fault(
        "dns",
        "It has no pods",
        lambda api, m: api.delete(ENDPOINT_SLICES, "kube-system", "kube-dns-abcde"),
    ),
    Fault("image", "no node has it", lambda api, m: api.put("nodes", node("cpu-1", images=()))),
]


async def examine(folder: Path, overlay: str, seed: Callable[[ApiStub, Manifests], object]) -> list[Finding]:
    api, manifests = ApiStub(), Manifests(overlay)
    healthy(api)
    seed(api, manifests)
    await api.start()
    try:
        kubeconfig = api.kubeconfig(folder)
        cluster = await asyncio.to_thread(ask_cluster, kubeconfig, None, "tandem")
    finally:
        await api.stop()
    return examine_cluster(parse(manifests.all), cluster)


@pytest.mark.parametrize("overlay", ["dev", "cpu", "tls", "gpu-h200"])
async def test_nothing_is_wrong_in_a_cluster_that_has_all(overlay: str, tmp_path: Path) -> None:
    assert await examine(tmp_path, overlay, lambda api, m: None) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.says}"[:60])
async def test_a_seeded_fault_is_named_and_nothing_else(fault: Fault, tmp_path: Path) -> None:
    findings = await examine(tmp_path, fault.overlay, fault.seed)
    assert {one.check for one in findings} == {fault.check}, findings
    assert any(fault.says in one.what for one in findings), findings
    assert all(one.where and one.what.endswith(".") and one.remedy.endswith(".") for one in findings)


def test_every_check_of_a_cluster_has_a_seeded_fault() -> None:
    assert {check.__name__.replace("_", "-") for check in CLUSTER_CHECKS} == {one.check for one in FAULTS}


async def test_a_rollout_needs_a_spare_gpu_beside_those_in_use(tmp_path: Path) -> None:
    """The pods of the installation itself do not count twice."""

    def seed(api: ApiStub, m: Manifests) -> None:
        no_spare_gpu(api, m)
        own = gpu_pod("tandem-decode-1", "gpu-1", 1, "tandem")
        own["metadata"]["labels"] = {"app.kubernetes.io/name": "tandem-decode"}
        api.put("pods", own)

    found = {one.check: one for one in await examine(tmp_path, "gpu-h200", seed)}
    assert "4 nvidia.com/gpu and 1 for a rollout" in found["free-gpus"].what
    assert found["free-gpus"].severity == "error"


async def test_the_command_asks_the_cluster(tmp_path: Path) -> None:
    api = ApiStub()
    healthy(api)
    await api.start()
    path = tmp_path / "manifests.yaml"
    path.write_text(yaml.safe_dump_all(Manifests("cpu").all))
    flags = ["doctor", str(path), "--json", "--kubeconfig", str(api.kubeconfig(tmp_path))]
    try:
        fine = await asyncio.to_thread(CliRunner().invoke, app, flags)
        api.delete("secrets", "tandem", "tandem-api-keys")
        wrong = await asyncio.to_thread(CliRunner().invoke, app, flags)
    finally:
        await api.stop()
    assert (fine.exit_code, json.loads(fine.stdout)) == (0, [])
    assert wrong.exit_code == 1
    assert [one["check"] for one in json.loads(wrong.stdout)] == ["secret"]


async def test_a_cluster_that_cannot_be_asked_is_said(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be used"):
        ask_cluster(tmp_path / "none", None, "tandem")
    api = ApiStub(port=1)
    with pytest.raises(ClusterError, match="does not answer"):
        ask_cluster(api.kubeconfig(tmp_path), None, "tandem")
