"""What `tandem lookahead` asks of the lookahead service, and the file in which a namespace travels.

    magic "TLKX" | version u32 | parts, each: kind u8, size u32, bytes      (little-endian)

The first part is the namespace, then come the shared text in pieces and the learnt tables. The file holds
what pods may have and nothing else: text that `promotion_requests` requests have generated.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import grpc
from google.protobuf.message import DecodeError
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from tandem_service.channels import CHANNEL_OPTIONS

_MAGIC = b"TLKX"
_VERSION = 1
_HEAD = struct.Struct("<4sI")
_PART = struct.Struct("<BI")
_NAMESPACE, _TEXT, _TABLES = 1, 2, 3
#: Nothing that the service sends in one piece is larger.
_MAX_PART_BYTES = 4 << 20
_ASK_S, _CARRY_S = 10.0, 600.0


class AdminError(Exception):
    """One sentence that says what is wrong and what helps."""


def status(target: str) -> pb.GetLookaheadStatusResponse:
    """What the replica at the target holds. Raises AdminError."""
    with _service(target) as service:
        return _status(service)


def export_namespace(target: str, tenant: str, revision: str, out: IO[bytes]) -> int:
    """Writes the tenant's one namespace whose model revision begins so; how many bytes of text. Raises
    AdminError.
    """
    num_bytes = 0
    with _service(target) as service:
        namespace = _find(service, tenant, revision)
        request = pb.ExportNamespaceRequest(namespace=namespace)
        out.write(_HEAD.pack(_MAGIC, _VERSION))
        _write(out, _NAMESPACE, namespace.SerializeToString())
        for part in service.ExportNamespace(request, timeout=_CARRY_S):
            if part.WhichOneof("message") == "tables":
                _write(out, _TABLES, part.tables.SerializeToString())
            else:
                _write(out, _TEXT, part.payload)
                num_bytes += len(part.payload)
    return num_bytes


def import_namespace(target: str, source: IO[bytes]) -> int:
    """Adds an export; how many tokens it has. Raises AdminError, with nothing added, for a damaged one."""
    requests = list(_requests(source))
    with _service(target) as service:
        return int(service.ImportNamespace(iter(requests), timeout=_CARRY_S).num_tokens)


def purge(target: str, tenant: str) -> int:
    """Removes what is held of a tenant; of how many namespaces. Raises AdminError."""
    with _service(target) as service:
        request = pb.PurgeTenantRequest(tenant=tenant)
        return int(service.PurgeTenant(request, timeout=_CARRY_S).num_namespaces)


@contextmanager
def _service(target: str) -> Iterator[lookahead_pb2_grpc.LookaheadServiceStub]:
    with grpc.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        try:
            yield lookahead_pb2_grpc.LookaheadServiceStub(channel)  # type: ignore[no-untyped-call]
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
            if code is grpc.StatusCode.UNAVAILABLE and "Redis" not in details:
                raise AdminError(
                    f"no lookahead service answers at {target}; name it with --target host:port"
                ) from error
            raise AdminError(details) from error


def _status(service: lookahead_pb2_grpc.LookaheadServiceStub) -> pb.GetLookaheadStatusResponse:
    answer: pb.GetLookaheadStatusResponse = service.GetLookaheadStatus(
        pb.GetLookaheadStatusRequest(), timeout=_ASK_S
    )
    return answer


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
            f"nothing is held of tenant {tenant!r}; `tandem lookahead stats` lists who has something"
        )
    revisions = ", ".join(sorted(space.model_revision[:12] for space in found))
    raise AdminError(f"tenant {tenant!r} has several namespaces; choose with --revision, one of {revisions}")


def _write(out: IO[bytes], kind: int, payload: bytes) -> None:
    out.write(_PART.pack(kind, len(payload)) + payload)


def _requests(source: IO[bytes]) -> Iterator[pb.ImportNamespaceRequest]:
    if source.read(_HEAD.size) != _HEAD.pack(_MAGIC, _VERSION):
        raise AdminError("the file is no export of this version; make one with `tandem lookahead export`")
    while head := source.read(_PART.size):
        kind, size = _PART.unpack(head) if len(head) == _PART.size else (0, 0)
        payload = source.read(size) if size <= _MAX_PART_BYTES else b""
        try:
            if len(payload) != size:
                raise DecodeError
            if kind == _NAMESPACE:
                yield pb.ImportNamespaceRequest(namespace=pb.Namespace.FromString(payload))
            elif kind == _TEXT:
                yield pb.ImportNamespaceRequest(payload=payload)
            elif kind == _TABLES:
                yield pb.ImportNamespaceRequest(tables=pb.LearntTables.FromString(payload))
            else:
                raise DecodeError
        except DecodeError as error:
            raise AdminError("the file is damaged or cut short; export it again") from error
