"""Kubernetes objects of rendered manifests or a kustomize folder, and the workloads with their settings."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from tandem_core.model.catalogue import CatalogueEntry, catalogue
from tandem_decode.settings import DecodeSettings
from tandem_gateway.settings import GatewaySettings
from tandem_lookahead.settings import LookaheadSettings
from tandem_prefill.settings import PrefillSettings
from tandem_service.settings import ENV_PREFIX, CommonSettings

SETTINGS: Mapping[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "decode": DecodeSettings,
    "prefill": PrefillSettings,
    "lookahead": LookaheadSettings,
}
GPU = "nvidia.com/gpu"
_WORKLOADS = ("Deployment", "StatefulSet")
_KUSTOMIZE_TIMEOUT_S = 120.0


class ManifestError(Exception):
    """The manifests cannot be read; the message names the remedy."""


def at(node: Any, *path: str) -> Any:
    """The value under nested keys of a manifest; None if a key is absent."""
    for key in path:
        node = node.get(key) if isinstance(node, dict) else None
    return node


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet, and its container that runs a program of Tandem (else its first)."""

    object: Any
    #: "gateway", "decode", "prefill", "lookahead"; "" for another program, such as Redis.
    role: str
    #: Variables of the container; flags of its command are converted to variables. `<secret NAME/KEY>` stands
    #: for a Secret's value, `<FIELD>` for a field of the pod.
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return str(at(self.object, "metadata", "name"))

    @property
    def where(self) -> str:
        return f"{self.object['kind']} {self.name}"

    @property
    def pod(self) -> Any:
        return at(self.object, "spec", "template", "spec")

    @property
    def labels(self) -> dict[str, str]:
        return dict(at(self.object, "spec", "template", "metadata", "labels") or {})

    @property
    def container(self) -> Any:
        return _main_container(self.object)

    @property
    def containers(self) -> list[Any]:
        return [*(at(self.pod, "initContainers") or ()), *self.pod["containers"]]

    @property
    def num_gpus(self) -> int:
        """GPUs of each pod."""
        return int(at(self.container, "resources", "limits", GPU) or 0)

    def setting(self, field: str) -> str:
        """The text of a setting, or of its default."""
        value = self.environment.get(ENV_PREFIX + field.upper())
        if value is not None:
            return value
        default = SETTINGS[self.role].model_fields[field].default
        return "" if default is None else str(default)

    def number(self, field: str) -> float:
        """The number of a setting; the default if it is not a number or not known here."""
        try:
            return float(self.setting(field))
        except ValueError:
            return float(SETTINGS[self.role].model_fields[field].default)

    @property
    def model(self) -> str:
        """Name of the model's folder; "" if none is set."""
        return Path(self.environment.get(f"{ENV_PREFIX}MODEL", "")).name

    @property
    def known_model(self) -> CatalogueEntry | None:
        """The model's catalogue entry; None if the model is not in the catalogue."""
        return catalogue().get(self.model)


