"""Mutual TLS between pods: certificates from PEM files, and the roles that they state.

    certificate   DNS name tandem-ROLE       the name under which clients verify a server of that role
                  URI spiffe://tandem/ROLE   the role that servers read of a client

Roles are gateway, decode, prefill, lookahead and operator (a person's commands, the supervisor). A client
compares a server's role, not its address, which changes with each pod.

Files are read again when they change: by servers at the next handshake, by clients when they open a channel.
A channel keeps the certificate with which it was opened, also for its reconnects: gRPC for Python has no
reloading credentials for clients. A gateway opens new channels after a change. Connections that are open are
not affected by a change.
"""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import ssl
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import grpc
import structlog

ROLE_URI = "spiffe://tandem/"
#: Interval of warnings about a certificate that is due for renewal.
_WARNING_INTERVAL_S = 86_400.0
_SAN = "x509_subject_alternative_name"


class TlsFileError(ValueError):
    """A PEM file cannot be used, or peers would refuse it; the message names the files and the remedy."""


class Role(StrEnum):
    GATEWAY = "gateway"
    DECODE = "decode"
    PREFILL = "prefill"
    LOOKAHEAD = "lookahead"
    OPERATOR = "operator"

    @property
    def dns_name(self) -> str:
        return f"tandem-{self.value}"

    @property
    def uri(self) -> str:
        return f"{ROLE_URI}{self.value}"


@dataclass(frozen=True)
class Pems:
    """Contents of the files."""

    cert: bytes
    key: bytes
    ca: bytes | None
    not_before: datetime.datetime
    not_after: datetime.datetime

    def is_due(self) -> bool:
        return is_due(self.not_before, self.not_after)


def is_due(not_before: datetime.datetime, not_after: datetime.datetime) -> bool:
    """Whether a certificate is due for renewal: less than a third of its time is left."""
    left = not_after - datetime.datetime.now(datetime.UTC)
    return left < (not_after - not_before) / 3


