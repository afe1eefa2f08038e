"""The overlay that a cluster of processes runs: two pods of each role, no keys, small settings."""

from __future__ import annotations

import base64
import ipaddress
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from cryptography import x509
from tandem_cli.up import certificates

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


def tls_secrets(folder: Path, redis_address: str) -> list[Manifest]:
    """What `tandem certificates` gives to `kubectl apply`, made anew by the CA in folder. Names are addresses
    on the process kubelet, so the certificate of Redis states its address too."""
    found = json.loads(certificates.kubernetes_secrets(folder, "tandem"))["items"]
    names = [x509.DNSName("tandem-redis"), x509.IPAddress(ipaddress.ip_address(redis_address))]
    files = certificates._issue(folder, "redis", names, certificates._VALIDITY)
    for secret in found:
        if secret["metadata"]["name"] == "tandem-redis-tls":
            pems = {"tls.crt": files.cert, "tls.key": files.key}
            secret["data"] |= {
                key: base64.b64encode(path.read_bytes()).decode() for key, path in pems.items()
            }
    return found
