"""The state file of a running `tandem up`: its processes with pids and ports.

Each change replaces the file atomically by rename; the end of the run removes it.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class PodRecord:
    """One process; pid is None between a death and the restart."""

    role: str
    name: str
    pid: int | None
    ports: dict[str, int]


@dataclass(frozen=True)
class FleetRecord:
    """The whole fleet. `ready` turns true when every pod has served once."""

    supervisor_pid: int
    model: str
    ready: bool
    pods: tuple[PodRecord, ...]
    #: Address under which this machine reaches the pods.
    host: str = "127.0.0.1"
    redis_url: str = ""
    #: Folder of the pods' certificates; "": plaintext between pods.
    tls_dir: str = ""
    #: Whether the gateway's ports speak TLS.
    serves_tls: bool = False

    def targets(self, role: str, purpose: str = "grpc") -> list[str]:
        """host:port of each process of a role."""
        return [f"{self.host}:{pod.ports[purpose]}" for pod in self.pods if pod.role == role]

    def has_port(self, port: str) -> bool:
        return any(port in map(str, pod.ports.values()) for pod in self.pods)

    def pids(self, role: str) -> list[int]:
        """Pids of the running pods of a role."""
        return [pod.pid for pod in self.pods if pod.role == role and pod.pid is not None]


class StateFile:
    """Owner of one state file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, record: FleetRecord) -> None:
        """Raises OSError."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        # It may contain a Redis password.
        temporary.touch(0o600)
        temporary.write_text(json.dumps(asdict(record), indent=2) + "\n")
        temporary.replace(self.path)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def read_state(path: Path) -> FleetRecord:
    """The record in the file; FileNotFoundError when no fleet runs there."""
    raw = json.loads(path.read_text())
    pods = tuple(PodRecord(pod["role"], pod["name"], pod["pid"], pod["ports"]) for pod in raw["pods"])
    return FleetRecord(**{**raw, "pods": pods})
