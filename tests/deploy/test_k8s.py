"""The Kubernetes manifests: rendered by kustomize, validated strictly, and checked against the code.

Custom resources (cert-manager, Prometheus' operator, KEDA, Gateway API) are checked against shapes written
down from their documentation, crd_schemas.py.

There is no cluster here: what only a cluster can show (pulling images, scheduling, policies in force) is
not covered. The image is not built either; the Dockerfile is compared with what the manifests expect.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import crd_schemas
import jsonschema
import kubernetes_validate
import pytest
import yaml
from cryptography import x509
from promql_parser import parse
from role_settings import SETTINGS
from tandem_cli.scaler.settings import ScalerSettings
from tandem_service.metric_table import TABLE
from tandem_service.tls import PemFiles, Role

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "deploy/k8s"
BASE = K8S / "base"
DEV, CPU, TLS, GPU = (K8S / "overlays" / name for name in ("dev", "cpu", "tls", "gpu-h200"))
OVERLAYS = [DEV, CPU, TLS, GPU]
COMPONENTS = sorted(path.name for path in (K8S / "components").iterdir())
SCALERS = ("autoscaling-hpa", "autoscaling-keda")
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
ROLES = sorted(SETTINGS)
NAME = "app.kubernetes.io/name"

Manifest = dict[str, Any]


@cache
def render(folder: Path = BASE) -> tuple[Manifest, ...]:
    kubectl = Path(sys.executable).parent / "kubectl"
    rendered = subprocess.run(
        [kubectl, "kustomize", str(folder)], capture_output=True, text=True, check=False, timeout=60
    )
    assert rendered.returncode == 0, rendered.stderr
    return tuple(yaml.safe_load_all(rendered.stdout))


def check_schema(manifest: Manifest) -> None:
    """Raises if a field is unknown, missing or of a wrong type."""
    spec = crd_schemas.SPECS.get((manifest["apiVersion"], manifest["kind"]))
    if spec is None:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)
    else:
        jsonschema.validate(manifest["spec"], spec)
        assert manifest["metadata"]["name"]


def with_components(overlay: Path, *names: str) -> Path:
    """A kustomization of an overlay and components, as an operator would write it."""
    folder = Path(tempfile.mkdtemp(prefix="kustomization-"))
    paths = [os.path.relpath(K8S / "components" / name, folder) for name in names]
    text = {"resources": [os.path.relpath(overlay, folder)], "components": paths}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return folder


def objects(kind: str, folder: Path = BASE) -> dict[str, Manifest]:
    return {found["metadata"]["name"]: found for found in render(folder) if found["kind"] == kind}


def workload(role: str, folder: Path = BASE) -> Manifest:
    kind = "StatefulSet" if role == "redis" else "Deployment"
    return objects(kind, folder)[f"tandem-{role}"]


def pod_spec(role: str, folder: Path = BASE) -> Manifest:
    return workload(role, folder)["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def main_container(role: str, folder: Path = BASE) -> Manifest:
    (container,) = pod_spec(role, folder)["containers"]
    return container  # type: ignore[no-any-return]


def container_ports(role: str) -> dict[str, int]:
    return {port["name"]: port["containerPort"] for port in main_container(role)["ports"]}


def environment(role: str, folder: Path = BASE) -> dict[str, str]:
    """Variables of the main container; other objects' values stand as "<field path>" and "<secret/key>"."""
    container, maps = main_container(role, folder), objects("ConfigMap", folder)
    found: dict[str, str] = {}
    for source in container.get("envFrom", []):
        found |= maps[source["configMapRef"]["name"]]["data"]
    for variable in container.get("env", []):
        if "value" in variable:
            found[variable["name"]] = variable["value"]
        elif "fieldRef" in variable["valueFrom"]:
            found[variable["name"]] = f"<{variable['valueFrom']['fieldRef']['fieldPath']}>"
        else:
            secret = variable["valueFrom"]["secretKeyRef"]
            found[variable["name"]] = f"<{secret['name']}/{secret['key']}>"
    return found


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)
def test_each_object_is_valid_by_the_strict_schema(folder: Path) -> None:
    for manifest in render(folder):
        check_schema(manifest)


CLUSTER_WIDE = {"Namespace"}