@dataclass(frozen=True)
class PemFiles:
    """A process's certificate, its key, the certificates of the CAs whose peers it accepts (None: clients
    need no certificate), and the role that its certificate must state (None: any)."""

    cert: Path
    key: Path
    ca: Path | None
    role: Role | None = None

    def read(self) -> Pems:
        """Raises TlsFileError for a file that is missing or damaged, a key of another certificate, and a
        certificate that peers would refuse: out of its time, of another CA, of another role."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            # The empty password: an encrypted key is an error, not a question on the terminal.
            context.load_cert_chain(self.cert, self.key, password="")
            if self.ca is not None:
                context.load_verify_locations(self.ca)
            ca = None if self.ca is None else self.ca.read_bytes()
            cert, key = self.cert.read_bytes(), self.key.read_bytes()
        except OSError as error:  # ssl.SSLError too
            and_ca, its_ca = ("", "") if self.ca is None else (f" and the CA {self.ca}", ", and its CA")
            raise TlsFileError(
                f"the certificate {self.cert}, its key {self.key}{and_ca} cannot be used "
                f"together ({error.strerror or error}); give PEM files of one "
                f"certificate and its unencrypted key{its_ca}"
            ) from error
        not_before, not_after = self._check_statements(cert)
        if self.ca is not None:
            self._check_trust(self.ca)
        return Pems(cert, key, ca, not_before, not_after)

    def _check_statements(self, cert: bytes) -> tuple[datetime.datetime, datetime.datetime]:
        """Checks the certificate's time and role; returns when its time begins and ends."""
        # Imported here since it takes 40 ms, and processes without TLS do not need it.
        from cryptography import x509

        try:
            leaf = x509.load_pem_x509_certificate(cert)
            first, last = leaf.not_valid_before_utc, leaf.not_valid_after_utc
            names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            names = x509.SubjectAlternativeName([])
        except ValueError as error:
            raise TlsFileError(
                f"the certificate {self.cert} cannot be read ({error}); issue it anew"
            ) from error
        now = datetime.datetime.now(datetime.UTC)
        clock = f"this machine's clock says {now:%Y-%m-%d %H:%M} UTC"
        if now > last:
            raise TlsFileError(
                f"the certificate {self.cert} expired at {last:%Y-%m-%d %H:%M} UTC ({clock}); issue a new one"
            )
        if now < first:
            raise TlsFileError(
                f"the certificate {self.cert} is not valid before {first:%Y-%m-%d %H:%M} UTC ({clock}); set "
                "the clock, or issue a new one"
            )
        role = self.role
        if role is not None:
            uris = names.get_values_for_type(x509.UniformResourceIdentifier)
            missing = [
                name
                for name, stated in (
                    (f"DNS:{role.dns_name}", names.get_values_for_type(x509.DNSName)),
                    (f"URI:{role.uri}", uris),
                )
                if name.partition(":")[2] not in stated
            ]
            if missing:
                others = ", ".join(uris) or "no role"
                raise TlsFileError(
                    f"the certificate {self.cert} is not one of the role {role.value}: its subject "
                    f"alternative names lack {' and '.join(missing)} (it states {others}); give the "
                    "certificate of this role"
                )
        return first, last

    def _check_trust(self, ca: Path) -> None:
        """Makes a handshake with the certificate on both sides, which fails unless the CA is valid and signed
        it for servers and clients."""
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        for context in (server, client):
            context.load_cert_chain(self.cert, self.key, password="")
            context.load_verify_locations(ca)
            context.verify_mode = ssl.CERT_REQUIRED
        to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
        ends = (
            client.wrap_bio(to_client, to_server),
            server.wrap_bio(to_server, to_client, server_side=True),
        )
        try:
            for _round_trip in range(2):
                for end in ends:
                    with contextlib.suppress(ssl.SSLWantReadError):
                        end.do_handshake()
        except ssl.SSLError as error:
            reason = error.verify_message if isinstance(error, ssl.SSLCertVerificationError) else error.reason
            raise TlsFileError(
                f"pods that trust the CA {ca} would refuse the certificate {self.cert} ({reason}); give a "
                "certificate that this CA signed for servers and clients, or the CA that signed it"
            ) from error

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Changes when a file does. Raises OSError."""
        return tuple((s.st_ino, s.st_mtime_ns, s.st_size) for s in (p.stat() for p in self._paths()))

    def _paths(self) -> Iterable[Path]:
        return [path for path in (self.cert, self.key, self.ca) if path is not None]


class ReloadingPems:
    """The newest readable contents of the files. Thread-safe: gRPC asks from threads of its own.

    Files that change one after the other do not fit together for a moment; until they do, the last contents
    that did are used. Raises TlsFileError when the first ones do not.
    """

    def __init__(self, files: PemFiles) -> None:
        self._files = files
        self._log = structlog.get_logger("tandem.tls")
        self._lock = threading.Lock()
        self._pems = files.read()
        self._stamp = files.stamp()
        self._warned_at: float | None = None

    def current(self) -> Pems:
        with self._lock, contextlib.suppress(OSError):
            stamp = self._files.stamp()
            if stamp != self._stamp:
                try:
                    self._pems = self._files.read()
                    self._stamp = stamp
                    self._log.info("certificates read again", cert=str(self._files.cert))
                except TlsFileError as error:
                    self._log.warning("keeping the old certificates", reason=str(error))
            self._warn_if_due()
        return self._pems

    def _warn_if_due(self) -> None:
        now = time.monotonic()
        if self._pems.is_due() and (self._warned_at is None or now - self._warned_at > _WARNING_INTERVAL_S):
            self._warned_at = now
            self._log.warning(
                "the certificate is due for renewal: less than a third of its time is left",
                cert=str(self._files.cert),
                expires=f"{self._pems.not_after:%Y-%m-%d %H:%M} UTC",
            )


class ServerTls:
    """Credentials of a server. They follow the files: a handshake takes what is in them."""

    def __init__(self, files: PemFiles) -> None:
        self._files = files
        self._pems = ReloadingPems(files)

    def http_context(self) -> ssl.SSLContext:
        """The context of an HTTP/1.1 server."""
        shown = self._pems.current()
        newest_context = self._context()

        def choose(connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
            nonlocal shown, newest_context
            newest = self._pems.current()
            if newest is not shown:
                with contextlib.suppress(OSError):  # they have changed once more; the next handshake sees it
                    newest_context, shown = self._context(), newest
            connection.context = newest_context

        first = self._context()
        first.sni_callback = choose
        return first

    def _context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._files.cert, self._files.key, password="")
        context.set_alpn_protocols(["http/1.1"])
        return context

    def server_credentials(self) -> grpc.ServerCredentials:
        """Credentials of a gRPC server; it requires a client certificate if the files have a CA."""
        shown = self._pems.current()

        def configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
            return grpc.ssl_server_certificate_configuration([(pems.key, pems.cert)], pems.ca)

        # None keeps the last one; the stubs do not know.
        def fetch() -> Any:
            nonlocal shown
            newest = self._pems.current()
            if newest is shown:
                return None
            shown = newest
            return configuration(newest)

        return grpc.dynamic_ssl_server_credentials(
            configuration(shown), fetch, require_client_authentication=shown.ca is not None
        )


class PodTls(ServerTls):
    """This process's credentials for calls to other pods."""

    def pems(self) -> Pems:
        """The current contents of the files; the same object until they change."""
        return self._pems.current()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Credentials of one channel, from the current files."""
        pems = self.pems()
        return grpc.ssl_channel_credentials(pems.ca, pems.key, pems.cert)

    def client_context(self) -> ssl.SSLContext:
        """The context of a connection without gRPC, which reads a pod's certificate."""
        context = ssl.create_default_context(cafile=None if self._files.ca is None else str(self._files.ca))
        context.load_cert_chain(self._files.cert, self._files.key, password="")
        context.set_alpn_protocols(["h2"])
        return context


def roles_of(auth_context: Mapping[str, Iterable[bytes]]) -> frozenset[str]:
    """The roles in the peer's certificate; none without a certificate."""
    names = (name.decode(errors="replace") for name in auth_context.get(_SAN, ()))
    return frozenset(name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI))


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server bound to `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def peer_host(peer: str) -> str:
    """ "ipv4:10.0.0.7:21200" -> "10.0.0.7"; "ipv6:%5B::1%5D:21200" -> "::1"; "" for anything else."""
    kind, _, address = peer.replace("%5B", "[").replace("%5D", "]").partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""


def belongs_to_peer(host: str, peer: str, auth_context: Mapping[str, Iterable[bytes]]) -> bool:
    """Whether `host` is the peer of a call: its address, both loopback, or a name in its certificate."""
    host = host.strip("[]")
    address = peer_host(peer)
    if not address:
        return False
    try:
        if ipaddress.ip_address(host) == ipaddress.ip_address(address):
            return True
    except ValueError:
        pass  # a name
    if is_loopback(address) and (is_loopback(host) or host in ("0.0.0.0", "::")):
        return True
    return host.encode() in auth_context.get(_SAN, ())
