"""The API server with what `kubectl apply`, `set image`, `rollout`, `scale`, `delete` and `drain` need beside
reading: discovery, writes, patches, deletion and eviction of pods.

Patches are RFC 7386 merges; in strategic ones, lists of objects with names are merged by these. Server-side
apply replaces lists and keeps fields that the manifest does not have, regardless of their owners. So a field
that is taken out of a manifest stays, and there are no conflicts. Nothing is validated: use --validate=false.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import yaml
from aiohttp import web

from kubelet.api_stub import ApiStub, Object, _scale_of, _status, _status_object

#: By group and version: plural -> kind, whether it has a namespace, subresources.
RESOURCES: dict[str, dict[str, tuple[str, bool, tuple[str, ...]]]] = {
    "v1": {
        "namespaces": ("Namespace", False, ()),
        "nodes": ("Node", False, ()),
        "pods": ("Pod", True, ("eviction",)),
        "services": ("Service", True, ()),
        "configmaps": ("ConfigMap", True, ()),
        "secrets": ("Secret", True, ()),
        "serviceaccounts": ("ServiceAccount", True, ()),
        "persistentvolumeclaims": ("PersistentVolumeClaim", True, ()),
    },
    "apps/v1": {
        "deployments": ("Deployment", True, ("scale",)),
        "statefulsets": ("StatefulSet", True, ("scale",)),
        "replicasets": ("ReplicaSet", True, ()),
        "daemonsets": ("DaemonSet", True, ()),
    },
    "policy/v1": {"poddisruptionbudgets": ("PodDisruptionBudget", True, ())},
    "networking.k8s.io/v1": {"networkpolicies": ("NetworkPolicy", True, ())},
    "rbac.authorization.k8s.io/v1": {
        "roles": ("Role", True, ()),
        "rolebindings": ("RoleBinding", True, ()),
    },
}


def merged(item: Any, patch: Any, *, by_name: bool) -> Any:
    """`item` with an RFC 7386 merge patch; by_name: lists of objects with names are merged by them."""
    if not isinstance(patch, dict):
        return patch
    result = dict(item) if isinstance(item, dict) else {}
    for key, value in patch.items():
        if key.startswith("$"):  # directives for the order of lists
            continue
        if value is None:
            result.pop(key, None)
        elif by_name and _has_names(value):
            result[key] = _merged_list(result.get(key, []), value)
        elif isinstance(value, dict):
            result[key] = merged(result.get(key), value, by_name=by_name)
        else:
            result[key] = value
    return result


def _has_names(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(v, dict) and "name" in v for v in value)


def _merged_list(items: list[Any], patches: list[Any]) -> list[Any]:
    by_name = {item["name"]: item for item in items}
    for patch in patches:
        if patch.get("$patch") == "delete":
            by_name.pop(patch["name"], None)
        else:
            by_name[patch["name"]] = merged(by_name.get(patch["name"]), patch, by_name=True)
    return list(by_name.values())


@dataclass
class KubectlApi(ApiStub):
    #: Called after each write of a client, with plural and object.
    after_write: Callable[[str, Object], None] = lambda plural, item: None
    #: Begins to delete a pod.
    delete_pod: Callable[[str], None] = lambda name: None
    #: The same, or False if a budget forbids it.
    evict: Callable[[str], bool] = lambda name: True
    _uids: dict[tuple[str, str, str], str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for resources in RESOURCES.values():
            self.kinds |= {plural: kind for plural, (kind, _, _) in resources.items()}

    def all(self, *plurals: str) -> list[Object]:
        return [item for key, item in sorted(self._objects.items()) if key[0] in plurals]

    def put_changed(self, plural: str, item: Object) -> None:
        """Puts it unless it is there already as it is."""
        metadata = item["metadata"]
        key = (plural, metadata.setdefault("namespace", ""), metadata["name"])
        metadata.setdefault("uid", self._uids.setdefault(key, str(uuid.uuid4())))
        known = copy.deepcopy(self._objects.get(key))
        if known is not None:
            known["metadata"].pop("resourceVersion")
        if known != {**item, "metadata": {n: v for n, v in metadata.items() if n != "resourceVersion"}}:
            self.put(plural, item)

    def forget(self, plural: str, namespace: str, name: str) -> None:
        """Deletes what may be there."""
        self._uids.pop((plural, namespace, name), None)
        if (plural, namespace, name) in self._objects:
            self.delete(plural, namespace, name)

    # -- the server --------------------------------------------------------------------------------

    def add_routes(self, app: web.Application) -> None:
        super().add_routes(app)
        for path in ("/version", "/api", "/apis"):
            app.router.add_get(path, {"/version": self._version, "/apis": self._groups}.get(path, _versions))
        for version in RESOURCES:
            prefix = f"/apis/{version}" if "/" in version else f"/api/{version}"

            async def resources(_: web.Request, version: str = version) -> web.Response:
                return _resource_list(version)

            app.router.add_get(prefix, resources)
        for prefix in ("/apis/{group}/{version}", "/api/{version}"):
            for place in ("/namespaces/{namespace}/{plural}", "/{plural}"):
                app.router.add_post(prefix + place, self._create)
                app.router.add_patch(prefix + place + "/{name}", self._patch)
                app.router.add_delete(prefix + place + "/{name}", self._delete)
            app.router.add_get(prefix + "/{plural}/{name}", self._get)
            app.router.add_put(prefix + "/{plural}/{name}", self._update)
            app.router.add_patch(prefix + "/namespaces/{namespace}/{plural}/{name}/scale", self._patch)
            app.router.add_post(prefix + "/namespaces/{namespace}/pods/{name}/eviction", self._evict)

    async def _groups(self, request: web.Request) -> web.Response:
        self.groups = tuple(dict.fromkeys((*self.groups, *(v for v in RESOURCES if "/" in v))))
        return await super()._groups(request)

    def _key(self, request: web.Request) -> tuple[str, str, str]:
        info = request.match_info
        return info["plural"], info.get("namespace", ""), info["name"]

    def _write(self, key: tuple[str, str, str], item: Object) -> Object:
        plural, namespace, name = key
        known = self._objects.get(key)
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        metadata = {
            "uid": self._uids.setdefault(key, str(uuid.uuid4())),
            "creationTimestamp": now,
            "generation": 0,
            **(known["metadata"] if known else {}),
            **item["metadata"],
            "namespace": namespace,
        }
        if known is None or known.get("spec") != item.get("spec"):
            metadata["generation"] += 1
        self.put(plural, {**item, "metadata": metadata})
        written = self.get(plural, namespace, name)
        self.after_write(plural, written)
        return written

    async def _create(self, request: web.Request) -> web.Response:
        item = await request.json()
        info = request.match_info
        key = (info["plural"], info.get("namespace", ""), item["metadata"]["name"])
        if key in self._objects:
            return _status(409, "AlreadyExists")
        return web.json_response(self._write(key, item), status=201)

    async def _patch(self, request: web.Request) -> web.Response:
        key, kind = self._key(request), request.content_type
        patch, known = yaml.safe_load(await request.text()), self._objects.get(key)
        if request.path.endswith("/scale"):
            patch = {"spec": {"replicas": patch["spec"]["replicas"]}}
        if known is None and kind != "application/apply-patch+yaml":
            return _status(404, "NotFound")
        patch.setdefault("metadata", {}).pop("resourceVersion", None)
        item = self._write(
            key, merged(known, patch, by_name=kind == "application/strategic-merge-patch+json")
        )
        return web.json_response(
            _scale_of(item) if request.path.endswith("/scale") else item, status=200 if known else 201
        )

    async def _delete(self, request: web.Request) -> web.Response:
        plural, namespace, name = key = self._key(request)
        if key not in self._objects:
            return _status(404, "NotFound")
        item = self._objects[key]
        if plural == "pods":
            self.delete_pod(name)
        else:
            self.forget(plural, namespace, name)
        return web.json_response(item)

    async def _evict(self, request: web.Request) -> web.Response:
        info = request.match_info
        if ("pods", info["namespace"], info["name"]) not in self._objects:
            return _status(404, "NotFound")
        if not self.evict(info["name"]):
            return _status(429, "TooManyRequests")
        return web.json_response(_status_object(201, "Created") | {"status": "Success"}, status=201)


async def _versions(_: web.Request) -> web.Response:
    return web.json_response({"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []})


def _resource_list(version: str) -> web.Response:
    verbs = ["get", "list", "watch", "create", "update", "patch", "delete"]
    resources = []
    for plural, (kind, is_namespaced, subresources) in RESOURCES[version].items():
        common = {"namespaced": is_namespaced, "singularName": kind.lower()}
        resources.append({"name": plural, "kind": kind, "verbs": verbs, **common})
        for name in subresources:
            of = ("Eviction", "policy", "v1") if name == "eviction" else ("Scale", "autoscaling", "v1")
            resources.append(
                {
                    **common,
                    **dict(zip(("kind", "group", "version"), of, strict=True)),
                    "name": f"{plural}/{name}",
                    "verbs": ["create"] if name == "eviction" else ["get", "patch", "update"],
                }
            )
    return web.json_response({"kind": "APIResourceList", "groupVersion": version, "resources": resources})
