"""`make observe`: Prometheus and Alertmanager beside a running `tandem up`.

The state file of `tandem up` names the ports. The configuration is written into a folder, and both servers
run until Ctrl-C. They and what they store are this machine's alone; Grafana is not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_cli.targets import running
from tandem_cli.up.state_file import FleetRecord, read_state

RULES = Path(__file__).resolve().parent / "rules.yml"
_START_S = 60.0
#: Debian's names and the projects' own.
_PROMETHEUS, _ALERTMANAGER = ("prometheus",), ("prometheus-alertmanager", "alertmanager")


class ObserveError(Exception):
    """Said in one sentence, with the remedy."""


@dataclass(frozen=True)
class Options:
    state_file: Path
    folder: Path
    prometheus_port: int = 9090
    alertmanager_port: int = 9093
    scrape_interval_s: float = 5.0
    #: Where the programs are looked for.
    path: str = os.environ.get("PATH", "")


def targets(record: FleetRecord, host: str = "127.0.0.1") -> dict[str, list[str]]:
    """Addresses of /metrics by role."""
    found: dict[str, list[str]] = {}
    for pod in record.pods:
        port = pod.ports.get("metrics")
        if port is not None:
            found.setdefault(pod.role, []).append(f"{host}:{port}")
    return found


def prometheus_config(addresses: Mapping[str, Sequence[str]], options: Options) -> dict[str, Any]:
    """One job for each role."""
    interval = f"{options.scrape_interval_s * 1000:.0f}ms"
    return {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(RULES)],
        "alerting": {
            "alertmanagers": [{"static_configs": [{"targets": [f"127.0.0.1:{options.alertmanager_port}"]}]}]
        },
        "scrape_configs": [
            {
                "job_name": f"tandem-{role}",
                "static_configs": [{"targets": list(listed)}],
            }
            for role, listed in sorted(addresses.items())
        ],
    }


#: Shows alerts at its page and sends them nowhere.
ALERTMANAGER_CONFIG = {
    "route": {"receiver": "none", "group_by": ["alertname", "slo_class"]},
    "receivers": [{"name": "none"}],
}


def running_state_file() -> Path:
    """The state file of the one `tandem up` that runs here. Raises ObserveError."""
    found = list(running())
    if not found:
        raise ObserveError("no `tandem up` runs here; start it with `make serve`, or name its --state-file")
    if len(found) > 1:
        raise ObserveError(
            f"several systems run here; name one with --state-file: {', '.join(map(str, found))}"
        )
    return found[0]


def find(names: Sequence[str], path: str) -> str:
    """The program; raises ObserveError when none of the names is there."""
    for name in names:
        if found := shutil.which(name, path=path):
            return found
    package = {"prometheus": "prometheus"}.get(names[0], "prometheus-alertmanager")
    raise ObserveError(
        f"{names[0]} is not installed; on Debian and Ubuntu run `apt-get install {package}`, elsewhere put "
        "the project's binary on PATH"
    )


def _check_free(port: int, flag: str) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ObserveError(
                f"port {port} cannot be used ({error.strerror}); stop what uses it, or choose another with "
                f"{flag}"
            ) from None


def start(options: Options) -> list[subprocess.Popen[bytes]]:
    """Starts both servers, Prometheus first; they log into the folder. Raises ObserveError."""
    prometheus, alertmanager = find(_PROMETHEUS, options.path), find(_ALERTMANAGER, options.path)
    try:
        record = read_state(options.state_file)
    except FileNotFoundError:
        raise ObserveError(
            f"--state-file {options.state_file} does not exist; `tandem up` writes it while it runs"
        ) from None
    _check_free(options.prometheus_port, "--prometheus-port")
    _check_free(options.alertmanager_port, "--alertmanager-port")
    addresses = targets(record)
    options.folder.mkdir(parents=True, exist_ok=True)
    configs = {
        "prometheus.yml": prometheus_config(addresses, options),
        "alertmanager.yml": ALERTMANAGER_CONFIG,
    }
    for name, config in configs.items():
        # JSON is YAML, too.
        (options.folder / name).write_text(json.dumps(config, indent=2))
    commands = {
        "prometheus": [
            prometheus,
            f"--config.file={options.folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={options.folder / 'prometheus'}",
            f"--web.listen-address=127.0.0.1:{options.prometheus_port}",
        ],
        "alertmanager": [
            alertmanager,
            f"--config.file={options.folder / 'alertmanager.yml'}",
            f"--storage.path={options.folder / 'alertmanager'}",
            f"--web.listen-address=127.0.0.1:{options.alertmanager_port}",
            "--cluster.listen-address=",
        ],
    }
    processes = []
    for name, command in commands.items():
        with (options.folder / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
    return processes


def wait_ready(options: Options, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Raises ObserveError when a server ends or is not ready in time."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_S
    for port in (options.prometheus_port, options.alertmanager_port):
        while True:
            if any(process.poll() is not None for process in processes):
                raise ObserveError(f"a server ended at its start; its log lies in {options.folder}")
            try:
                opener.open(f"http://127.0.0.1:{port}/-/ready", timeout=1).close()
                break
            except OSError:
                if time.monotonic() > deadline:
                    raise ObserveError(
                        f"port {port} is not ready after {_START_S:g} s; the logs lie in {options.folder}"
                    ) from None
                time.sleep(0.1)


def stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--state-file", type=Path, help="of `tandem up`; the one that runs here")
    parser.add_argument("--folder", type=Path, help="configuration, data and logs; a temporary one")
    parser.add_argument("--prometheus-port", type=int, default=9090)
    parser.add_argument("--alertmanager-port", type=int, default=9093)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-observe-") as temporary:
        processes: list[subprocess.Popen[bytes]] = []
        try:
            options = Options(
                arguments.state_file or running_state_file(),
                arguments.folder or Path(temporary),
                arguments.prometheus_port,
                arguments.alertmanager_port,
            )
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            processes = start(options)
            wait_ready(options, processes)
            print(
                f"Prometheus    http://127.0.0.1:{options.prometheus_port}/alerts\n"
                f"Alertmanager  http://127.0.0.1:{options.alertmanager_port}\n"
                f"Dashboards    import {RULES.parent / 'dashboards'}/*.json into Grafana, with the data "
                f"source "
                f"http://127.0.0.1:{options.prometheus_port}\n"
                f"Logs          {options.folder}\n"
                "Ctrl-C stops both.",
                flush=True,
            )
            while all(process.poll() is None for process in processes):
                time.sleep(0.5)
            print(f"error: a server ended; its log was in {options.folder}", file=sys.stderr)
            return 1
        except ObserveError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            return 0
        finally:
            stop(processes)


if __name__ == "__main__":
    raise SystemExit(main())
