"""The rules that the process kubelet follows, with pods that are small HTTP servers."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml
from kubelet.cluster import Cluster
from kubelet.manifests import NAME, Manifest
from waiting import until

PROGRAM = """#!/bin/sh
exec {python} -c '
import http.server, os, signal, sys, time
host, marks = os.environ["TANDEM_HOST"], os.environ["MARKS"]
def stop(*_):
    with open(marks, "a") as file: file.write(os.environ["POD"] + " SIGTERM\\\\n")
    time.sleep(float(os.environ["DRAIN"])); os._exit(0)
signal.signal(signal.SIGTERM, stop)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if not os.path.exists(marks + ".unready") else 503); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer((host, 9090), Handler).serve_forever()
'
"""


def manifests(
    folder: Path,
    *,
    replicas: int = 2,
    surge: int = 1,
    unavailable: int = 0,
    drain: str = "0.1",
    grace: int = 5,
    version: str = "1",
    period_s: float = 0.1,
) -> list[Manifest]:
    """A Deployment `web` with its budget and its Service."""
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": period_s, "failureThreshold": 50}
    container = {
        "name": "web",
        "image": "web:1",
        "command": ["web"],
        "env": [
            {"name": "MARKS", "value": str(folder / "marks")},
            {"name": "DRAIN", "value": drain},
            {"name": "VERSION", "value": version},
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
        "ports": [{"name": "http", "containerPort": 9090}],
        "startupProbe": probe,
        "readinessProbe": {**probe, "failureThreshold": 2},
        "livenessProbe": probe,
        "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
    }
    labels = {NAME: "web"}
    pod = {"containers": [container], "terminationGracePeriodSeconds": grace}
    rolling = {"rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}
    return [
        {
            "kind": "Deployment",
            "apiVersion": "apps/v1",
            "metadata": {"name": "web", "namespace": "tandem"},
            "spec": {
                "replicas": replicas,
                "strategy": rolling,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            },
        },
        {
            "kind": "PodDisruptionBudget",
            "apiVersion": "policy/v1",
            "metadata": {"name": "web", "namespace": "tandem"},
            "spec": {"selector": {"matchLabels": labels}, "maxUnavailable": 1},
        },
        {
            "kind": "Service",
            "apiVersion": "v1",
            "metadata": {"name": "web", "namespace": "tandem"},
            "spec": {"selector": labels, "ports": [{"port": 9090}]},
        },
    ]


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    program = tmp_path / "bin" / "web"
    program.parent.mkdir()
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    made = Cluster(tmp_path, program.parent, network=79, paths={})
    await made.start()
    yield made
    await made.close()


async def watch(cluster: Cluster, seen: list[tuple[int, int]]) -> None:
    """Notes how many pods are there, without those that terminate, and how many of them are ready."""
    while True:
        staying = [pod for pod in cluster.of("web") if not pod.is_terminating]
        seen.append((len(staying), sum(pod.is_ready for pod in staying)))
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("surge", "unavailable"), [(1, 0), (0, 1)])
async def test_a_rollout_keeps_to_surge_and_unavailable(
    cluster: Cluster, tmp_path: Path, surge: int, unavailable: int
) -> None:
    rules = {"surge": surge, "unavailable": unavailable}
    await cluster.apply(manifests(tmp_path, **rules))
    await cluster.until_rolled_out(20)
    before, seen = {pod.name for pod in cluster.pods}, []
    watching = asyncio.create_task(watch(cluster, seen))
    await cluster.apply(manifests(tmp_path, **rules, version="2"))
    await cluster.until_rolled_out(20)
    watching.cancel()
    assert not before & {pod.name for pod in cluster.pods}
    assert max(count for count, _ in seen) == 2 + surge
    assert min(ready for _, ready in seen) == 2 - unavailable


async def test_a_deleted_pod_is_told_after_its_pre_stop_and_killed_after_its_grace(
    cluster: Cluster, tmp_path: Path
) -> None:
    await cluster.apply(manifests(tmp_path, replicas=1, drain="60", grace=3))
    await cluster.until_rolled_out(20)
    (pod,) = cluster.pods
    deleted_at = time.monotonic()
    cluster.delete_pod(pod)
    assert pod.is_terminating
    await until(lambda: (tmp_path / "marks").exists())
    assert time.monotonic() - deleted_at >= 1.0
    await until(lambda: pod.is_gone)
    assert pod.was_killed
    assert 3.0 <= pod.gone_at - pod.deleted_at < 4.5
    await cluster.until_rolled_out(20)
    assert cluster.pods[0] is not pod


async def test_a_drain_keeps_the_budget_and_leaves_the_node_empty(cluster: Cluster, tmp_path: Path) -> None:
    cluster.nodes = {"node-a": "a"}
    await cluster.apply(manifests(tmp_path))
    await cluster.until_rolled_out(20)
    cluster.nodes = {"node-a": "a", "node-b": "b"}
    seen: list[tuple[int, int]] = []
    watching = asyncio.create_task(watch(cluster, seen))
    await cluster.drain("node-a", 30)
    await cluster.until_rolled_out(20)
    watching.cancel()
    assert min(ready for _, ready in seen) == 1
    assert {pod.node for pod in cluster.pods} == {"node-b"}


async def test_a_pod_that_is_not_ready_gets_no_new_connection(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.apply(manifests(tmp_path, replicas=1))
    await cluster.until_rolled_out(20)
    (pod,) = cluster.pods
    (tmp_path / "marks.unready").touch()
    await until(lambda: not pod.is_ready)
    (listed,) = cluster.api.get("endpointslices", "tandem", "web-abcde")["endpoints"]
    assert listed["conditions"] == {"ready": False, "serving": False, "terminating": False}
    reader, writer = await asyncio.open_connection(cluster.service_address("web"), 9090)
    assert await reader.read() == b"", "closed at once"
    writer.close()


async def applied(cluster: Cluster, folder: Path) -> None:
    """By kubectl, from a kustomization."""
    (folder / "k8s").mkdir()
    (folder / "k8s" / "all.yaml").write_text(yaml.safe_dump_all(manifests(folder, period_s=1)))
    (folder / "k8s" / "kustomization.yaml").write_text("resources: [all.yaml]")
    await cluster.kubectl("apply", "--server-side", "--validate=false", "-k", str(folder / "k8s"))
    told = await cluster.kubectl("rollout", "status", "deployment/web", "--timeout=20s")
    assert "successfully rolled out" in told
    assert [pod.is_ready for pod in cluster.pods] == [True, True]


async def test_kubectl_applies_and_deletes(cluster: Cluster, tmp_path: Path) -> None:
    await applied(cluster, tmp_path)
    first, second = cluster.pods
    await cluster.kubectl("delete", "pod", first.name)
    assert first.is_gone, "the command waits"
    assert second in cluster.pods


@pytest.mark.wide
async def test_kubectl_sets_images_restarts_scales_and_drains(cluster: Cluster, tmp_path: Path) -> None:
    await applied(cluster, tmp_path)
    other = tmp_path / "other-bin"
    other.mkdir()
    (other / "web").write_text((tmp_path / "bin" / "web").read_text())
    (other / "web").chmod(0o755)
    cluster.images["web:2"] = other
    for change in (["set", "image", "deployment/web", "web=web:2"], ["rollout", "restart", "deployment/web"]):
        before = set(cluster.pods)
        await cluster.kubectl(*change)
        await cluster.kubectl("rollout", "status", "deployment/web", "--timeout=20s")
        await cluster.until_rolled_out(20)
        assert not before & set(cluster.pods)
        assert {pod.template.image for pod in cluster.pods} == {"web:2"}
    for count in (3, 0, 2):
        await cluster.kubectl("scale", "deployment/web", f"--replicas={count}")
        await cluster.until(lambda count=count: len(cluster.of("web")) == count, 20)
    await cluster.kubectl("apply", "--server-side", "--validate=false", "-k", str(tmp_path / "k8s"))
    await cluster.until_rolled_out(20)
    seen: list[tuple[int, int]] = []
    watching = asyncio.create_task(watch(cluster, seen))
    told = await cluster.kubectl("drain", "node-b", "--timeout=30s")
    watching.cancel()
    assert "node/node-b drained" in told
    assert min(ready for _, ready in seen) >= 1
    assert {pod.node for pod in cluster.pods} == {"node-a"}
    await cluster.kubectl("uncordon", "node-b")
    await cluster.kubectl("delete", "pod", cluster.pods[0].name)
    await cluster.until_rolled_out(20)
    assert {pod.node for pod in cluster.pods} == {"node-a", "node-b"}
