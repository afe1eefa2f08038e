"""Finds the current pods of a role.

A consumer polls `DnsDiscovery.targets()` and opens or closes channels to match. A name with several
addresses, such as a Kubernetes headless service, is one target per address; it is resolved again as pods
come and go.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

import structlog


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
    """ "host:port" or "[v6]:port" -> Target; ValueError says what is wrong."""
    host, separator, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        separator = ""  # a bare IPv6 address: the port cannot be told apart
    if not separator or not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise ValueError(f"{text.strip()!r} is no host:port, such as 10.0.0.7:51200")
    return Target(host, int(port))


class DnsDiscovery:
    """A list of targets; a name stands for all its addresses and is resolved again every `refresh_s` seconds.

    While DNS does not answer, the last good answer is kept. If a name has IPv4 addresses, only those are
    used, so that a dual-stack pod counts once.
    """

    def __init__(self, targets: Sequence[str], refresh_s: float = 5.0) -> None:
        self._entries = tuple(parse_target(target) for target in targets)
        self._refresh_s = refresh_s
        self._known: dict[Target, tuple[str, ...]] = {}
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
            self._log.warning("name not resolved; keeping the last answer", host=entry.host, error=str(error))
            return
        v4 = {str(address[0]) for family, _, _, _, address in answers if family == socket.AF_INET}
        hosts = v4 or {str(address[0]) for _, _, _, _, address in answers}
        self._known[entry] = tuple(str(Target(host, entry.port)) for host in hosts)
