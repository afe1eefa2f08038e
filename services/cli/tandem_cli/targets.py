"""Finds the system that a command uses: the one with the given address, or the one on this machine.

An address is HOST:PORT, a URL (also OpenAI's base URL) or a port of this machine. For a system on this
machine, any of its ports selects the port that the command needs. For other systems, the port must speak the
command's protocol.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import grpc
import httpx
from tandem_core.model.registry import cache_root
from tandem_proto.v1 import gateway_pb2, gateway_pb2_grpc
from tandem_service.channels import open_public_sync_channel

from tandem_cli.options import fail
from tandem_cli.up.state_file import FleetRecord, read_state

#: Ports of `tandem up` and of the processes themselves, for gateways without a state file, as in containers.
_DEFAULTS = {"grpc": "127.0.0.1:20051", "http": "127.0.0.1:8000"}
_LOCAL = ("127.0.0.1", "localhost", "[::1]", "")
#: Timeout of calls that ask whether a gateway answers and which model it serves.
TIMEOUT_S = 5.0

Purpose = Literal["grpc", "http"]


class GatewayError(Exception):
    """The gateway refused the request or cannot be reached."""


def running() -> dict[Path, FleetRecord]:
    """The local systems, from the state files in this user's cache; skips those of killed supervisors."""
    found = {}
    for path in sorted((cache_root() / "run").glob("*.json")):
        try:
            record = read_state(path)
            # Another process may have the pid of a killed supervisor by now.
            if b"up" in Path(f"/proc/{record.supervisor_pid}/cmdline").read_bytes().split(b"\0"):
                found[path] = record
        except (OSError, ValueError, LookupError, TypeError):
            continue
    return found


def fleet_of(address: str) -> FleetRecord | None:
    """The local system with this address, or for "" the only one; None if there is none. Ends the command if
    several match."""
    fleets = list(running().values())
    if address:
        host, _, port = _split(address)[1].rpartition(":")
        return next((f for f in fleets if host in (*_LOCAL, f.host) and f.has_port(port)), None)
    if len(fleets) > 1:
        listed = "".join(f"\n  --target {one.targets('gateway')[0]}  {one.model}" for one in fleets)
        fail(f"several systems run here; choose one:{listed}", code=2)
    return fleets[0] if fleets else None


def gateway(address: str, purpose: Purpose) -> str:
    """The gateway's address for gRPC (HOST:PORT, with https:// if it has TLS) or its URL for HTTP."""
    scheme, target = _split(address or _DEFAULTS[purpose])
    if (fleet := fleet_of(address)) is not None:
        port = target.rpartition(":")[2]
        gateways = [pod for pod in fleet.pods if pod.role == "gateway"]
        chosen = next((pod for pod in gateways if port in map(str, pod.ports.values())), gateways[0])
        if not fleet.ready:
            fail(f"the system of port {chosen.ports[purpose]} still starts; try again when it is ready")
        scheme = "https" if fleet.serves_tls else ""
        target = f"{fleet.host}:{chosen.ports[purpose]}"
    if purpose == "http":
        return f"{scheme or 'http'}://{target}"
    return f"https://{target}" if scheme == "https" else target


def _split(address: str) -> tuple[str, str]:
    """Scheme ("": none) and HOST:PORT."""
    scheme, _, rest = address.rpartition("://")
    rest = rest.rstrip("/").removesuffix("/v1")
    return scheme, f"127.0.0.1:{rest}" if rest.isdigit() else rest


@contextmanager
def stub(target: str, ca_file: Path | None) -> Iterator[gateway_pb2_grpc.GatewayServiceStub]:
    """A context for calls to a gateway's gRPC address; turns their errors into GatewayError."""
    with open_public_sync_channel(target, ca_file) as channel:
        try:
            yield gateway_pb2_grpc.GatewayServiceStub(channel)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            raise GatewayError(explain(error, target)) from error


def served_model(target: str, ca_file: Path | None, api_key: str | None) -> str:
    """Name of the served model; asks the gateway. Raises GatewayError."""
    request = gateway_pb2.ListModelsRequest()
    with stub(target, ca_file) as gateway:
        models = gateway.ListModels(request, timeout=TIMEOUT_S, metadata=key_metadata(api_key)).models
    return models[0].name if models else ""


def served_model_http(url: str, ca_file: Path | None, api_key: str | None) -> str:
    """The first model that a server with OpenAI's API lists; "" if it lists none. Raises GatewayError."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    verify = True if ca_file is None else ssl.create_default_context(cafile=str(ca_file))
    try:
        with httpx.Client(timeout=TIMEOUT_S, verify=verify, trust_env=False) as client:
            answer = client.get(f"{url}/v1/models", headers=headers)
    except httpx.HTTPError as error:
        raise GatewayError(unreachable(url, str(error))) from error
    if answer.status_code in (401, 403):
        raise GatewayError(f"{url} refuses the key ({answer.status_code}): --api-key, or TANDEM_API_KEY")
    try:
        return str(answer.json()["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        return ""


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {api_key}"),) if api_key else ()


def unreachable(address: str, details: str) -> str:
    """Error message for an address where no gateway answers."""
    if "CERTIFICATE_VERIFY_FAILED" in details:
        return f"the certificate of {address} is not trusted; name a file of its authorities with --ca"
    # httpx's message for an HTTP/2 frame, and gRPC's for an HTTP/1 answer.
    if "illegal request line" in details:
        return f"{address} is a gRPC port; give the gateway's HTTP port with --target, by default 8000"
    if "http1.x" in details or "Expected SETTINGS frame" in details:
        return f"{address} is an HTTP port; give the gateway's gRPC port with --target, by default 20051"
    cause = details.rpartition(": ")[2]
    return f"no gateway answers at {address} ({cause}); start `tandem up`, or give another --target"


def explain(error: grpc.RpcError, target: str) -> str:
    """One sentence with the cause, and the remedy if the gateway at the target is the problem."""
    # An RpcError raised by a call is that call, with a code and details.
    if not isinstance(error, grpc.Call):
        return str(error)
    code, details = error.code(), error.details() or ""
    # The gateway sends metadata at once; if there is some, the gateway is reachable and a pod is not.
    if code is grpc.StatusCode.UNAVAILABLE and not error.initial_metadata():
        return unreachable(target, details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return f"{details} (--api-key, or TANDEM_API_KEY)"
    return f"{code.name}: {details}"
