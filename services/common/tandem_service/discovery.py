"""Discovers the current pods of a role from the entries of its setting:

    10.0.0.7:21200                 one pod
    tandem-decode:21200            a DNS name: one pod per address; resolved again every few seconds
    k8s://tandem-decode:21200      the pods of a Kubernetes Service, watched through the API server
                                   (kubernetes_watch.py); k8s://NAME.NAMESPACE:PORT in another namespace

A consumer calls `Discovery.endpoints()` and opens or closes channels to match.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tandem_service.tasks import end_tasks

if TYPE_CHECKING:
    from tandem_service.kubernetes_watch import ServiceWatch

SERVICE_SCHEME = "k8s://"

_DNS_LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
#: getaddrinfo's errors for a name without addresses, such as a Service without pods; others are outages.
_NO_ADDRESS = (socket.EAI_NONAME, socket.EAI_NODATA)


@dataclass(frozen=True)
class Target:
    """Host and port of a gRPC server; `str()` gives gRPC's form (IPv6 in brackets)."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_address(self) -> bool:
        """Whether the host is an IP address rather than a name."""
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            return False
        return True


def parse_target(text: str) -> Target:
    """ "host:port" or "[v6]:port" -> Target. Raises ValueError."""
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""  # a bare IPv6 address, in which the port is ambiguous
    if not separator or not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ValueError(f"{text.strip()!r} is no host:port, such as 10.0.0.7:21200")
    return Target(host, int(port))


@dataclass(frozen=True)
class ServiceRef:
    """A Service of Kubernetes, and the port of its pods; `str()` gives the form of the settings."""

    name: str
    #: "": the namespace of this pod.
    namespace: str
    port: int

    def __str__(self) -> str:
        host = f"{self.name}.{self.namespace}" if self.namespace else self.name
        return f"{SERVICE_SCHEME}{host}:{self.port}"


def parse_entry(text: str) -> Target | ServiceRef:
    """Parses an entry of a setting. Raises ValueError."""
    text = text.strip()
    if not text.startswith(SERVICE_SCHEME):
        return parse_target(text)
    try:
        target = parse_target(text.removeprefix(SERVICE_SCHEME))
    except ValueError:
        target = Target("", 0)
    name, _, namespace = target.host.partition(".")
    if not re.fullmatch(_DNS_LABEL, name) or not re.fullmatch(f"({_DNS_LABEL})?", namespace):
        raise ValueError(
            f"{text!r} is no {SERVICE_SCHEME}SERVICE:PORT or {SERVICE_SCHEME}SERVICE.NAMESPACE:PORT"
        )
    return ServiceRef(name, namespace, target.port)


@dataclass(frozen=True, order=True)
class Endpoint:
    """A pod."""

    #: host:port.
    target: str
    #: Topology zone; "": unknown.
    zone: str = ""
    #: Why it should get no new requests; "" if it may.
    withheld: str = ""


class Discovery:
    """The pods of several entries. `await start(...)`, then `await close()`."""

    def __init__(self, entries: Sequence[str]) -> None:
        parsed = [parse_entry(entry) for entry in entries]
        self._services = [entry for entry in parsed if isinstance(entry, ServiceRef)]
        self._dns = DnsDiscovery([entry for entry in parsed if isinstance(entry, Target)])
        self._watches: list[ServiceWatch] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self, on_change: Callable[[], None]) -> None:
        """`on_change` is called when `endpoints` changes between two calls of it."""
        if self._services:
            # Takes .5 s to import, which a process without Services need not spend.
            from tandem_service.kubernetes_watch import ServiceWatch

            self._watches = [ServiceWatch(service, on_change) for service in self._services]
            self._tasks = [asyncio.create_task(watch.run(), name=f"watch {watch}") for watch in self._watches]

    async def close(self) -> None:
        await end_tasks(self._tasks)

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """Every known pod once, sorted. Cheap enough to call every second."""
        found = {target: Endpoint(target) for target in await self._dns.targets()}
        for watch in self._watches:
            found |= {endpoint.target: endpoint for endpoint in watch.endpoints}
        return tuple(sorted(found.values()))


class DnsDiscovery:
    """A list of targets; a name stands for all its addresses and is resolved again every `refresh_s` seconds.

    While DNS does not answer, the last good answer is kept. An answer that there is no address counts when it
    comes a second time. If a name has IPv4 addresses, only those are used, so that a dual-stack pod counts
    once.
    """

    def __init__(self, targets: Sequence[Target], refresh_s: float = 5.0) -> None:
        self._entries = tuple(targets)
        self._refresh_s = refresh_s
        self._known: dict[Target, tuple[str, ...]] = {}
        #: Names whose last answer was that they have no address.
        self._empty: set[Target] = set()
        self._next_refresh = 0.0
        self._log = structlog.get_logger("tandem.discovery")

    async def targets(self) -> tuple[str, ...]:
        """`host:port` of every known pod, sorted, without repeats. Cheap enough to call every second."""
        if time.monotonic() >= self._next_refresh:
            # Set before the lookups, so that other callers do not repeat them while DNS is slow.
            self._next_refresh = time.monotonic() + self._refresh_s
            await asyncio.gather(*(self._resolve(entry) for entry in self._entries))
        return tuple(sorted({target for known in self._known.values() for target in known}))

    async def _resolve(self, entry: Target) -> None:
        if entry.is_address:
            self._known[entry] = (str(entry),)
            return
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.getaddrinfo(entry.host, entry.port, type=socket.SOCK_STREAM)
        except OSError as error:
            if isinstance(error, socket.gaierror) and error.errno in _NO_ADDRESS:
                if entry in self._empty:
                    self._known[entry] = ()
                self._empty.add(entry)
            self._log.warning("name not resolved", host=entry.host, error=str(error))
            return
        self._empty.discard(entry)
        v4 = {str(address[0]) for family, _, _, _, address in answers if family == socket.AF_INET}
        hosts = v4 or {str(address[0]) for _, _, _, _, address in answers}
        self._known[entry] = tuple(str(Target(host, entry.port)) for host in hosts)