@pytest.mark.parametrize("name", COMPONENTS)
def test_each_component_renders_and_is_valid(name: str) -> None:
    """With what it needs: the base, or another component before it."""
    before = {"cert-manager": ["tls"], "inference-pool": ["gateway-api"]}.get(name, [])
    folder = with_components(BASE, *before, name)
    for manifest in render(folder):
        check_schema(manifest)
        if manifest["kind"] not in CLUSTER_WIDE:
            assert manifest["metadata"]["namespace"] == "tandem"
    assert render(folder) != render(BASE)


def test_all_components_that_fit_together_render_together() -> None:
    names = [name for name in COMPONENTS if name not in ("two-of-each", "autoscaling-hpa", "no-api-keys")]
    names.sort(key=lambda name: name == "inference-pool")
    for manifest in render(with_components(BASE, *names)):
        check_schema(manifest)


@pytest.mark.parametrize("kind", ["ScaledObject", "HTTPRoute", "InferencePool", "PodMonitor", "Certificate"])
def test_a_misspelt_field_of_a_custom_resource_is_found(kind: str) -> None:
    folder = with_components(
        BASE, "autoscaling-keda", "gateway-api", "inference-pool", "monitoring", "tls", "cert-manager"
    )
    manifest = next(iter(objects(kind, folder).values()))
    wrong = {**manifest, "spec": {**manifest["spec"], "selektor": {}}}
    with pytest.raises(jsonschema.ValidationError):
        check_schema(wrong)


def test_the_strict_schema_refuses_a_misspelt_field() -> None:
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "x"}, "spec": {"port": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


@pytest.fixture(scope="module")
def secrets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """Contents of the Secrets that `tandem certificates` prints, by name."""
    folder = tmp_path_factory.mktemp("certificates")
    command = [Path(sys.executable).parent / "tandem", "certificates", "--folder", str(folder / "made")]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    items = json.loads(printed)["items"]
    for item in items:
        kubernetes_validate.validate(item, kubernetes_validate.latest_version(), strict=True)
        assert item["metadata"]["namespace"] == "tandem"
    return {
        item["metadata"]["name"]: {key: base64.b64decode(text) for key, text in item["data"].items()}
        for item in items
    }


@pytest.mark.parametrize("role", [*ROLES, "redis"])
def test_with_tls_a_pod_has_the_certificate_of_its_role(
    role: str, secrets: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    spec, container = pod_spec(role, TLS), main_container(role, TLS)
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "tls")
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "tls")
    assert mount["readOnly"] is True
    assert volume["secret"]["secretName"] == f"tandem-{role}-tls"
    assert volume["secret"]["defaultMode"] == 0o440
    files = secrets[volume["secret"]["secretName"]]
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    PemFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt").read()  # they fit together
    certificate = x509.load_pem_x509_certificate(files["tls.crt"])
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [f"tandem-{role}"]
    if role == "redis":
        mounted = {argument for argument in container["command"] if argument.startswith("/etc")}
    else:
        variables = environment(role, TLS)
        assert variables["TANDEM_INSECURE"] == "false"
        assert names.get_values_for_type(x509.UniformResourceIdentifier) == [Role(role).uri]
        mounted = {value for key, value in variables.items() if key.startswith("TANDEM_POD_TLS_")}
    assert mounted == {f"{mount['mountPath']}/{name}" for name in files}


@pytest.mark.parametrize("role", ["gateway", "lookahead"])
def test_with_tls_redis_is_asked_with_tls_alone(role: str) -> None:
    variables, server = environment(role, TLS), main_container("redis", TLS)["command"]
    assert variables["TANDEM_REDIS_URL"] == "rediss://:$(REDIS_PASSWORD)@tandem-redis:6379/0"
    assert variables["TANDEM_REDIS_CA_FILE"] == variables["TANDEM_POD_TLS_CA"]
    options = dict(pairwise(server))
    assert (options["--port"], options["--tls-port"]) == ("0", "6379")
    assert "--tls" in main_container("redis", TLS)["readinessProbe"]["exec"]["command"]


