"""Of manifests: names that resolve, links that NetworkPolicies let through, rights at the API server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tandem_cli.doctor.finding import Finding
from tandem_cli.doctor.manifests import Objects, Workload
from tandem_cli.doctor.network import (
    NAMESPACE_LABEL,
    Peer,
    addresses,
    egress_rules,
    is_allowed,
    lets_out,
    links,
)

_DNS = Peer({"k8s-app": "kube-dns"}, {NAMESPACE_LABEL: "kube-system"})
_API_PORTS = (443, 6443)
_NEEDED_VERBS = ("list", "watch")


def service_name(objects: Objects) -> Iterator[Finding]:
    """The names in settings are Services with pods. Addresses and hosts of other domains are not judged."""
    for address in addresses(objects):
        is_foreign = "." in address.host and not address.host.endswith(".svc.cluster.local")
        if not address.service or is_foreign or objects.behind(address.service):
            continue
        missing = "selects no pod here" if objects.find("Service", address.service) else "is not here"
        yield Finding(
            address.where,
            f"The Service {address.service} {missing}, so nothing is found under this name.",
            "Name a Service of these manifests, or correct its selector.",
        )


def service_port(objects: Objects) -> Iterator[Finding]:
    """Pods listen on the port that a setting names."""
    for address in addresses(objects):
        for target in objects.behind(address.service):
            listening = [int(port.container_port) for port in target.container.ports or ()]
            if address.port not in listening:
                yield Finding(
                    address.where,
                    f"It names port {address.port}, but {target.name} listens on "
                    f"{', '.join(map(str, listening)) or 'none'}.",
                    f"Name the port of {target.name}.",
                )


def all_pods(objects: Objects) -> Iterator[Finding]:
    """Without the API server, a gateway finds each pod only by a headless Service."""
    for address in addresses(objects):
        if address.setting not in ("decode", "prefill") or address.is_watched:
            continue
        service = objects.find("Service", address.service) if address.service else None
        if service is not None and service.spec.cluster_ip != "None":
            yield Finding(
                address.where,
                f"The Service {address.service} has one address for all pods, so the gateway cannot choose.",
                f"Set clusterIP: None in the Service, or name it as k8s://{address.service}:{address.port}.",
            )


def network_policy(objects: Objects) -> Iterator[Finding]:
    # Several settings may need one link.
    for link in {str(link): link for link in links(objects)}.values():
        if not is_allowed(objects, link):
            yield Finding(
                f"NetworkPolicies of {link.source.name} and {link.target.name}",
                f"They do not let {link} through.",
                f"Allow port {link.port} in the egress of {link.source.name} and the ingress of "
                f"{link.target.name}.",
            )


def dns_policy(objects: Objects) -> Iterator[Finding]:
    named = {one.workload.name: one.workload for one in addresses(objects) if one.service}
    for workload in named.values():
        if not lets_out(objects, workload, _DNS, 53, "UDP"):
            yield Finding(
                f"NetworkPolicies of {workload.name}",
                "They do not let its pods ask DNS, and its settings have names.",
                "Allow UDP and TCP port 53 to the namespace kube-system.",
            )


def api_policy(objects: Objects) -> Iterator[Finding]:
    for workload in _watching(objects):
        rules = egress_rules(objects, workload)
        if rules is None or any(
            (not rule.to or any(peer.ip_block is not None for peer in rule.to))
            and (not rule.ports or any(port.port in _API_PORTS for port in rule.ports))
            for rule in rules
            if not _is_for_internet(rule)
        ):
            continue
        yield Finding(
            f"NetworkPolicies of {workload.name}",
            "They do not let its pods reach the API server, which they ask for pods.",
            "Allow TCP ports 443 and 6443 to the API server's address.",
        )


def _is_for_internet(rule: Any) -> bool:
    """Whether it leaves private addresses out, where API servers are."""
    return bool(rule.to) and all(peer.ip_block is not None and peer.ip_block.var_except for peer in rule.to)


def rights(objects: Objects) -> Iterator[Finding]:
    """A pod that watches Services may list and watch EndpointSlices."""
    for workload in _watching(objects):
        account = workload.pod.service_account_name or "default"
        if workload.pod.automount_service_account_token is False:
            yield Finding(
                workload.where,
                "It watches EndpointSlices without a token for the API server.",
                "Set automountServiceAccountToken: true in its pods.",
            )
        held = {
            verb
            for binding in objects.of("RoleBinding")
            if any(s.kind == "ServiceAccount" and s.name == account for s in binding.subjects or ())
            for role in [objects.find(binding.role_ref.kind, binding.role_ref.name)]
            if role is not None
            for rule in role.rules or ()
            if {"discovery.k8s.io", "*"} & set(rule.api_groups or ())
            and {"endpointslices", "*"} & set(rule.resources or ())
            for verb in rule.verbs
        }
        missing = [verb for verb in _NEEDED_VERBS if verb not in held and "*" not in held]
        if missing:
            yield Finding(
                f"ServiceAccount {account}",
                f"It may not {' and '.join(missing)} endpointslices.discovery.k8s.io, by which "
                f"{workload.name} finds pods.",
                "Bind a Role with the verbs list and watch to it (deploy/k8s/base/rbac.yaml).",
            )


def _watching(objects: Objects) -> list[Workload]:
    found = {one.workload.name: one.workload for one in addresses(objects) if one.is_watched}
    return list(found.values())


NETWORK_CHECKS = (
    service_name,
    service_port,
    all_pods,
    network_policy,
    dns_policy,
    api_policy,
    rights,
)
