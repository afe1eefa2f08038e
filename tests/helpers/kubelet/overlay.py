"""The overlay that a cluster of processes runs: two pods of each role, no keys, small settings."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from kubelet.manifests import Manifest, render

_K8S = Path(__file__).resolve().parents[3] / "deploy/k8s"


def manifests(
    folder: Path, settings: Mapping[str, Mapping[str, str]], components: Sequence[str] = ("two-of-each",)
) -> list[Manifest]:
    """Those of overlays/dev with settings changed by role; written to folder, which must exist."""
    kustomization = {
        "resources": [os.path.relpath(_K8S / "overlays/dev", folder)],
        "components": [os.path.relpath(_K8S / "components" / name, folder) for name in components],
        "configMapGenerator": [
            {
                "name": f"tandem-{role}-settings",
                "namespace": "tandem",
                "behavior": "merge",
                "literals": [f"{name}={value}" for name, value in changed.items()],
            }
            for role, changed in settings.items()
        ],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(kustomization))
    return render(folder)


def small(model: Path) -> dict[str, dict[str, str]]:
    """Settings of eight pods on a small machine."""
    engine = {"TANDEM_MODEL": str(model), "TANDEM_THREADS": "1", "TANDEM_NUM_BLOCKS": "128"}
    return {"gateway": {"TANDEM_MODEL": str(model)}, "decode": engine, "prefill": engine}
