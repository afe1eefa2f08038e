"""Requests of `tandem lookahead` to the lookahead service.

An export is one Snapshot message (lookahead.proto) with a namespace's shared text and a digest, which the
importing service verifies.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import grpc
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service.channels import open_sync_channel
from tandem_service.tls import PodTls, Role, TlsFileError

from tandem_cli.options import pod_tls
from tandem_cli.targets import fleet_of
from tandem_cli.up.state_file import FleetRecord
from tandem_cli.up.up_plan import certificate_files

#: Port of a service that runs alone, and of the default `tandem up`.
_DEFAULT_TARGET = "127.0.0.1:21400"
_PIECE_BYTES = 1 << 20
_STATUS_TIMEOUT_S, _TRANSFER_TIMEOUT_S = 10.0, 600.0


class AdminError(Exception):
    """One sentence with the cause and the remedy."""


def status(target: str) -> pb.GetLookaheadStatusResponse:
    """Status of the replica at the target. Raises AdminError."""
    with _service(target) as service:
        return _status(service)


def export_namespace(target: str, tenant: str, revision: str, out: IO[bytes]) -> int:
    """Writes the tenant's only namespace whose revision starts with `revision`; returns the bytes written.

    Raises AdminError.
    """
    with _service(target) as service:
        request = pb.ExportNamespaceRequest(namespace=_find(service, tenant, revision))
        pieces = service.ExportNamespace(request, timeout=_TRANSFER_TIMEOUT_S)
        return sum(out.write(piece.payload) for piece in pieces)


def import_namespace(target: str, source: IO[bytes]) -> int:
    """Adds an export; returns its number of tokens. Adds nothing and raises AdminError for a damaged one."""
    pieces = iter(lambda: source.read(_PIECE_BYTES), b"")
    requests = (pb.ImportNamespaceRequest(payload=piece) for piece in pieces)
    with _service(target) as service:
        return int(service.ImportNamespace(requests, timeout=_TRANSFER_TIMEOUT_S).num_tokens)


def purge(target: str, tenant: str) -> int:
    """Removes a tenant's text; returns the number of its namespaces. Raises AdminError."""
    with _service(target) as service:
        request = pb.PurgeTenantRequest(tenant=tenant)
        return int(service.PurgeTenant(request, timeout=_TRANSFER_TIMEOUT_S).num_namespaces)


@contextmanager
def _service(target: str) -> Iterator[lookahead_pb2_grpc.LookaheadServiceStub]:
    fleet = fleet_of(target)
    if fleet is not None:
        services = fleet.targets(Role.LOOKAHEAD)
        if not services:
            raise AdminError("the system has no lookahead service; it needs `tandem up --speculation global`")
        target = services[0]
    target = target or _DEFAULT_TARGET
    with open_sync_channel(target, _credentials(fleet), Role.LOOKAHEAD) as channel:
        try:
            yield lookahead_pb2_grpc.LookaheadServiceStub(channel)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.UNAVAILABLE and "Redis" not in details:
                raise AdminError(
                    f"no lookahead service answers at {target}; name it with --target host:port, and where "
                    "pods use TLS the operator's certificate with TANDEM_POD_TLS_CERT, _KEY and _CA"
                ) from error
            raise AdminError(details) from error


def _status(service: lookahead_pb2_grpc.LookaheadServiceStub) -> pb.GetLookaheadStatusResponse:
    answer: pb.GetLookaheadStatusResponse = service.GetLookaheadStatus(
        pb.GetLookaheadStatusRequest(), timeout=_STATUS_TIMEOUT_S
    )
    return answer


def _credentials(fleet: FleetRecord | None) -> PodTls | None:
    """Credentials from the variables that pods read, or those of a `tandem up`. Raises AdminError."""
    paths = [os.environ.get(f"TANDEM_POD_TLS_{name}") for name in ("CERT", "KEY", "CA")]
    cert, key, ca = (Path(path) if path else None for path in paths)
    try:
        if fleet is not None and fleet.tls_dir and cert is None:
            return PodTls(certificate_files(Path(fleet.tls_dir), Role.OPERATOR))
        return pod_tls(cert, key, ca, Role.OPERATOR)
    except TlsFileError as error:
        raise AdminError(str(error)) from error


def _find(service: lookahead_pb2_grpc.LookaheadServiceStub, tenant: str, revision: str) -> pb.Namespace:
    found = [
        space.namespace
        for space in _status(service).namespaces
        if space.namespace.tenant == tenant and space.namespace.model_revision.startswith(revision)
    ]
    if len(found) == 1:
        return found[0]
    if not found:
        raise AdminError(
            f"tenant {tenant!r} has no shared text; `tandem lookahead stats` lists tenants that do"
        )
    revisions = ", ".join(sorted(space.model_revision[:12] for space in found))
    raise AdminError(f"tenant {tenant!r} has several namespaces; choose with --revision, one of {revisions}")