def test_cert_manager_issues_what_the_command_does(secrets: dict[str, dict[str, bytes]]) -> None:
    text = (ROOT / "deploy/k8s/components/cert-manager/certificates.yaml").read_text()
    issued = {
        item["spec"]["secretName"]: item["spec"]
        for item in yaml.safe_load_all(text)
        if item["kind"] == "Certificate" and not item["spec"].get("isCA")
    }
    assert set(issued) == set(secrets)
    for name, spec in issued.items():
        certificate = x509.load_pem_x509_certificate(secrets[name]["tls.crt"])
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert spec["dnsNames"] == names.get_values_for_type(x509.DNSName)
        assert spec.get("uris", []) == names.get_values_for_type(x509.UniformResourceIdentifier)


def test_there_is_every_part_and_all_in_one_namespace() -> None:
    assert set(objects("Deployment")) == {f"tandem-{role}" for role in ROLES}
    assert set(objects("StatefulSet")) == {"tandem-redis"}
    assert set(objects("Service")) == {f"tandem-{role}" for role in [*ROLES, "redis"]}
    assert {m["metadata"]["namespace"] for m in render() if m["kind"] != "Namespace"} == {"tandem"}


@pytest.mark.parametrize("folder", [BASE, *OVERLAYS], ids=lambda folder: folder.name)
@pytest.mark.parametrize("role", ROLES)
def test_every_variable_is_a_setting_of_its_process_and_its_value_is_accepted(
    role: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SETTINGS[role]
    variables = environment(role, folder)
    unknown = {key for key in variables if key.removeprefix("TANDEM_").lower() not in settings.model_fields}
    assert unknown <= {"REDIS_PASSWORD"}  # is used in the value of another one
    for key, value in variables.items():
        monkeypatch.setenv(key, "10.0.0.7" if value == "<status.podIP>" else value)
    loaded = settings(_cli_parse_args=[])
    assert loaded.listen_port() == container_ports(role)["grpc"]
    assert loaded.metrics_port == container_ports(role)["metrics"]
    assert loaded.host == "0.0.0.0"
    assert main_container(role)["command"] == [f"tandem-{role}"]


@pytest.mark.parametrize("role", ROLES)
def test_probes_ask_what_the_metrics_server_answers(role: str) -> None:
    container = main_container(role)
    assert "metrics" in container_ports(role)
    paths = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {get["port"] for get in paths.values()} == {"metrics"}
    assert paths["readiness"]["path"] == "/readyz"
    assert paths["liveness"]["path"] == "/livez"  # a pod that drains or waits for others is not restarted
    assert paths["startup"]["path"] == "/readyz"
    for name in ("startup", "readiness", "liveness"):
        assert container[f"{name}Probe"]["timeoutSeconds"] >= 3, "a busy machine answers late"


@pytest.mark.parametrize("folder", [BASE, TLS], ids=lambda folder: folder.name)
@pytest.mark.parametrize("role", [*ROLES, "redis"])
def test_no_probe_needs_a_certificate(role: str, folder: Path) -> None:
    """The kubelet's gRPC probes have none, and with mutual TLS every gRPC port asks for one."""
    container = main_container(role, folder)
    assert not [name for name in container if name.endswith("Probe") and "grpc" in container[name]]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_large_model_may_take_long_to_start(role: str) -> None:
    probe = main_container(role)["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 1800


def test_redis_is_probed_on_its_port() -> None:
    container = main_container("redis")
    for name in ("startupProbe", "livenessProbe"):
        assert container[name]["tcpSocket"]["port"] == container_ports("redis")["redis"]


@pytest.mark.parametrize("role", [*ROLES, "redis"])
def test_services_select_their_pods_and_lead_to_ports_they_have(role: str) -> None:
    service = objects("Service")[f"tandem-{role}"]["spec"]
    labels = workload(role)["spec"]["template"]["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert workload(role)["spec"]["selector"]["matchLabels"].items() <= labels.items()
    for port in service["ports"]:
        assert container_ports(role)[port["targetPort"]] == port["port"]
    selected = [r for r in [*ROLES, "redis"] if service["selector"][NAME] == f"tandem-{r}"]
    assert selected == [role]


@pytest.mark.parametrize(
    ("role", "variable", "peer"),
    [
        ("gateway", "TANDEM_DECODE", "decode"),
        ("gateway", "TANDEM_PREFILL", "prefill"),
        ("decode", "TANDEM_LOOKAHEAD", "lookahead"),
    ],
)
def test_each_process_is_told_the_name_and_port_of_its_peers(role: str, variable: str, peer: str) -> None:
    entry = environment(role)[variable]
    assert entry.startswith("k8s://") == (role == "gateway")
    host, port = entry.removeprefix("k8s://").split(":")
    assert host in objects("Service")
    assert host == f"tandem-{peer}"
    assert int(port) == container_ports(peer)["grpc"]


@pytest.mark.parametrize("role", ["gateway", "lookahead"])
def test_those_who_need_redis_are_told_of_it_and_of_its_password(role: str) -> None:
    assert environment(role)["TANDEM_REDIS_URL"] == "redis://:$(REDIS_PASSWORD)@tandem-redis:6379/0"
    server = main_container("redis")
    assert server["command"][server["command"].index("--requirepass") + 1] == "$(REDIS_PASSWORD)"
    assert {environment(name)["REDIS_PASSWORD"] for name in ("redis", role)} == {"<tandem-redis/password>"}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_the_name_of_an_engine_role_resolves_to_every_pod(role: str) -> None:
    """For discovery by DNS; by the API server it needs no more."""
    assert objects("Service")[f"tandem-{role}"]["spec"]["clusterIP"] == "None"


#: What running answers get after SIGTERM, s: a gateway drains as long as its longest request, and so does a
#: decode pod that is alone; a prefill pod finishes prompts.
DRAIN_S = {"gateway": 600, "decode": 600, "prefill": 120, "lookahead": 10}
#: DnsDiscovery asks again after this time, s.
DNS_REFRESH_S = 5


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_that_stops_has_time_for_what_it_runs(role: str) -> None:
    variables = environment(role)
    assert float(variables["TANDEM_DRAIN_S"]) == DRAIN_S[role]
    if role == "gateway":
        assert float(variables["TANDEM_REQUEST_TIMEOUT_S"]) <= DRAIN_S[role]


@pytest.mark.parametrize("role", ROLES)
def test_a_pod_stops_only_when_its_callers_have_seen_it(role: str) -> None:
    assert main_container(role)["lifecycle"]["preStop"]["sleep"]["seconds"] > DNS_REFRESH_S


@pytest.mark.parametrize("role", ["gateway", "decode", "prefill"])
def test_applying_again_leaves_the_number_of_pods(role: str) -> None:
    """Else `kubectl apply` would undo what an autoscaler or `kubectl scale` has chosen."""
    for folder in (BASE, DEV, *(with_components(BASE, name) for name in SCALERS)):
        assert "replicas" not in workload(role, folder)["spec"]
    assert workload(role, CPU)["spec"]["replicas"] == 2


@pytest.mark.parametrize("name", SCALERS)
def test_an_autoscaler_scales_deployments_that_exist_by_metrics_that_exist(name: str) -> None:
    folder = with_components(BASE, name)
    scaled = {
        **objects("ScaledObject", folder),
        **objects("HorizontalPodAutoscaler", folder),
    }
    assert set(scaled) == {"tandem-gateway", "tandem-decode", "tandem-prefill"}
    known = {row.name for row in TABLE}
    known |= {series for row in TABLE for series in row.series}
    for found in scaled.values():
        assert found["spec"]["scaleTargetRef"]["name"] == found["metadata"]["name"]
        for trigger in found["spec"].get("triggers", []):
            parse(trigger["metadata"]["query"])
            names = set(re.findall(r"tandem_\w+", trigger["metadata"]["query"]))
            assert names
            assert names <= known


def test_the_scaler_may_do_what_it_does_and_no_more() -> None:
    folder = with_components(BASE, "scaler")
    rules = {rule["resources"][0]: rule for rule in objects("Role", folder)["tandem-scaler"]["rules"]}
    assert rules["endpointslices"]["verbs"] == ["list", "watch"]
    scale, lease = rules["deployments/scale"], rules["leases"]
    assert scale["verbs"] == lease["verbs"] == ["get", "update"]
    defaults = ScalerSettings(_cli_parse_args=[])
    scaled = {defaults.prefill_workload, defaults.decode_workload}
    assert scaled <= {f"deployment/{name}" for name in objects("Deployment", folder)}
    assert {f"deployment/{name}" for name in scale["resourceNames"]} == scaled
    assert lease["resourceNames"] == [defaults.lease] == list(objects("Lease", folder))
    assert {verb for rule in rules.values() for verb in rule["verbs"]} == {"list", "watch", "get", "update"}
    assert len(rules) == 3
    assert pod_spec("scaler", folder)["serviceAccountName"] == "tandem-scaler"
    binding = objects("RoleBinding", folder)["tandem-scaler"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "tandem-scaler", "namespace": "tandem"}]


def test_the_scaler_reaches_the_metrics_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = with_components(BASE, "scaler")
    for key, value in environment("scaler", folder).items():
        monkeypatch.setenv(key, value)
    settings = ScalerSettings(_cli_parse_args=[])
    asked = {
        entry.removeprefix("k8s://")
        for entries in (settings.gateways, settings.prefill, settings.decode)
        for entry in entries
    }
    scraped = ["tandem-gateway", "tandem-decode", "tandem-prefill"]
    assert asked == {f"{name}:9090" for name in scraped}
    assert all(container_ports(name.removeprefix("tandem-"))["metrics"] == 9090 for name in scraped)
    policies = objects("NetworkPolicy", folder)
    (selected,) = policies["tandem-scaler-scrapes"]["spec"]["podSelector"]["matchExpressions"]
    assert selected["values"] == scraped
    to_pods, to_api = policies["tandem-scaler"]["spec"]["egress"]
    assert to_pods["to"] == [{"podSelector": {"matchExpressions": [selected]}}]
    assert to_pods["ports"] == [{"port": 9090}]
    assert {port["port"] for port in to_api["ports"]} == {443, 6443}
    assert main_container("scaler", folder)["command"] == ["tandem", "scaler"]
    assert settings.metrics_port == 9090


def test_the_scaler_sets_replicas_that_nothing_else_sets() -> None:
    folder = with_components(BASE, "scaler")
    for role in ("prefill", "decode"):
        assert "replicas" not in workload(role, folder)["spec"]
    assert not objects("ScaledObject", folder)
    spec = pod_spec("scaler", folder)
    assert workload("scaler", folder)["spec"]["replicas"] == 2
    (container,) = spec["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert spec["securityContext"]["runAsNonRoot"] is True


@pytest.mark.parametrize("role", ["gateway", "decode", "prefill"])
def test_pods_are_spread_over_nodes_and_zones_after_a_rollout_too(role: str) -> None:
    """Without matchLabelKeys the old pods count, and the new ones may all come to one node."""
    rules = pod_spec(role)["topologySpreadConstraints"]
    assert {rule["topologyKey"] for rule in rules} == {
        "kubernetes.io/hostname",
        "topology.kubernetes.io/zone",
    }
    for rule in rules:
        assert rule["matchLabelKeys"] == ["pod-template-hash"]
        assert rule["labelSelector"]["matchLabels"] == {NAME: f"tandem-{role}"}


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_rollout_needs_no_spare_gpu(role: str) -> None:
    assert workload(role, GPU)["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    resources = main_container(role, GPU)["resources"]
    assert resources["limits"]["nvidia.com/gpu"] == 1
    assert environment(role, GPU)["TANDEM_DEVICE"] == "cuda"


@pytest.mark.parametrize("role", ["gateway", "decode", "prefill"])
def test_a_volume_with_the_model_is_read_only_and_replaces_the_download(role: str) -> None:
    spec, container = pod_spec(role, GPU), main_container(role, GPU)
    assert "initContainers" not in spec
    (volume,) = (volume for volume in spec["volumes"] if volume["name"] == "home")
    assert volume["persistentVolumeClaim"] == {"claimName": "tandem-model", "readOnly": True}
    (mount,) = (mount for mount in container["volumeMounts"] if mount["name"] == "home")
    assert mount["readOnly"] is True
    assert spec["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"
    job = objects("Job", GPU)["tandem-model"]["spec"]["template"]["spec"]["containers"][0]
    assert job["command"][:4] == ["tandem", "model", "pull", "--convert"]
    assert environment(role, GPU)["TANDEM_MODEL"] == f"/var/lib/tandem/models/{job['command'][4]}"
    download = objects("NetworkPolicy", GPU)["tandem-model-download"]["spec"]["podSelector"]
    assert download == {"matchLabels": {NAME: "tandem-model"}}


@pytest.mark.parametrize("changed", ROLES)
def test_a_changed_setting_rolls_one_role(changed: str) -> None:
    folder = with_components(BASE)
    merged = yaml.safe_load((folder / "kustomization.yaml").read_text())
    merged["configMapGenerator"] = [
        {
            "name": f"tandem-{changed}-settings",
            "namespace": "tandem",
            "behavior": "merge",
            "literals": ["TANDEM_LOG_LEVEL=debug"],
        }
    ]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(merged))
    rolled = {
        role
        for role in ROLES
        if workload(role, folder)["spec"]["template"] != workload(role)["spec"]["template"]
    }
    assert rolled == {changed}
    assert environment(changed, folder)["TANDEM_LOG_LEVEL"] == "debug"


def test_what_the_server_fills_in_is_written_out_where_appliers_would_fight_over_it() -> None:
    for role in ROLES:
        for variable in main_container(role)["env"]:
            if field := variable.get("valueFrom", {}).get("fieldRef"):
                assert field["apiVersion"] == "v1"


def keeps_files(folder: Path) -> bool:
    """Whether Redis writes what it holds into files."""
    command = main_container("redis", folder)["command"]
    options = dict(pairwise(command))  # the last value of a flag holds
    return options["--appendonly"] != "no" or options["--save"] != ""


KEPT = [(BASE, "redis-pvc"), (BASE, "tls", "redis-pvc")]


def test_redis_keeps_files_only_in_a_volume_claim() -> None:
    for folder in (BASE, *OVERLAYS):
        assert not keeps_files(folder)
        assert "volumeClaimTemplates" not in workload("redis", folder)["spec"]
    for base, *components in KEPT:
        folder = with_components(base, *components)
        (claim,) = workload("redis", folder)["spec"]["volumeClaimTemplates"]
        mounts = main_container("redis", folder)["volumeMounts"]
        assert keeps_files(folder)
        assert {"name": claim["metadata"]["name"], "mountPath": "/data"} in mounts


def test_answers_are_in_no_redis_that_keeps_files() -> None:
    for folder in (BASE, *OVERLAYS, *(with_components(base, *names) for base, *names in KEPT)):
        assert ("TANDEM_REDIS_URL" in environment("gateway", folder)) is not keeps_files(folder)
        assert "TANDEM_REDIS_URL" in environment("lookahead", folder)


def test_only_gateways_have_a_token_and_it_lists_and_watches_pods_addresses() -> None:
    rules = objects("Role")["tandem-gateway"]["rules"]
    assert rules == [
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]}
    ]
    binding = objects("RoleBinding")["tandem-gateway"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": "tandem-gateway", "namespace": "tandem"}
    ]
    assert pod_spec("gateway")["serviceAccountName"] == binding["subjects"][0]["name"]
    for role in ["decode", "prefill", "lookahead", "redis"]:
        assert "serviceAccountName" not in pod_spec(role)


def test_the_development_overlay_needs_no_secret_made_before() -> None:
    made = set(objects("Secret", DEV))
    needed = set()
    for role in [*ROLES, "redis"]:
        for variable in main_container(role, DEV)["env"]:
            if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
                needed.add(secret["name"])
        needed |= {v["secret"]["secretName"] for v in pod_spec(role, DEV).get("volumes", []) if "secret" in v}
    assert needed == made


@pytest.mark.wide
@pytest.mark.parametrize("folder", OVERLAYS, ids=lambda folder: folder.name)
def test_a_policy_linter_finds_nothing(folder: Path, tmp_path: Path) -> None:
    """checkov, where it is on PATH: `pipx install checkov` (its packages do not fit beside ours)."""
    checkov = shutil.which("checkov")
    if checkov is None:
        pytest.skip("checkov is not on PATH")
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(render(folder)))
    skipped = ",".join(POLICIES_NOT_KEPT)
    command = [checkov, "-d", str(tmp_path), "--framework", "kubernetes", "--compact", "--quiet"]
    found = subprocess.run([*command, "--skip-check", skipped], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout[-3000:]


#: Policies of checkov that do not hold here, and why.
POLICIES_NOT_KEPT = {
    "CKV_K8S_11": "CPU limits throttle steps; requests share the CPU",
    "CKV_K8S_43": "the digest is known where the image is built; deploy/Dockerfile says how",
    "CKV_K8S_15": "image tags are versions, so IfNotPresent is right",
    "CKV_K8S_35": "passwords and pod ids come as variables",
    "CKV_K8S_38": "a gateway watches EndpointSlices",
    "CKV2_K8S_6": "policies select pods by the labels of Deployments",
}


def test_kv_is_sent_to_the_pods_own_address() -> None:
    assert environment("decode")["TANDEM_KV_HOST"] == "<status.podIP>"
    assert int(environment("decode")["TANDEM_KV_PORT"]) == container_ports("decode")["kv"]


@pytest.mark.parametrize("role", ROLES)
def test_pods_are_told_apart_and_given_time_to_drain(role: str) -> None:
    variables, spec = environment(role), pod_spec(role)
    pause_s = main_container(role)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert variables["TANDEM_POD_ID"] == "<metadata.name>"
    assert spec["terminationGracePeriodSeconds"] > float(variables["TANDEM_DRAIN_S"]) + pause_s


@pytest.mark.parametrize("role", [*ROLES, "redis"])
def test_containers_can_do_no_more_than_they_must(role: str) -> None:
    spec = pod_spec(role)
    assert spec["enableServiceLinks"] is False
    assert spec["automountServiceAccountToken"] is (role == "gateway")
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert {"memory", "ephemeral-storage"} <= set(container["resources"]["limits"])
        assert {"cpu", "memory", "ephemeral-storage"} <= set(container["resources"]["requests"])
        volumes = {volume["name"] for volume in spec.get("volumes", [])} | {"data"}
        assert {mount["name"] for mount in container.get("volumeMounts", [])} <= volumes


@pytest.mark.parametrize("role", ["gateway", "decode", "prefill"])
def test_the_model_is_there_before_the_process_that_needs_it(role: str) -> None:
    spec = pod_spec(role)
    (init,) = spec["initContainers"]
    (home,) = re.findall(r"TANDEM_HOME=(\S+)", DOCKERFILE)
    *command, name = init["command"]
    is_gateway = role == "gateway"  # it needs no weights: half a megabyte instead of 93
    assert command == ["tandem", "model", "pull", *(["--tokenizer-only"] if is_gateway else [])]
    folder = f"{home}/{'tokenizers' if is_gateway else 'models'}/{name}"
    assert environment(role)["TANDEM_MODEL"] == folder
    for container in (init, main_container(role)):
        assert {"name": "home", "mountPath": home} in container["volumeMounts"]


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_an_engine_pod_uses_the_cores_and_memory_it_asked_for(role: str) -> None:
    assert environment(role)["TANDEM_THREADS"] == main_container(role)["resources"]["requests"]["cpu"]
    assert int(environment(role)["TANDEM_NUM_BLOCKS"]) > 0


def test_the_gateway_asks_for_keys_from_the_mounted_secret() -> None:
    keys = environment("gateway")["TANDEM_API_KEYS_FILE"]
    (mount,) = (m for m in main_container("gateway")["volumeMounts"] if m["name"] == "api-keys")
    assert str(Path(keys).parent) == mount["mountPath"]


@pytest.mark.parametrize("role", ["gateway", "decode", "prefill"])
def test_a_node_can_be_drained_one_pod_of_each_role_at_a_time(role: str) -> None:
    budget = objects("PodDisruptionBudget")[f"tandem-{role}"]["spec"]
    assert budget["maxUnavailable"] == 1, "minAvailable: 1 would block a node with the only pod for ever"
    assert budget["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert budget["selector"]["matchLabels"][NAME] == f"tandem-{role}"


def role_of(peer: Manifest) -> str:
    return str(peer["podSelector"]["matchLabels"][NAME]).removeprefix("tandem-")


def connections(direction: str) -> set[tuple[str, str, int]]:
    """(caller, callee, port) as the policies of one direction allow them between our own pods."""
    side = "from" if direction == "ingress" else "to"
    allowed = set()
    for policy in objects("NetworkPolicy").values():
        names = policy["spec"]["podSelector"].get("matchLabels", {})
        if NAME not in names:
            continue
        own = names[NAME].removeprefix("tandem-")
        for rule in policy["spec"].get(direction, []):
            for peer in rule.get(side, []):
                if "podSelector" not in peer:
                    continue  # the API server
                for port in rule["ports"]:
                    ends = (role_of(peer), own) if direction == "ingress" else (own, role_of(peer))
                    allowed.add((*ends, int(port["port"])))
    return allowed


NEEDED = {
    ("gateway", "decode", 21200),
    ("gateway", "prefill", 21100),
    ("decode", "prefill", 21100),
    ("prefill", "decode", 21300),
    # A decode pod that stops hands its requests over, with their KV.
    ("decode", "decode", 21200),
    ("decode", "decode", 21300),
    ("decode", "lookahead", 21400),
    ("lookahead", "redis", 6379),
    ("gateway", "redis", 6379),
}


@pytest.mark.parametrize("direction", ["ingress", "egress"])
def test_policies_allow_what_the_processes_do_and_no_more(direction: str) -> None:
    assert connections(direction) == NEEDED
    for _, callee, port in NEEDED:
        assert port in container_ports(callee).values()


def test_the_default_policy_covers_every_pod_in_both_directions() -> None:
    default = objects("NetworkPolicy")["tandem-default"]["spec"]
    assert default["podSelector"] == {}
    assert set(default["policyTypes"]) == {"Ingress", "Egress"}
    assert {port["port"] for rule in default["egress"] for port in rule["ports"]} == {53}
    blocks = [
        peer["ipBlock"]["cidr"] for rule in default["egress"] for peer in rule["to"] if "ipBlock" in peer
    ]
    assert blocks == ["169.254.20.10/32"], "NodeLocal DNSCache"


def test_gateways_reach_the_api_server_and_downloads_the_internet_in_both_families() -> None:
    for name, ports in (("tandem-gateway", {443, 6443}), ("tandem-model-download", {443})):
        (rule,) = (
            rule
            for rule in objects("NetworkPolicy")[name]["spec"]["egress"]
            if all("ipBlock" in peer for peer in rule["to"])
        )
        assert [peer["ipBlock"]["cidr"] for peer in rule["to"]] == ["0.0.0.0/0", "::/0"]
        assert {port["port"] for port in rule["ports"]} == ports


def test_clients_reach_both_front_doors() -> None:
    (rule,) = objects("NetworkPolicy")["tandem-gateway"]["spec"]["ingress"]
    assert "from" not in rule
    ports = container_ports("gateway")
    assert {port["port"] for port in rule["ports"]} == {ports["grpc"], ports["http"]}


def test_the_image_runs_the_pods_user_and_holds_what_the_wheel_is_made_of() -> None:
    uid = re.findall(r"^USER (\d+):", DOCKERFILE, flags=re.MULTILINE)[-1]
    targets = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    for target in ("cuda", "cpu"):
        (stage,) = (stage for stage in targets if stage.splitlines()[0].endswith(f" AS {target}"))
        users = [line for line in stage.splitlines() if line.startswith("USER")]
        assert users[-1:] in ([], [f"USER {uid}:{uid}"])
    assert all(pod_spec(role)["securityContext"]["runAsUser"] == int(uid) for role in ROLES)
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)) == {"${BASE}", "source", "runtime"}
    copied = set(re.findall(r"^COPY (?!--)(.+) \S+$", DOCKERFILE, flags=re.MULTILINE))
    sources = {source for line in copied for source in line.split()}
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {package.split("/")[0] for package in wheel["packages"]} <= sources
    assert {"constraints.txt", "pyproject.toml", "hatch_build.py", "README.md", "LICENSE"} <= sources
    assert all((ROOT / source).exists() for source in sources)
    ignored = (ROOT / "deploy/Dockerfile.dockerignore").read_text()
    assert all(f"!{source}\n" in ignored for source in sources)
