"""Checks of manifests for settings that a pod refuses or ignores, and for contradictions between settings."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import get_args
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource
from tandem_service.discovery import ServiceRef, parse_entry
from tandem_service.settings import ENV_PREFIX, CommonSettings
from tandem_service.validation import reason

from tandem_cli.doctor.finding import Finding, Severity
from tandem_cli.doctor.manifests import GPU, SETTINGS, Objects, Workload, at

_CERTIFICATES = ("pod_tls_cert", "pod_tls_key", "pod_tls_ca")


def unknown_setting(objects: Objects) -> Iterator[Finding]:
    """Each variable is a setting; processes ignore unknown variables without a message."""
    for workload in _tandem(objects):
        known = {ENV_PREFIX + field.upper() for field in SETTINGS[workload.role].model_fields}
        for name in workload.environment:
            if name.startswith(ENV_PREFIX) and name not in known:
                yield Finding(
                    f"{workload.where}, {name}",
                    f"{name} is no setting of tandem-{workload.role}, which ignores it.",
                    f"Correct the name, see `tandem-{workload.role} --help`, or remove it.",
                )


def refused_setting(objects: Objects) -> Iterator[Finding]:
    for workload in _tandem(objects):
        cls = SETTINGS[workload.role]
        values = {
            field: workload.environment[ENV_PREFIX + field.upper()]
            for field in cls.model_fields
            if ENV_PREFIX + field.upper() in workload.environment
        }
        try:
            _without_environment(cls).model_validate(values)
        except ValidationError as error:
            for one in error.errors(include_url=False):
                if _is_unknown(workload, one["type"], one["input"]):
                    continue
                field = ENV_PREFIX + str(one["loc"][0]).upper() if one["loc"] else ""
                yield Finding(
                    f"{workload.where}, {field or 'settings'}",
                    f"tandem-{workload.role} would not start: {reason(one)}.",
                    f"Correct {field} in the settings of {workload.role} pods."
                    if field
                    else "Change the settings it names.",
                )


def _is_unknown(workload: Workload, kind: str, given: object) -> bool:
    """Whether the value may not be in the manifests, as that of a Secret or of a field of the pod."""
    has_secrets = any("secretRef" in source for source in workload.container.get("envFrom") or ())
    if kind in ("missing", "value_error") and has_secrets:
        return True
    return isinstance(given, str) and given.startswith("<") and given.endswith(">")


@cache
def _without_environment(cls: type[CommonSettings]) -> type[CommonSettings]:
    """The settings class without this process's environment variables as a source."""

    class Given(cls):  # type: ignore[misc, valid-type]
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            **others: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings,)

    return Given


def mounted_file(objects: Objects) -> Iterator[Finding]:
    """Each file that a setting names is on a mounted volume."""
    for workload in _tandem(objects):
        mounts = [PurePosixPath(mount["mountPath"]) for mount in workload.container.get("volumeMounts") or ()]
        for field, info in SETTINGS[workload.role].model_fields.items():
            path = workload.environment.get(ENV_PREFIX + field.upper(), "")
            is_path = info.annotation is Path or Path in get_args(info.annotation)
            if (
                is_path
                and path.startswith("/")
                and not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)
            ):
                yield Finding(
                    f"{workload.where}, {ENV_PREFIX}{field.upper()}",
                    f"{path} is on no volume that the container mounts.",
                    "Mount the volume with the file, or correct the path.",
                )


def one_model(objects: Objects) -> Iterator[Finding]:
    """Gateway, prefill and decode pods serve the same model."""
    engines = [one for one in _tandem(objects) if one.role != "lookahead" and one.model]
    models = {workload.model for workload in engines}
    if len(models) > 1:
        named = ", ".join(sorted(f"{one.name} {one.model}" for one in engines))
        yield Finding(
            "TANDEM_MODEL",
            f"The roles name different models ({named}), and a gateway uses only pods of its own.",
            "Name one model in the settings of all three roles.",
        )


def pulled_model(objects: Objects) -> Iterator[Finding]:
    """A pod loads the model that its init container pulls."""
    for workload in _tandem(objects):
        for container in workload.pod.get("initContainers") or ():
            command = [*(container.get("command") or ()), *(container.get("args") or ())]
            if command[:3] != ["tandem", "model", "pull"]:
                continue
            pulled = next((word for word in command[3:] if not word.startswith("-")), "")
            if workload.model and PurePosixPath(pulled).name != workload.model:
                yield Finding(
                    f"{workload.where}, init container {container['name']}",
                    f"It pulls {pulled}, but TANDEM_MODEL is the folder of {workload.model}.",
                    "Name the same model in both.",
                )


def device(objects: Objects) -> Iterator[Finding]:
    for workload in objects.of_role("decode") + objects.of_role("prefill"):
        wants_gpu = workload.setting("device").startswith("cuda")
        if wants_gpu and not workload.num_gpus:
            yield Finding(
                f"{workload.where}, TANDEM_DEVICE",
                f"It computes on a GPU, but its limits ask for no {GPU}.",
                f"Add {GPU}: 1 to the container's limits, or set TANDEM_DEVICE=cpu.",
            )


