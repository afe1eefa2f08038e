"""Kubernetes objects, from rendered manifests or a kustomize folder, as the classes of the `kubernetes`
package; and the workloads among them, with their settings."""

from __future__ import annotations

import json
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
from kubernetes import client
from pydantic import ValidationError
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
_KUSTOMIZE_TIMEOUT_S = 120.0


class ManifestError(Exception):
    """The manifests cannot be read; the message names the remedy."""


@dataclass(frozen=True)
class Workload:
    """A Deployment or StatefulSet, and its container that runs a program of Tandem, or else the first."""

    object: Any
    #: "gateway", "decode", "prefill", "lookahead"; "" for another program, such as Redis.
    role: str
    #: Of the container, with the flags of its command as variables. `<secret NAME/KEY>` stands for a Secret's
    #: value, `<FIELD>` for a field of the pod.
    environment: Mapping[str, str]

    @property
    def name(self) -> str:
        return str(self.object.metadata.name)

    @property
    def where(self) -> str:
        return f"{self.object.kind} {self.name}"

    @property
    def pod(self) -> Any:
        return self.object.spec.template.spec

    @property
    def labels(self) -> dict[str, str]:
        metadata = self.object.spec.template.metadata
        return dict((metadata.labels if metadata is not None else None) or {})

    @property
    def container(self) -> Any:
        return _main_container(self.object)

    @property
    def containers(self) -> list[Any]:
        return [*(self.pod.init_containers or ()), *self.pod.containers]

    @property
    def num_gpus(self) -> int:
        """Of each pod."""
        resources = self.container.resources
        return int((resources.limits or {}).get(GPU, 0)) if resources else 0

    def setting(self, field: str) -> str:
        """Its value, or the default's text."""
        value = self.environment.get(ENV_PREFIX + field.upper())
        if value is not None:
            return value
        default = SETTINGS[self.role].model_fields[field].default
        return "" if default is None else str(default)

    def number(self, field: str) -> float:
        """That of a setting; the default where it is none, or not known here."""
        try:
            return float(self.setting(field))
        except ValueError:
            return float(SETTINGS[self.role].model_fields[field].default)

    @property
    def model(self) -> str:
        """Name of its model: the folder's; "": none is set."""
        return Path(self.environment.get(f"{ENV_PREFIX}MODEL", "")).name

    @property
    def known_model(self) -> CatalogueEntry | None:
        """None: its size is not known here."""
        return catalogue().get(self.model)


class Objects:
    """The objects of one installation that checks read."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = tuple(objects)

    def of(self, kind: str) -> list[Any]:
        return [item for item in self._objects if item.kind == kind]

    def find(self, kind: str, name: str) -> Any | None:
        return next((item for item in self.of(kind) if item.metadata.name == name), None)

    @cached_property
    def workloads(self) -> tuple[Workload, ...]:
        found = [*self.of("Deployment"), *self.of("StatefulSet")]
        return tuple(Workload(item, _role(item), self._environment(item)) for item in found)

    def of_role(self, role: str) -> list[Workload]:
        return [workload for workload in self.workloads if workload.role == role]

    def behind(self, service: str) -> list[Workload]:
        """Workloads whose pods the Service selects."""
        found = self.find("Service", service)
        if found is None or not found.spec.selector:
            return []
        wanted = found.spec.selector.items()
        return [workload for workload in self.workloads if wanted <= workload.labels.items()]

    def _environment(self, workload: Any) -> dict[str, str]:
        container = _main_container(workload)
        values: dict[str, str] = {}
        for source in container.env_from or ():
            if source.config_map_ref is not None:
                values |= self._config_map(source.config_map_ref.name)
        for variable in container.env or ():
            values[variable.name] = self._value(variable)
        return values | (_flags(_words(container)[1:]) if _role(workload) else {})

    def _config_map(self, name: str) -> dict[str, str]:
        found = self.find("ConfigMap", name)
        return dict((found.data if found is not None else None) or {})

    def _value(self, variable: Any) -> str:
        source = variable.value_from
        if source is None:
            return variable.value or ""
        if source.secret_key_ref is not None:
            return f"<secret {source.secret_key_ref.name}/{source.secret_key_ref.key}>"
        if source.config_map_key_ref is not None:
            reference = source.config_map_key_ref
            return self._config_map(reference.name).get(reference.key, "<unknown>")
        return f"<{source.field_ref.field_path}>" if source.field_ref is not None else "<unknown>"


def _flags(words: Sequence[str]) -> dict[str, str]:
    """As variables: `--max-batch 8`, `--max-batch=8`, `--insecure`."""
    found = {}
    for word, following in pairwise([*words, "--"]):
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            if not equals:
                value = "true" if following.startswith("--") else following
            found[ENV_PREFIX + name.replace("-", "_").upper()] = value
    return found


def _words(container: Any) -> list[str]:
    return [*(container.command or ()), *(container.args or ())]


def _role_of(container: Any) -> str:
    """By the program that it runs."""
    program = Path((_words(container) or [""])[0]).name
    role = program.removeprefix("tandem-")
    return role if program != role and role in SETTINGS else ""


def _main_container(workload: Any) -> Any:
    containers = workload.spec.template.spec.containers
    return next((one for one in containers if _role_of(one)), containers[0])


def _role(workload: Any) -> str:
    return _role_of(_main_container(workload))


def read_manifests(path: Path) -> Objects:
    """Of a folder with a kustomization.yaml, of a YAML file, or of "-", stdin. Raises ManifestError."""
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
    beside = Path(sys.executable).parent / "kubectl"
    kubectl = str(beside) if beside.exists() else shutil.which("kubectl")
    if kubectl is None:
        raise ManifestError(
            f"no kubectl in PATH, which renders the folder {folder}; install it, or give rendered manifests"
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
    """Raises ManifestError. Objects of kinds that no check reads are left out."""
    settings = client.Configuration()
    settings.client_side_validation = False  # an object with a missing field is for kubectl to refuse
    api = client.ApiClient(settings)
    objects = []
    for document in documents:
        if document is None:
            continue
        if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
            raise ManifestError("a document is no Kubernetes object; each needs apiVersion, kind, metadata")
        if f"{document['apiVersion']}/{document['kind']}" in _KINDS:
            objects.append(_typed(api, document))
    return Objects(objects)


_KINDS = (
    "v1/ConfigMap",
    "v1/PersistentVolumeClaim",
    "v1/Service",
    "apps/v1/Deployment",
    "apps/v1/StatefulSet",
)


def _typed(api: Any, document: dict[str, Any]) -> Any:
    try:
        text = json.dumps(_with_quantities(document), default=str)
        made = api.deserialize(text, f"V1{document['kind']}", None)
    except (ValueError, TypeError, AttributeError) as error:
        label = f"{document['kind']} {document['metadata'].get('name', '')}"
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ManifestError(
            f"{label} cannot be read ({reason}); `kubectl apply --dry-run=server` shows what is wrong"
        ) from error
    made.kind = document["kind"]
    return made


def _with_quantities(node: Any, *, is_quantity: bool = False) -> Any:
    """Quantities may be numbers in YAML; the package reads texts alone."""
    if isinstance(node, dict):
        return {
            key: _with_quantities(value, is_quantity=is_quantity or key in _QUANTITIES)
            for key, value in node.items()
        }
    if isinstance(node, list):
        return [_with_quantities(item) for item in node]
    return str(node) if is_quantity and isinstance(node, int | float) else node


#: Fields that are quantities, or whose fields are.
_QUANTITIES = ("limits", "requests", "sizeLimit")
