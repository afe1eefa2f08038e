"""The rendered overlays of deploy/k8s, into which tests inject faults."""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import yaml

OVERLAYS = Path(__file__).resolve().parents[2] / "deploy/k8s/overlays"

Manifest = dict[str, Any]


@cache
def rendered(overlay: str) -> str:
    kubectl = Path(sys.executable).parent / "kubectl"
    command = [kubectl, "kustomize", str(OVERLAYS / overlay)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


class Manifests:
    """Manifests of an overlay, into which a test injects a fault."""

    def __init__(self, overlay: str) -> None:
        self.all: list[Manifest] = list(yaml.safe_load_all(rendered(overlay)))

    def get(self, kind: str, name: str) -> Manifest:
        """ConfigMaps have a hash in their names."""
        (found,) = [
            item
            for item in self.all
            if item["kind"] == kind
            and (
                item["metadata"]["name"] == name or (kind == "ConfigMap" and name in item["metadata"]["name"])
            )
        ]
        return found

    def settings(self, role: str) -> dict[str, str]:
        return self.get("ConfigMap", f"tandem-{role}-settings")["data"]

    def spec(self, role: str) -> Manifest:
        kind = "StatefulSet" if role == "redis" else "Deployment"
        return self.get(kind, f"tandem-{role}")["spec"]

    def pod(self, role: str) -> Manifest:
        return self.spec(role)["template"]["spec"]

    def container(self, role: str) -> Manifest:
        return self.pod(role)["containers"][0]

    def variable(self, role: str, name: str) -> Manifest:
        (found,) = [one for one in self.container(role)["env"] if one["name"] == name]
        return found

    def without_variable(self, role: str, name: str) -> None:
        self.container(role)["env"].remove(self.variable(role, name))
