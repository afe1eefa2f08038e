"""Where the pods of a role are, now.

A consumer polls `Discovery.targets()` and opens or closes channels to match. Two ways exist: a fixed list,
and DNS (a name with several addresses, such as a Kubernetes headless service, is one target per
address and is asked again as pods come and go). A Kubernetes watch can join as a third class.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import structlog


@dataclass(frozen=True)
class Target:
    """Host and port of a gRPC server; `str()` gives what gRPC wants (IPv6 in brackets)."""

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
    """ "host:port" or "[v6]:port" -> Target; ValueError says what is wrong."""
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""  # a bare IPv6 address: where the port begins is anyone's guess
    if not separator or not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ValueError(f"{text.strip()!r} is no host:port, such as 10.0.0.7:51200")
    return Target(host, int(port))


class Discovery(ABC):
    """Answers which gRPC targets serve a role at this moment."""

    @abstractmethod
    async def targets(self) -> tuple[str, ...]:
        """`host:port` of every known pod, sorted, without repeats. Cheap enough to call every second."""


class StaticDiscovery(Discovery):
    """A fixed list. gRPC itself resolves names in it."""

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(sorted({str(parse_target(target)) for target in targets}))

    async def targets(self) -> tuple[str, ...]:
        return self._targets


class DnsDiscovery(Discovery):
    """A list in which a name stands for all the addresses it has, asked again every `refresh_s` seconds.

    While DNS does not answer, the last good answer holds: a name server's bad minute must not empty the
    fleet. A name with IPv4 addresses is used by those only, so that a dual-stack pod counts once.
    """

    def __init__(self, targets: Sequence[str], refresh_s: float = 5.0) -> None:
        self._entries = tuple(parse_target(target) for target in targets)
        self._refresh_s = refresh_s
        self._known: dict[Target, tuple[str, ...]] = {}
        self._next_refresh = 0.0
        self._log = structlog.get_logger("tandem.discovery")

    async def targets(self) -> tuple[str, ...]:
        if time.monotonic() >= self._next_refresh:
            # Set before the lookups: a slow DNS must not be asked again by every caller meanwhile.
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
            self._log.warning("name not resolved; keeping the last answer", host=entry.host, error=str(error))
            return
        v4 = {str(address[0]) for family, _, _, _, address in answers if family == socket.AF_INET}
        hosts = v4 or {str(address[0]) for _, _, _, _, address in answers}
        self._known[entry] = tuple(str(Target(host, entry.port)) for host in hosts)
