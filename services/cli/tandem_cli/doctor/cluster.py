"""What an API server says of a cluster, asked once; each part is None where this user may not ask for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

_TIMEOUT_S = 10.0
_FORBIDDEN = 403

AnswerT = TypeVar("AnswerT")


class ClusterError(Exception):
    """The API server cannot be asked; the message names the remedy."""


@dataclass(frozen=True)
class Cluster:
    namespace: str
    #: As (1, 31).
    version: tuple[int, int]
    #: "apps/v1" and so on, of which the server has kinds.
    api_versions: frozenset[str]
    #: In the namespace: the keys of each Secret by its name; values are not kept.
    secrets: dict[str, frozenset[str]] | None
    claims: frozenset[str] | None
    #: By name, whether it is the default.
    storage_classes: dict[str, bool] | None
    nodes: tuple[Any, ...] | None
    #: Of all namespaces.
    pods: tuple[Any, ...] | None
    #: Of the Service kube-dns, or of one of that label.
    dns_slices: tuple[Any, ...] | None
    #: What was refused, for the report.
    refused: tuple[str, ...]


def ask_cluster(kubeconfig: Path | None, context: str | None, namespace: str) -> Cluster:
    """`kubeconfig` None: KUBECONFIG or kubectl's default. Raises ClusterError."""
    settings = client.Configuration()
    settings.client_side_validation = False
    settings.retries = False
    try:
        file = None if kubeconfig is None else str(kubeconfig)
        config.load_kube_config(file, context=context, client_configuration=settings)
    except (ConfigException, OSError) as error:
        raise ClusterError(
            f"the kubeconfig {kubeconfig or ''} cannot be used: {error}; give another, or a --context of it"
        ) from error
    with client.ApiClient(settings) as api:
        try:
            return _Asking(api).cluster(namespace)
        except ApiException as error:
            raise ClusterError(
                f"the API server {settings.host} answers {error.status} {error.reason}; give a user that it "
                "knows and that may read /version and /apis"
            ) from error
        except (HTTPError, OSError) as error:
            raise ClusterError(
                f"the API server {settings.host} does not answer: {type(error).__name__}; let this machine "
                "through to it"
            ) from error


class _Asking:
    def __init__(self, api: Any) -> None:
        self._api = api
        self._refused: list[str] = []

    def cluster(self, namespace: str) -> Cluster:
        core, storage = client.CoreV1Api(self._api), client.StorageV1Api(self._api)
        discovery = client.DiscoveryV1Api(self._api)
        asked = {"_request_timeout": _TIMEOUT_S}
        version = client.VersionApi(self._api).get_code(**asked)
        groups = client.ApisApi(self._api).get_api_versions(**asked).groups
        secrets = self._try("secrets", lambda: core.list_namespaced_secret(namespace, **asked).items)
        claims = self._try(
            "persistentvolumeclaims",
            lambda: core.list_namespaced_persistent_volume_claim(namespace, **asked).items,
        )
        classes = self._try("storageclasses", lambda: storage.list_storage_class(**asked).items)
        nodes = self._try("nodes", lambda: core.list_node(**asked).items)
        pods = self._try("pods", lambda: core.list_pod_for_all_namespaces(**asked).items)
        slices = self._try(
            "endpointslices of kube-system",
            lambda: (
                discovery.list_namespaced_endpoint_slice(
                    "kube-system", label_selector="kubernetes.io/service-name=kube-dns", **asked
                ).items
            ),
        )
        return Cluster(
            namespace,
            (_number(version.major), _number(version.minor)),
            frozenset({"v1", *(one.group_version for group in groups for one in group.versions)}),
            None if secrets is None else {one.metadata.name: frozenset(one.data or ()) for one in secrets},
            None if claims is None else frozenset(one.metadata.name for one in claims),
            None if classes is None else {one.metadata.name: _is_default(one) for one in classes},
            None if nodes is None else tuple(nodes),
            None if pods is None else tuple(pods),
            None if slices is None else tuple(slices),
            tuple(self._refused),
        )

    def _try(self, what: str, ask: Callable[[], AnswerT]) -> AnswerT | None:
        try:
            return ask()
        except ApiException as error:
            if error.status != _FORBIDDEN:
                raise
            self._refused.append(what)
            return None


def _number(text: str) -> int:
    """Some clouds write "31+"."""
    return int("".join(letter for letter in text if letter.isdigit()) or 0)


def _is_default(storage_class: Any) -> bool:
    notes = storage_class.metadata.annotations or {}
    return str(notes.get("storageclass.kubernetes.io/is-default-class", "")) == "true"