class Objects:
    """All objects of one installation."""

    def __init__(self, objects: Iterable[dict[str, Any]]) -> None:
        self._objects = tuple(objects)

    def of(self, kind: str) -> list[Any]:
        """Objects of a built-in kind."""
        versions = ("v1", "apps/v1")
        return [one for one in self._objects if one["kind"] == kind and one["apiVersion"] in versions]

    def find(self, kind: str, name: str) -> Any:
        """The object; None if it is not in the manifests."""
        return next((one for one in self.of(kind) if at(one, "metadata", "name") == name), None)

    @cached_property
    def workloads(self) -> tuple[Workload, ...]:
        found = [one for kind in _WORKLOADS for one in self.of(kind)]
        return tuple(Workload(one, _role_of(_main_container(one)), self._environment(one)) for one in found)

    def of_role(self, role: str) -> list[Workload]:
        return [workload for workload in self.workloads if workload.role == role]

    def behind(self, service: str) -> list[Workload]:
        """Workloads whose pods the Service selects."""
        wanted = at(self.find("Service", service), "spec", "selector")
        return [one for one in self.workloads if wanted and wanted.items() <= one.labels.items()]

    def _environment(self, workload: Any) -> dict[str, str]:
        container = _main_container(workload)
        values: dict[str, str] = {}
        for source in container.get("envFrom") or ():
            values |= self._config_map(at(source, "configMapRef", "name"))
        for variable in container.get("env") or ():
            values[variable["name"]] = self._value(variable)
        return values | (_flags(_words(container)[1:]) if _role_of(container) else {})

    def _config_map(self, name: str) -> dict[str, str]:
        return dict(at(self.find("ConfigMap", name), "data") or {})

    def _value(self, variable: Any) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value") or "")
        if secret := at(source, "secretKeyRef"):
            return f"<secret {secret['name']}/{secret['key']}>"
        if config := at(source, "configMapKeyRef"):
            return self._config_map(config["name"]).get(config["key"], "<unknown>")
        return f"<{at(source, 'fieldRef', 'fieldPath') or 'unknown'}>"


def _flags(words: Sequence[str]) -> dict[str, str]:
    """The variables of flags such as `--max-batch 8`, `--max-batch=8`, `--insecure`."""
    found = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            if not equals:
                value = "true" if following.startswith("--") else following
            found[ENV_PREFIX + name.replace("-", "_").upper()] = value
    return found


def _words(container: Any) -> list[str]:
    return [*(container.get("command") or ()), *(container.get("args") or ())]


def _role_of(container: Any) -> str:
    """The role of the program that the container runs."""
    program = Path((_words(container) or [""])[0]).name
    role = program.removeprefix("tandem-")
    return role if program != role and role in SETTINGS else ""


def _main_container(workload: Any) -> Any:
    containers = at(workload, "spec", "template", "spec", "containers")
    return next((one for one in containers if _role_of(one)), containers[0])


def read_manifests(path: Path) -> Objects:
    """Reads a folder with a kustomization.yaml, a YAML file, or stdin for "-". Raises ManifestError."""
    try:
        if str(path) == "-":
            return parse(yaml.safe_load_all(sys.stdin.read()))
        if path.is_dir():
            return parse(yaml.safe_load_all(_kustomize(path)))
        return parse(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror}; name a folder or a file") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise ManifestError(f"{path} is no YAML: {reason}; give what `kubectl kustomize` prints") from error


def _kustomize(folder: Path) -> str:
    local = Path(sys.executable).parent / "kubectl"
    kubectl = str(local) if local.exists() else shutil.which("kubectl")
    if kubectl is None:
        raise ManifestError(
            f"kubectl, which renders {folder}, is not in PATH; install it, or give rendered manifests"
        )
    try:
        rendered = subprocess.run(
            [kubectl, "kustomize", str(folder)],
            capture_output=True,
            text=True,
            check=False,
            timeout=_KUSTOMIZE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise ManifestError(
            f"`kubectl kustomize {folder}` took more than {error.timeout:g} s; give rendered manifests"
        ) from error
    if rendered.returncode:
        reason = (rendered.stderr.strip().splitlines() or [""])[-1]
        raise ManifestError(f"`kubectl kustomize {folder}` fails: {reason}; correct the kustomization")
    return rendered.stdout


def parse(documents: Iterable[object]) -> Objects:
    """Raises ManifestError."""
    objects = []
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
            raise ManifestError("a document is no Kubernetes object; each needs apiVersion, kind, metadata")
        if document["kind"] in _WORKLOADS and not at(document, "spec", "template", "spec", "containers"):
            raise ManifestError(
                f"{document['kind']} {at(document, 'metadata', 'name')} has no containers; "
                "`kubectl apply --dry-run=server` shows what is wrong"
            )
        objects.append(document)
    return Objects(objects)
