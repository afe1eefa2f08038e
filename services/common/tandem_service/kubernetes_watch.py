"""Watches the pods of a Service through the API server of Kubernetes.

    list EndpointSlices       all pods at a resource version
    watch from that version   each change as it happens: a pod gets ready, begins to terminate, is gone;
                              bookmarks move the version on when nothing changes
    the watch ends            it is resumed from the last version: nothing is missed or sent twice
    410 Gone                  that version is forgotten: list again
    anything else             the known pods are kept; retried after a pause

Each watch lasts half a minute, because an endless one would not notice a dead connection.

    ready           may get requests
    not ready       is listed, but gets no new requests: it starts, or its readiness probe fails
    terminating     is listed, but gets no new requests; running ones continue
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import structlog
from kubernetes.aio import client, config, watch
from kubernetes.aio.client.exceptions import ApiException

from tandem_service.discovery import Endpoint, ServiceRef, Target

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_SERVICE_LABEL = "kubernetes.io/service-name"
_GONE, _FORBIDDEN = 410, 403
#: Duration of one watch, and the additional time allowed to a silent connection.
_WATCH_S, _SILENCE_S = 30, 5.0
_LIST_TIMEOUT_S = 10.0
#: Interval of watches for a server that ends them sooner.
_LEAST_WATCH_S = 1.0
#: Pods are listed again after this time, and after this number of consecutive failures: a server restored
#: from a backup may not know earlier versions.
_RELIST_S, _RELIST_FAILURES = 300.0, 3
#: Pause after a failure, doubled after each further one up to the second.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0


class ServiceWatch:
    """Keeps `endpoints` up to date while `run` runs. Belongs to one event loop."""

    def __init__(self, service: ServiceRef, on_change: Callable[[], None]) -> None:
        self._service = service
        self._on_change = on_change
        self._slices: dict[str, client.V1EndpointSlice] = {}
        #: None: list first.
        self._version: str | None = None
        self._listed_at = 0.0
        self._failures = 0
        #: The last failure, which is not logged again.
        self._trouble = ""
        self._log = structlog.get_logger("tandem.discovery").bind(service=str(service))
        #: Every known pod once; empty before the first answer.
        self.endpoints: tuple[Endpoint, ...] = ()

    def __str__(self) -> str:
        return str(self._service)

    async def run(self) -> None:
        """Watches until cancelled. Never fails; during an outage of the API server the known pods are
        kept."""
        while True:
            try:
                settings = await load_config()
                async with client.ApiClient(settings) as api:
                    await self._follow(client.DiscoveryV1Api(api))
            except Exception as error:
                self._failures += 1
                if self._failures >= _RELIST_FAILURES:
                    self._version = None
                if (trouble := _sentence(error)) != self._trouble:
                    self._trouble = trouble
                    self._log.warning("cannot watch pods; keeping the known ones", error=trouble)
            pause_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 8))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))

    async def _follow(self, api: client.DiscoveryV1Api) -> None:
        """Lists and watches until something fails."""
        scope = {
            "namespace": self._service.namespace or own_namespace(),
            "label_selector": f"{_SERVICE_LABEL}={self._service.name}",
        }
        while True:
            if self._version is None or time.monotonic() > self._listed_at + _RELIST_S:
                listed = await api.list_namespaced_endpoint_slice(**scope, _request_timeout=_LIST_TIMEOUT_S)
                self._slices = {item.metadata.name: item for item in listed.items}
                self._version, self._listed_at = listed.metadata.resource_version, time.monotonic()
                self._show()
            began_at = time.monotonic()
            try:
                await self._watch(api, scope)
                await asyncio.sleep(began_at + _LEAST_WATCH_S - time.monotonic())
            except ApiException as error:
                if error.status != _GONE:
                    raise
                self._version = None
                await asyncio.sleep(_FIRST_PAUSE_S)

    async def _watch(self, api: client.DiscoveryV1Api, scope: dict[str, str]) -> None:
        """Returns when the server ends the watch."""
        async with watch.Watch().stream(
            api.list_namespaced_endpoint_slice,
            **scope,
            resource_version=self._version,
            allow_watch_bookmarks=True,
            timeout_seconds=_WATCH_S,
            _request_timeout=_WATCH_S + _SILENCE_S,
        ) as events:
            async for event in events:
                self._works()
                self._version = event["raw_object"]["metadata"]["resourceVersion"]
                if event["type"] == "BOOKMARK":
                    continue
                name = event["raw_object"]["metadata"]["name"]
                if event["type"] == "DELETED":
                    self._slices.pop(name, None)
                else:
                    self._slices[name] = event["object"]
                self._show()
        self._works()

    def _works(self) -> None:
        if self._failures:
            self._log.info("news of pods again")
        self._failures, self._trouble = 0, ""

    def _show(self) -> None:
        endpoints = endpoints_of(list(self._slices.values()), self._service.port)
        if endpoints != self.endpoints:
            self.endpoints = endpoints
            self._on_change()


def endpoints_of(slices: list[client.V1EndpointSlice], port: int) -> tuple[Endpoint, ...]:
    """Every pod once. If there are IPv4 addresses, only those are used, so that a dual-stack pod counts once.

    A pod may be in two slices while it moves from one to the other; then the slice that withholds it counts,
    because a terminating pod never becomes ready again.
    """
    families = {item.address_type for item in slices if item.endpoints}
    family = "IPv4" if "IPv4" in families else "IPv6"
    found: dict[str, Endpoint] = {}
    for item in slices:
        if item.address_type != family:
            continue
        for endpoint in item.endpoints or ():
            # All addresses of an endpoint belong to the same pod.
            target = str(Target(endpoint.addresses[0], port))
            seen = Endpoint(target, endpoint.zone or "", _withheld(endpoint.conditions))
            if target not in found or seen.withheld:
                found[target] = seen
    return tuple(sorted(found.values()))


def _withheld(conditions: client.V1EndpointConditions | None) -> str:
    """Why a pod gets no new requests. Unknown conditions count as ready, as Kubernetes specifies."""
    if conditions is None:
        return ""
    if conditions.terminating:
        return "it terminates"
    return "it is not ready" if conditions.ready is False else ""


async def load_config() -> client.Configuration:
    """The configuration of this pod's service account; outside a cluster that of kubectl (KUBECONFIG)."""
    settings = client.Configuration()
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config(settings)
    else:
        # The client itself reads the variable only once, at import.
        file = os.environ.get("KUBECONFIG")
        await config.load_kube_config(config_file=file, client_configuration=settings)
    return settings


def own_namespace() -> str:
    """The namespace of this pod; outside a cluster that of kubectl's context."""
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    _, active = config.list_kube_config_contexts(os.environ.get("KUBECONFIG"))
    return str(active["context"].get("namespace", "default"))


def _sentence(error: Exception) -> str:
    if isinstance(error, ApiException) and error.status == _FORBIDDEN:
        return "the service account may not list and watch endpointslices.discovery.k8s.io; give it that Role"
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
