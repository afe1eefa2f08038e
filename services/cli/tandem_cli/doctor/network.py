"""Which links the pods need, and whether the NetworkPolicies let them through."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from tandem_service.discovery import ServiceRef, parse_entry, parse_target

from tandem_cli.doctor.manifests import Objects, Workload

NAMESPACE_LABEL = "kubernetes.io/metadata.name"


@dataclass(frozen=True)
class Address:
    """A host and port that a setting names."""

    workload: Workload
    setting: str
    host: str
    port: int
    #: Whether the API server is asked for its pods.
    is_watched: bool = False

    @property
    def where(self) -> str:
        return f"{self.workload.where}, TANDEM_{self.setting.upper()}"

    @property
    def service(self) -> str:
        """The first label of the name; "" for an IP address."""
        return "" if re.fullmatch(r"[0-9.]+|.*:.*", self.host) else self.host.split(".")[0]


@dataclass(frozen=True)
class Link:
    source: Workload
    target: Workload
    port: int
    purpose: str

    def __str__(self) -> str:
        return f"{self.source.name} -> {self.target.name}:{self.port} ({self.purpose})"


def addresses(objects: Objects) -> Iterator[Address]:
    """What the settings of the pods name; those that cannot be parsed are left to the check of settings."""
    for workload in objects.workloads:
        for setting in _ADDRESSES.get(workload.role, ()):
            for text in workload.setting(setting).split(","):
                if text.strip() in ("", "()"):
                    continue
                try:
                    yield _address(workload, setting, text)
                except ValueError:
                    continue


#: Settings that name other pods, by role.
_ADDRESSES = {
    "gateway": ("decode", "prefill", "redis_url"),
    "decode": ("lookahead",),
    "lookahead": ("redis_url",),
}


def _address(workload: Workload, setting: str, text: str) -> Address:
    if setting == "redis_url":
        url = urlsplit(text)
        return Address(workload, setting, url.hostname or "", url.port or 6379)
    if setting == "lookahead":
        target = parse_target(text)
        return Address(workload, setting, target.host, target.port)
    entry = parse_entry(text)
    if isinstance(entry, ServiceRef):
        return Address(workload, setting, entry.name, entry.port, is_watched=True)
    return Address(workload, setting, entry.host, entry.port)


def links(objects: Objects) -> Iterator[Link]:
    """All that pods open to each other, as far as the ports are known here."""
    yield from (link for link in _links(objects) if link.port)


def _links(objects: Objects) -> Iterator[Link]:
    for address in addresses(objects):
        for target in objects.behind(address.service):
            yield Link(address.workload, target, address.port, address.setting.replace("_url", ""))
    decoders, prefills = objects.of_role("decode"), objects.of_role("prefill")
    for decode in decoders:
        kv, grpc = int(decode.number("kv_port")), int(decode.number("port"))
        yield Link(decode, decode, grpc, "requests of a pod that stops")
        yield Link(decode, decode, kv, "their KV")
        for prefill in prefills:
            yield Link(decode, prefill, int(prefill.number("port")), "prompts")
            yield Link(prefill, decode, kv, "KV")


def is_allowed(objects: Objects, link: Link) -> bool:
    source, target = link.source, link.target
    to_target = Peer(target.labels, {NAMESPACE_LABEL: objects.namespace}, target)
    from_source = Peer(source.labels, {NAMESPACE_LABEL: objects.namespace}, source)
    return lets_out(objects, source, to_target, link.port, "TCP") and _lets_in(
        objects, target, from_source, link.port
    )


@dataclass(frozen=True)
class Peer:
    """The other end of a connection, as a policy sees it."""

    labels: Mapping[str, str]
    namespace_labels: Mapping[str, str]
    #: Resolves named ports; None: it has none.
    workload: Workload | None = None


def lets_out(objects: Objects, source: Workload, peer: Peer, port: int, protocol: str) -> bool:
    policies = _selecting(objects, source, "Egress")
    home = {NAMESPACE_LABEL: objects.namespace}
    return not policies or any(
        _has_port(rule.ports, port, protocol, peer.workload) and _has_peer(rule.to, peer, home)
        for policy in policies
        for rule in policy.spec.egress or ()
    )


def _lets_in(objects: Objects, target: Workload, peer: Peer, port: int) -> bool:
    policies = _selecting(objects, target, "Ingress")
    home = {NAMESPACE_LABEL: objects.namespace}
    return not policies or any(
        _has_port(rule.ports, port, "TCP", target) and _has_peer(rule.var_from, peer, home)
        for policy in policies
        for rule in policy.spec.ingress or ()
    )


def egress_rules(objects: Objects, source: Workload) -> list[Any] | None:
    """None: nothing restricts what its pods reach."""
    policies = _selecting(objects, source, "Egress")
    return [rule for policy in policies for rule in policy.spec.egress or ()] if policies else None


def _selecting(objects: Objects, workload: Workload, kind: str) -> list[Any]:
    return [
        policy
        for policy in objects.of("NetworkPolicy")
        if kind in _types(policy.spec) and _matches(policy.spec.pod_selector, workload.labels)
    ]


def _types(spec: Any) -> list[str]:
    return list(spec.policy_types or ["Ingress", *(["Egress"] if spec.egress else [])])


def _has_port(ports: Any, port: int, protocol: str, target: Workload | None) -> bool:
    if not ports:
        return True
    for one in ports:
        if (one.protocol or "TCP") != protocol:
            continue
        if one.port is None:
            return True
        first = _number(one.port, target)
        if first is not None and first <= port <= (one.end_port or first):
            return True
    return False


def _number(port: int | str, target: Workload | None) -> int | None:
    """Of a port, or of the target's port of that name."""
    if isinstance(port, int):
        return port
    return None if target is None else target.port(port)


def _has_peer(peers: Any, peer: Peer, home: Mapping[str, str]) -> bool:
    if not peers:
        return True
    for one in peers:
        if one.ip_block is not None:  # of pods it is not defined
            continue
        if one.namespace_selector is None and dict(peer.namespace_labels) != home:
            continue
        in_namespace = one.namespace_selector is None or _matches(
            one.namespace_selector, peer.namespace_labels
        )
        if in_namespace and (one.pod_selector is None or _matches(one.pod_selector, peer.labels)):
            return True
    return False


def _matches(selector: Any, labels: Mapping[str, str]) -> bool:
    """Of a label selector; an empty one matches all."""
    if selector is None:
        return True
    if not (selector.match_labels or {}).items() <= labels.items():
        return False
    for term in selector.match_expressions or ():
        has_it = labels.get(term.key) in (term.values or ())
        is_met = {
            "In": term.key in labels and has_it,
            "NotIn": not has_it,
            "Exists": term.key in labels,
            "DoesNotExist": term.key not in labels,
        }
        if not is_met[term.operator]:
            return False
    return True
