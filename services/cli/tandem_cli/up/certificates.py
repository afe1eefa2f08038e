"""Certificates of the pods: a CA, made once, and one certificate per role, made anew each time.

FOLDER/ca.pem, ca.key          the CA; no pod gets its key
FOLDER/decode.pem, decode.key  and so on for each role; tandem_service.tls describes their contents
"""

from __future__ import annotations

import base64
import datetime
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from tandem_service.tls import PemFiles, Role, TlsFileError

from tandem_cli.up.up_plan import certificate_files

_CA_VALIDITY = datetime.timedelta(days=3650)
_VALIDITY = datetime.timedelta(days=90)
#: Redis has no role; its clients verify the host of its URL.
_REDIS, _REDIS_HOST = "redis", "tandem-redis"
#: Tolerance for clocks of other machines that are behind.
_CLOCK_SKEW = datetime.timedelta(minutes=5)


def prepare(folder: Path, validity: datetime.timedelta = _VALIDITY) -> None:
    """Makes the CA in `folder` if there is none, and new certificates of all roles. Keys have mode 0600."""
    _ensure_ca(folder)
    for role in Role:
        issue(folder, role, validity)


def renew(folder: Path, validity: datetime.timedelta = _VALIDITY) -> bool:
    """Calls `prepare` if the certificate of a role is due for renewal or unusable; returns whether it did."""
    try:
        if not any(certificate_files(folder, role).read().is_due() for role in Role):
            return False
    except TlsFileError:
        pass
    prepare(folder, validity)
    return True


def kubernetes_secrets(folder: Path, namespace: str, validity: datetime.timedelta = _VALIDITY) -> str:
    """A List of Secrets for `kubectl apply -f -`, as JSON, with the certificates of all roles and of Redis.

    Like those of cert-manager, Secrets are named tandem-ROLE-tls and hold tls.crt, tls.key and ca.crt.
    """
    prepare(folder, validity)
    _issue(folder, _REDIS, [x509.DNSName(_REDIS_HOST)], validity)
    secrets = []
    for name in (*Role, _REDIS):
        files = certificate_files(folder, name)
        data = {"tls.crt": files.cert, "tls.key": files.key, "ca.crt": folder / "ca.pem"}
        secrets.append(
            {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "kubernetes.io/tls",
                "metadata": {"name": f"tandem-{name}-tls", "namespace": namespace},
                "data": {
                    key: base64.b64encode(path.read_bytes()).decode("ascii") for key, path in data.items()
                },
            }
        )
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": secrets}, indent=2)


def issue(folder: Path, role: Role, validity: datetime.timedelta = _VALIDITY) -> PemFiles:
    """Replaces the certificate and key of one role; running processes load them without a restart."""
    return _issue(
        folder, role, [x509.DNSName(role.dns_name), x509.UniformResourceIdentifier(role.uri)], validity
    )


def _issue(
    folder: Path, name: str, names: Sequence[x509.GeneralName], validity: datetime.timedelta
) -> PemFiles:
    ca = x509.load_pem_x509_certificate((folder / "ca.pem").read_bytes())
    ca_key = serialization.load_pem_private_key((folder / "ca.key").read_bytes(), password=None)
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey):
        raise ValueError(f"{folder / 'ca.key'} is no elliptic-curve key; remove the folder to make a new CA")
    key = ec.generate_private_key(ec.SECP256R1())
    usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    cert = (
        _builder(f"tandem-{name}", validity)
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    files = certificate_files(folder, name)
    _write(files.key, _pem_of_key(key))
    _write(files.cert, cert.public_bytes(serialization.Encoding.PEM))
    return files


def _ensure_ca(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    ca_cert, ca_key = folder / "ca.pem", folder / "ca.key"
    if not (ca_cert.exists() and ca_key.exists()):
        _make_ca(ca_cert, ca_key)


def _make_ca(cert_path: Path, key_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder("Tandem CA", _CA_VALIDITY)
    cert = (
        builder.issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Tandem CA")]))
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_path, _pem_of_key(key))
    _write(cert_path, cert.public_bytes(serialization.Encoding.PEM))


def _builder(common_name: str, validity: datetime.timedelta) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)]))
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + validity)
    )


def _pem_of_key(key: ec.EllipticCurvePrivateKey) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


def _write(path: Path, content: bytes) -> None:
    """Replaces the file atomically. mkstemp creates it with mode 0600."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    Path(temporary).replace(path)