def kv_room(objects: Objects) -> Iterator[Finding]:
    """The pool of KV blocks holds the longest text."""
    for workload in objects.of_role("decode") + objects.of_role("prefill"):
        blocks, size = int(workload.number("num_blocks")), int(workload.number("block_size"))
        longest = max(int(one.number("max_model_len")) for one in [workload, *objects.of_role("gateway")])
        if blocks and blocks * size < longest:
            yield Finding(
                f"{workload.where}, TANDEM_NUM_BLOCKS",
                f"{blocks} blocks of {size} tokens do not hold a text of TANDEM_MAX_MODEL_LEN, {longest}.",
                f"Set TANDEM_NUM_BLOCKS to {-(-longest // size)} or more, or a shorter TANDEM_MAX_MODEL_LEN.",
            )


def encrypted_links(objects: Objects) -> Iterator[Finding]:
    """All roles have certificates, or none."""
    given = {one.name: all(one.setting(field) for field in _CERTIFICATES) for one in _tandem(objects)}
    if len(set(given.values())) > 1:
        plain = ", ".join(sorted(name for name, has_them in given.items() if not has_them))
        yield Finding(
            plain,
            "Other roles speak TLS and these do not, so they cannot reach each other.",
            "Give all roles TANDEM_POD_TLS_CERT, _KEY and _CA (components/tls), or none.",
        )


def api_keys(objects: Objects) -> Iterator[Finding]:
    for gateway in objects.of_role("gateway"):
        is_public = any(
            at(service, "spec", "type") in ("LoadBalancer", "NodePort")
            and gateway in objects.behind(service["metadata"]["name"])
            for service in objects.of("Service")
        )
        if is_public and not gateway.setting("api_keys_file"):
            yield Finding(
                gateway.where,
                "Its Service is open to other networks and needs no API key.",
                "Set TANDEM_API_KEYS_FILE, or make the Service a ClusterIP.",
                Severity.WARNING,
            )


def shared_answers(objects: Objects) -> Iterator[Finding]:
    """Several gateways resume each other's answers through Redis."""
    for gateway in objects.of_role("gateway"):
        has_redis = gateway.setting("redis_url") or gateway.environment.get("REDIS_URL")
        if (
            not has_redis
            and gateway.number("resume_ttl_s")
            and (at(gateway.object, "spec", "replicas") or 1) > 1
        ):
            yield Finding(
                f"{gateway.where}, TANDEM_REDIS_URL",
                "There are several gateways and no Redis, so only an answer's own gateway can resume it.",
                "Set TANDEM_REDIS_URL, or TANDEM_RESUME_TTL_S=0 to disable resuming.",
            )


#: Settings that name other pods, by role.
_ADDRESSES = {
    "gateway": ("decode", "prefill", "redis_url"),
    "decode": ("lookahead",),
    "lookahead": ("redis_url",),
}


def named_service(objects: Objects) -> Iterator[Finding]:
    """Host names in settings are Services with pods that listen on the port. IP addresses and hosts of other
    domains are skipped."""
    for workload in objects.workloads:
        for setting in _ADDRESSES.get(workload.role, ()):
            for text in workload.setting(setting).split(","):
                yield from _named_service(objects, workload, setting, text.strip())


def _named_service(objects: Objects, workload: Workload, setting: str, text: str) -> Iterator[Finding]:
    try:
        host, port, is_watched = _address(setting, text)
    except ValueError:  # `refused_setting` names it
        return
    if not host or ":" in host or ("." in host and not host.endswith(".svc.cluster.local")):
        return
    name = host.split(".")[0]
    where = f"{workload.where}, {ENV_PREFIX}{setting.upper()}"
    service, targets = objects.find("Service", name), objects.behind(name)
    if not targets:
        yield Finding(
            where,
            f"The Service {name} {'selects no pod of' if service else 'is not in'} these manifests.",
            "Name a Service of these manifests, or correct its selector.",
        )
    for target in targets:
        listening = [one["containerPort"] for one in target.container.get("ports") or ()]
        if port not in listening:
            yield Finding(
                where,
                f"It names port {port}, but {target.name} listens on "
                f"{', '.join(map(str, listening)) or 'none'}.",
                f"Name the port of {target.name}.",
            )
    has_one_address = service is not None and at(service, "spec", "clusterIP") != "None"
    if setting in ("decode", "prefill") and not is_watched and has_one_address:
        yield Finding(
            where,
            f"The Service {name} has one address for all pods, so the gateway cannot choose.",
            f"Set clusterIP: None in the Service, or name it as k8s://{name}:{port}.",
        )


def _address(setting: str, text: str) -> tuple[str, int, bool]:
    """Host, port, and whether pods are discovered through the API server. Raises ValueError."""
    if text in ("", "()"):
        return "", 0, False
    if setting == "redis_url":
        url = urlsplit(text)
        return url.hostname or "", url.port or 6379, False
    entry = parse_entry(text)
    if isinstance(entry, ServiceRef):
        return entry.name, entry.port, True
    return entry.host, entry.port, False


def _tandem(objects: Objects) -> list[Workload]:
    return [workload for workload in objects.workloads if workload.role]


READABLE_CHECKS = (unknown_setting, refused_setting)
SETTINGS_CHECKS = (
    mounted_file,
    one_model,
    pulled_model,
    device,
    kv_room,
    encrypted_links,
    api_keys,
    shared_answers,
    named_service,
)
