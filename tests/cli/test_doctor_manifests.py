"""`tandem doctor` on manifests: exactly the seeded fault is found; the overlays have none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from rendered_overlays import Manifest, Manifests, rendered
from tandem_cli.doctor.examine import MANIFEST_CHECKS, examine_manifests
from tandem_cli.doctor.manifests import ManifestError, parse, read_manifests
from tandem_cli.main import app
from typer.testing import CliRunner

NAMES = ("dev", "cpu", "tls", "gpu-h200")


@dataclass(frozen=True)
class Fault:
    #: Check that names it, and a part of what it says.
    check: str
    says: str
    seed: Callable[[Manifests], object]
    overlay: str = "cpu"


def expose_without_keys(m: Manifests) -> None:
    m.get("Service", "tandem-gateway")["spec"]["type"] = "LoadBalancer"


def serve_a_large_model(m: Manifests) -> None:
    name = "qwen2.5-coder-1.5b-instruct"
    for role, folder in (("gateway", "tokenizers"), ("decode", "models"), ("prefill", "models")):
        m.settings(role)["TANDEM_MODEL"] = f"/var/lib/tandem/{folder}/{name}"
        m.pod(role)["initContainers"][0]["command"][-1] = name
    m.pod("decode")["volumes"][0]["emptyDir"]["sizeLimit"] = "2Gi"


def write_past_the_limit(m: Manifests) -> None:
    m.container("decode")["resources"]["limits"]["ephemeral-storage"] = "100Mi"


def one_address_for_all(m: Manifests) -> None:
    m.variable("gateway", "TANDEM_PREFILL")["value"] = "tandem-prefill:21100"
    del m.get("Service", "tandem-prefill")["spec"]["clusterIP"]


def short_probe(m: Manifests) -> None:
    m.container("decode")["startupProbe"].update(failureThreshold=2, periodSeconds=5)


def grpc_probe_under_tls(m: Manifests) -> None:
    probe = m.container("decode")["readinessProbe"]
    del probe["httpGet"]
    probe["grpc"] = {"port": 21200}


FAULTS = [
    Fault(
        "unknown-setting",
        "TANDEM_MAX_BACTH is no setting of tandem-decode",
        lambda m: m.settings("decode").update(TANDEM_MAX_BACTH="4"),
    ),
    Fault(
        "refused-setting",
        "a multiple of 16",
        lambda m: m.settings("prefill").update(TANDEM_BLOCK_SIZE="10"),
    ),
    Fault(
        "refused-setting", "there is no TLS", lambda m: m.settings("decode").update(TANDEM_INSECURE="false")
    ),
    Fault(
        "mounted-file",
        "/etc/tandem/api-keys/keys.jsonl is on no volume",
        lambda m: m.container("gateway")["volumeMounts"].pop(),
    ),
    Fault(
        "one-model",
        "tandem-decode other",
        lambda m: (
            m.settings("decode").update(TANDEM_MODEL="/var/lib/tandem/models/other"),
            m.pod("decode").pop("initContainers"),
        ),
    ),
    Fault(
        "pulled-model",
        "It pulls qwen",
        lambda m: m.pod("decode")["initContainers"][0]["command"].__setitem__(3, "qwen"),
    ),
    Fault(
        "device",
        "no nvidia.com/gpu",
        lambda m: m.container("decode")["resources"]["limits"].pop("nvidia.com/gpu"),
        "gpu-h200",
    ),
    Fault(
        "kv-room",
        "512 blocks of 64 tokens do not hold",
        lambda m: m.settings("decode").update(TANDEM_MAX_MODEL_LEN="40000"),
    ),
    Fault(
        "encrypted-links",
        "these do not",
        lambda m: (
            [m.settings("decode").pop(f"TANDEM_POD_TLS_{name}") for name in ("CERT", "KEY", "CA")]
            and m.settings("decode").update(TANDEM_INSECURE="true")
        ),
        "tls",
    ),
    Fault("api-keys", "needs no API key", expose_without_keys, "dev"),
    Fault(
        "shared-answers",
        "no Redis",
        lambda m: m.without_variable("gateway", "TANDEM_REDIS_URL"),
    ),
    Fault(
        "named-service",
        "The Service tandem-decoder is not in these manifests",
        lambda m: m.variable("gateway", "TANDEM_DECODE").update(value="k8s://tandem-decoder:21200"),
    ),
    Fault(
        "named-service",
        "selects no pod",
        lambda m: m.get("Service", "tandem-lookahead")["spec"].update(selector={"app": "other"}),
    ),
    Fault(
        "named-service",
        "tandem-lookahead listens on 21400",
        lambda m: m.variable("decode", "TANDEM_LOOKAHEAD").update(value="tandem-lookahead:21401"),
    ),
    Fault("named-service", "one address for all pods", one_address_for_all),
    Fault(
        "grace-period",
        "killed after 600 s",
        lambda m: m.pod("decode").update(terminationGracePeriodSeconds=600),
    ),
    Fault("pre-stop", "no preStop pause", lambda m: m.container("gateway").pop("lifecycle")),
    Fault("startup-probe", "loading smollm2-135m-instruct", short_probe),
    Fault("readiness", "gRPC probe", grpc_probe_under_tls, "tls"),
    Fault("model-volume", "volume home", serve_a_large_model),
    Fault("model-volume", "has 100Mi", write_past_the_limit),
]


@pytest.mark.parametrize("overlay", NAMES)
def test_the_overlays_have_no_findings(overlay: str) -> None:
    assert examine_manifests(parse(yaml.safe_load_all(rendered(overlay)))) == []


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.check}: {fault.says}"[:60])
def test_exactly_the_seeded_fault_is_found(fault: Fault) -> None:
    manifests = Manifests(fault.overlay)
    fault.seed(manifests)
    findings = examine_manifests(parse(copy.deepcopy(manifests.all)))
    assert {one.check for one in findings} == {fault.check}, findings
    assert any(fault.says in f"{one.where} {one.what}" for one in findings), findings
    for one in findings:
        assert one.where
        assert one.what.endswith(".")
        assert one.remedy.endswith(".")


def test_every_check_of_manifests_has_a_seeded_fault() -> None:
    assert {check.__name__.replace("_", "-") for check in MANIFEST_CHECKS} == {one.check for one in FAULTS}


def test_settings_in_flags_secrets_and_next_to_sidecars_are_read() -> None:
    manifests = Manifests("cpu")
    # A flag wins over the variable; a sidecar may come first.
    manifests.container("decode")["args"] = ["--drain-s=900", "--max-batch", "8", "--insecure"]
    manifests.pod("decode")["containers"].insert(0, {"name": "proxy", "image": "proxy:1"})
    # Values outside the manifests are not checked.
    variables = manifests.container("prefill")["env"]
    reference = {"secretKeyRef": {"name": "tandem-redis", "key": "password"}}
    variables.append({"name": "TANDEM_MAX_BATCH", "valueFrom": reference})
    variables.append({"name": "TANDEM_PORT", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
    variables.remove(next(one for one in variables if one.get("value") == "21100"))
    manifests.settings("gateway").pop("TANDEM_MODEL")
    manifests.container("gateway")["envFrom"].append({"secretRef": {"name": "settings"}})
    findings = examine_manifests(parse(manifests.all))
    (finding,) = findings
    assert finding.check == "grace-period"
    assert "take 907 s" in finding.what


def run(manifests: list[Manifest], *flags: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(app, ["doctor", "-", *flags], input=yaml.safe_dump_all(manifests))
    return outcome.exit_code, outcome.stdout


def test_the_exit_code_distinguishes_errors_from_warnings() -> None:
    manifests = Manifests("dev")
    assert run(manifests.all) == (0, f"{len(MANIFEST_CHECKS)} checks, 5 workloads: no problem\n")
    expose_without_keys(manifests)
    code, text = run(manifests.all)
    assert code == 0
    assert text.startswith("warning: Deployment tandem-gateway [api-keys]\n")
    assert text.endswith("0 errors, 1 warnings\n")
    short_probe(manifests)
    code, text = run(manifests.all)
    assert code == 1
    assert text.startswith("error: ")


def test_json_has_each_finding() -> None:
    manifests = Manifests("dev")
    manifests.pod("decode")["terminationGracePeriodSeconds"] = 30
    code, text = run(manifests.all, "--json")
    assert code == 1
    (finding,) = json.loads(text)
    assert finding == {
        "check": "grace-period",
        "severity": "error",
        "where": "Deployment tandem-decode, terminationGracePeriodSeconds",
        "what": "It is killed after 30 s, while preStop and TANDEM_DRAIN_S take 607 s.",
        "remedy": "Set terminationGracePeriodSeconds to 612 or more.",
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is no YAML"),
        ("just a text", "is no Kubernetes object"),
        (
            "{apiVersion: apps/v1, kind: Deployment, metadata: {name: x}, spec: {replicas: 2}}",
            "no containers",
        ),
    ],
)
def test_a_file_that_is_no_manifest_is_refused_with_the_reason(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "manifests.yaml"
    path.write_text(text)
    with pytest.raises(ManifestError, match=says):
        read_manifests(path)


def test_a_folder_without_a_kustomization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="kustomize"):
        read_manifests(tmp_path)
    outcome = CliRunner().invoke(app, ["doctor", str(tmp_path / "none")])
    assert outcome.exit_code == 2
