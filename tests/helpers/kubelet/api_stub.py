"""An API server of Kubernetes with the semantics that watchers depend on, over HTTP on loopback.

    list                 all objects that a label selector matches, and the version of the whole; of a
                         namespace, or of all; objects without one have the namespace ""
    watch from version   every later change, in order; 410 if the history no longer reaches back so far;
                         bookmarks, if asked for; ends after timeoutSeconds
    get, update          one object, or the scale subresource of a workload; an update from another version
                         than the present one gets 409

Tests write with `put` and `delete`, make it forget (`compact`), refuse (`forbidden`), cut all connections
(`disconnect`), go away (`stop`) and come back (`start`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web

Object = dict[str, Any]

ENDPOINT_SLICES = "endpointslices"


@dataclass
class _Event:
    version: int
    plural: str
    kind: str
    object: Object


@dataclass
class ApiStub:
    bookmark_s: float = 60.0
    longest_watch_s: float = 300.0
    port: int = 0
    #: Groups with kinds of their own, as /apis tells.
    groups: tuple[str, ...] = ("apps/v1",)
    #: By plural, as lists name them.
    kinds: dict[str, str] = field(default_factory=lambda: {ENDPOINT_SLICES: "EndpointSlice"})
    #: Verbs, and plural names of kinds, that are answered with 403.
    forbidden: set[str] = field(default_factory=set)
    #: "list", "watch" of every request so far.
    requests: list[str] = field(default_factory=list)
    #: Called with plural and name after each get: somebody else who changes things in between.
    after_get: Callable[[str, str], None] | None = None
    version: int = 100
    #: Versions up to this one are forgotten.
    compacted: int = 0
    _objects: dict[tuple[str, str, str], Object] = field(default_factory=dict)
    _history: list[_Event] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _watching: list[web.Request] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    # -- for tests ---------------------------------------------------------------------------------

    async def start(self) -> None:
        app = web.Application()
        self.add_routes(app)
        self._runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def add_routes(self, app: web.Application) -> None:
        app.router.add_get("/version/", self._version)
        app.router.add_get("/apis/", self._groups)
        for prefix in ("/apis/{group}/{version}", "/api/{version}"):
            app.router.add_get(prefix + "/{plural}", self._collection)
            app.router.add_get(prefix + "/namespaces/{namespace}/{plural}", self._collection)
            for path in (
                "/namespaces/{namespace}/{plural}/{name}",
                "/namespaces/{namespace}/{plural}/{name}/scale",
            ):
                app.router.add_get(prefix + path, self._get)
                app.router.add_put(prefix + path, self._update)

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            self.disconnect()
            self._wake()  # watches end
            await runner.cleanup()

    def kubeconfig(self, folder: Path, namespace: str = "default") -> Path:
        path = folder / "kubeconfig"
        context = {"cluster": "stub", "user": "stub", "namespace": namespace}
        server = f"http://127.0.0.1:{self.port}"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "stub", "cluster": {"server": server}}],
                    "users": [{"name": "stub", "user": {}}],
                    "contexts": [{"name": "stub", "context": context}],
                    "current-context": "stub",
                }
            )
        )
        return path

    def put(self, plural: str, item: Object) -> None:
        metadata = item["metadata"]
        key = (plural, metadata["namespace"], metadata["name"])
        kind = "MODIFIED" if key in self._objects else "ADDED"
        self._record(plural, kind, key, copy.deepcopy(item))

    def delete(self, plural: str, namespace: str, name: str) -> None:
        key = (plural, namespace, name)
        self._record(plural, "DELETED", key, self._objects[key])

    def get(self, plural: str, namespace: str, name: str) -> Object:
        return self._objects[plural, namespace, name]

    def compact(self) -> None:
        """Forgets all changes so far."""
        self.compacted = self.version
        self._history.clear()
        self._wake()

    def disconnect(self) -> None:
        for request in self._watching:
            if request.transport is not None:
                request.transport.abort()

    # -- the server --------------------------------------------------------------------------------

    def _record(self, plural: str, kind: str, key: tuple[str, str, str], item: Object) -> None:
        self.version += 1
        item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        if kind == "DELETED":
            del self._objects[key]
        else:
            self._objects[key] = item
        self._history.append(_Event(self.version, plural, kind, item))
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _select(self, request: web.Request) -> Iterator[Object]:
        plural, namespace = request.match_info["plural"], request.match_info.get("namespace")
        for key, item in sorted(self._objects.items()):
            is_asked = key[0] == plural and namespace in (None, key[1])
            if is_asked and _matches(item, request):
                yield item

    async def _version(self, _request: web.Request) -> web.Response:
        others = ("gitVersion", "gitCommit", "gitTreeState", "buildDate", "goVersion", "compiler", "platform")
        return web.json_response({"major": "1", "minor": "34", **dict.fromkeys(others, "")})

    async def _groups(self, _request: web.Request) -> web.Response:
        groups = []
        for group in self.groups:
            name, _, number = group.partition("/")
            version = {"groupVersion": group, "version": number}
            groups.append({"name": name, "versions": [version], "preferredVersion": version})
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})

    async def _get(self, request: web.Request) -> web.Response:
        info = request.match_info
        self.requests.append("get")
        if "get" in self.forbidden:
            return _status(403, "Forbidden")
        item = self._objects.get((info["plural"], info.get("namespace", ""), info["name"]))
        if self.after_get is not None:
            self.after_get(info["plural"], info["name"])
        if item is None:
            return _status(404, "NotFound")
        return web.json_response(_scale_of(item) if request.path.endswith("/scale") else item)

    async def _update(self, request: web.Request) -> web.Response:
        info, body = request.match_info, await request.json()
        self.requests.append("update")
        if "update" in self.forbidden:
            return _status(403, "Forbidden")
        item = self._objects.get((info["plural"], info["namespace"], info["name"]))
        if item is None:
            return _status(404, "NotFound")
        if body["metadata"].get("resourceVersion") != item["metadata"]["resourceVersion"]:
            return _status(409, "Conflict")
        if request.path.endswith("/scale"):
            body = {**item, "spec": {**item["spec"], "replicas": body["spec"]["replicas"]}}
        self.put(info["plural"], body)
        item = self.get(info["plural"], info["namespace"], info["name"])
        return web.json_response(_scale_of(item) if request.path.endswith("/scale") else item)

    async def _collection(self, request: web.Request) -> web.StreamResponse:
        verb = "watch" if request.query.get("watch", "").lower() in ("true", "1") else "list"
        self.requests.append(verb)
        if {verb, request.match_info["plural"]} & self.forbidden:
            return _status(403, "Forbidden")
        if verb == "watch":
            return await self._watch(request)
        of = self._type(request)
        return web.json_response(
            {
                "kind": f"{of['kind']}List",
                "apiVersion": of["apiVersion"],
                "metadata": {"resourceVersion": str(self.version)},
                "items": list(self._select(request)),
            }
        )

    def _type(self, request: web.Request) -> Object:
        info = request.match_info
        group, version = info.get("group"), info["version"]
        return {
            "kind": self.kinds.get(info["plural"], "Object"),
            "apiVersion": f"{group}/{version}" if group else version,
        }

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        if request.query.get("sendInitialEvents") == "true":  # an older server's answer: list first
            return _status(422, "Invalid")
        seen = int(request.query.get("resourceVersion") or self.version)
        if seen < self.compacted:
            return _status(410, "Expired")
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        self._watching.append(request)
        asked_s = float(request.query.get("timeoutSeconds") or self.longest_watch_s)
        ends_at = time.monotonic() + min(asked_s, self.longest_watch_s)
        bookmark_at = time.monotonic() + self.bookmark_s
        wanted = (request.match_info["plural"], request.match_info.get("namespace"))
        wants_bookmarks = request.query.get("allowWatchBookmarks", "").lower() in ("true", "1")
        try:
            while (now := time.monotonic()) < ends_at and self._runner is not None:
                changed = self._changed
                if seen < self.compacted:
                    await _send(response, "ERROR", _status_object(410, "Expired"))
                    break
                for event in [event for event in self._history if event.version > seen]:
                    seen = event.version
                    of = (event.plural, event.object["metadata"]["namespace"])
                    if of == wanted and _matches(event.object, request):
                        await _send(response, event.kind, event.object)
                if wants_bookmarks and now >= bookmark_at:
                    bookmark_at = now + self.bookmark_s
                    bookmark = {"metadata": {"resourceVersion": str(self.version)}} | self._type(request)
                    await _send(response, "BOOKMARK", bookmark)
                try:
                    async with asyncio.timeout(min(ends_at, bookmark_at) - now):
                        await changed.wait()
                except TimeoutError:
                    pass
        except (ConnectionError, asyncio.CancelledError):
            pass  # the watcher left, or the server stops
        finally:
            self._watching = [other for other in self._watching if other is not request]
        return response


def _scale_of(item: Object) -> Object:
    metadata = {key: item["metadata"][key] for key in ("name", "namespace", "resourceVersion")}
    return {
        "kind": "Scale",
        "apiVersion": "autoscaling/v1",
        "metadata": metadata,
        "spec": {"replicas": item["spec"]["replicas"]},
        "status": {"replicas": item["spec"]["replicas"]},
    }


def _matches(item: Object, request: web.Request) -> bool:
    """By labels, and by the fields that kubectl selects by."""
    metadata = item["metadata"]
    fields = {"metadata.name": metadata["name"], "spec.nodeName": item.get("spec", {}).get("nodeName")}
    return all(
        values.get(name) == value
        for selector, values in (("labelSelector", metadata.get("labels", {})), ("fieldSelector", fields))
        for name, value in (part.split("=") for part in request.query.get(selector, "").split(",") if part)
    )


async def _send(response: web.StreamResponse, kind: str, item: Object) -> None:
    await response.write(json.dumps({"type": kind, "object": item}).encode() + b"\n")


def _status_object(code: int, reason: str) -> Object:
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": reason}


def _status(code: int, reason: str) -> web.Response:
    return web.json_response(_status_object(code, reason), status=code)


def endpoint(
    address: str, *, ready: bool = True, terminating: bool = False, zone: str | None = None, pod: str = ""
) -> Object:
    """As the controller of EndpointSlices writes it: a pod that terminates is never ready."""
    made: Object = {
        "addresses": [address],
        "conditions": {"ready": ready and not terminating, "serving": ready, "terminating": terminating},
    }
    if zone is not None:
        made["zone"] = zone
    if pod:
        made["targetRef"] = {"kind": "Pod", "name": pod}
    return made


def endpoint_slice(
    service: str, *endpoints: Object, namespace: str = "default", suffix: str = "abcde", family: str = "IPv4"
) -> Object:
    return {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": f"{service}-{suffix}",
            "namespace": namespace,
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": family,
        "endpoints": list(endpoints),
        "ports": [{"name": "grpc", "port": 21200, "protocol": "TCP"}],
    }
