# ruff: noqa: N802  (the methods are named by the .proto)
"""Mutual TLS between pods: who gets in, what each role may call, and certificates that change.

A real server and real channels on loopback, with certificates of the CA that `tandem up --tls` makes.
"""

import asyncio
import datetime
import re
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType

import grpc
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tandem_cli.up.up_plan import certificate_files
from tandem_decode.settings import DecodeSettings
from tandem_proto.v1 import decode_pb2, decode_pb2_grpc
from tandem_service import tls as tls_module
from tandem_service.channels import open_channel
from tandem_service.server import PodServer
from tandem_service.settings import PodSettings, load
from tandem_service.tls import PemFiles, PodTls, ReloadingPems, Role, TlsFileError, belongs_to_peer, peer_host

SERVICE = "tandem.v1.DecodeService"
CALLERS = {"Decode": (Role.GATEWAY,)}


class InstantDecode(decode_pb2_grpc.DecodeServiceServicer):
    """Answers each call at once."""

    async def Decode(self, request, context):
        yield decode_pb2.DecodeResponse()

    async def GetDecodeStatus(self, request, context):
        return decode_pb2.GetDecodeStatusResponse()


@pytest.fixture
def certificates() -> ModuleType:
    from tandem_cli.up import certificates

    return certificates


@pytest.fixture
def folder(tmp_path: Path, certificates: ModuleType) -> Path:
    certificates.prepare(tmp_path / "tls")
    return tmp_path / "tls"


def flags(folder: Path, role: Role) -> dict[str, object]:
    files = certificate_files(folder, role)
    return {"pod_tls_cert": files.cert, "pod_tls_key": files.key, "pod_tls_ca": files.ca}


@asynccontextmanager
async def serving(folder: Path, role: Role = Role.DECODE) -> AsyncIterator[PodServer]:
    settings = PodSettings(drain_s=0.0, **flags(folder, role))
    server = PodServer(settings, role="decode", service_names=[SERVICE], status_codes={}, callers=CALLERS)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(InstantDecode(), server.grpc_server)
    await server.start()
    server.set_serving(True)
    try:
        yield server
    finally:
        await server.stop()


async def outcome(server: PodServer, tls: PodTls | None, method: str = "Decode") -> tuple[str, str]:
    """Status and details of a call of a new channel."""
    channel = open_channel(f"127.0.0.1:{server.port}", tls, Role.DECODE)
    async with channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        try:
            if method == "Decode":
                async for _ in stub.Decode(decode_pb2.DecodeRequest(), timeout=30):
                    pass
            elif method == "Check":
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            else:
                await stub.GetDecodeStatus(decode_pb2.GetDecodeStatusRequest(), timeout=30)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details() or ""
    return "OK", ""


def trusting_both(tmp_path: Path, files: PemFiles, folder: Path) -> PemFiles:
    """`files` of one CA, which trust this CA and that of `folder`, whose servers refuse them."""
    assert files.ca is not None
    (tmp_path / "both.pem").write_bytes(files.ca.read_bytes() + (folder / "ca.pem").read_bytes())
    return PemFiles(files.cert, files.key, tmp_path / "both.pem")


def credentials(folder: Path, role: Role) -> PodTls:
    return PodTls(certificate_files(folder, role))


@pytest.mark.parametrize("role", Role)
async def test_only_its_roles_may_call_a_method(folder: Path, role: Role) -> None:
    async with serving(folder) as server:
        tls = credentials(folder, role)
        code, details = await outcome(server, tls)
        if role is Role.GATEWAY:
            assert code == "OK"
        else:
            assert code == "PERMISSION_DENIED"
            assert details == f"Decode may be called by gateway; the caller's certificate states {role.value}"
        code, details = await outcome(server, tls, "GetDecodeStatus")
        assert code == "PERMISSION_DENIED", "a method without a list is closed"
        assert "called by no role" in details
        assert await outcome(server, tls, "Check") == ("OK", "")


async def test_a_client_without_a_certificate_of_the_ca_is_refused(
    folder: Path, certificates: ModuleType, tmp_path: Path
) -> None:
    certificates.prepare(tmp_path / "other")
    known_ca = PodTls(trusting_both(tmp_path, certificate_files(tmp_path / "other", Role.GATEWAY), folder))
    async with serving(folder) as server:
        for tls in (None, known_ca):
            assert (await outcome(server, tls, "Check"))[0] == "UNAVAILABLE"


async def test_a_client_connects_only_to_a_server_of_the_role(
    folder: Path, certificates: ModuleType, tmp_path: Path
) -> None:
    certificates.prepare(tmp_path / "other")
    tls = credentials(folder, Role.GATEWAY)
    async with serving(folder, Role.PREFILL) as of_other_role, serving(tmp_path / "other") as of_other_ca:
        assert (await outcome(of_other_role, tls))[0] == "UNAVAILABLE"
        assert (await outcome(of_other_ca, tls))[0] == "UNAVAILABLE"


async def test_a_server_takes_a_new_certificate_and_ca_without_a_restart(
    folder: Path, tmp_path: Path, certificates: ModuleType
) -> None:
    async with serving(folder) as server:
        before = credentials(folder, Role.GATEWAY)
        long_lived = open_channel(f"127.0.0.1:{server.port}", before, Role.DECODE)
        health = health_pb2_grpc.HealthStub(long_lived)
        await health.Check(health_pb2.HealthCheckRequest())
        shutil.copytree(folder, tmp_path / "old")
        certificates.prepare(tmp_path / "next")
        shutil.copytree(tmp_path / "next", folder, dirs_exist_ok=True)
        # A client that reads its files for each channel follows; the old CA is no longer trusted.
        assert await outcome(server, before) == ("OK", "")
        old = certificate_files(tmp_path / "old", Role.GATEWAY)
        of_old_ca = PodTls(trusting_both(tmp_path, old, folder))
        assert (await outcome(server, of_old_ca))[0] == "UNAVAILABLE"
        # An open connection continues.
        await health.Check(health_pb2.HealthCheckRequest())
        await long_lived.close()


async def test_mismatched_files_keep_the_old_certificate(folder: Path, certificates: ModuleType) -> None:
    async with serving(folder) as server:
        tls = credentials(folder, Role.GATEWAY)
        old_key = (folder / "decode.key").read_bytes()
        certificates.issue(folder, Role.DECODE)
        new_key = (folder / "decode.key").read_bytes()
        (folder / "decode.key").write_bytes(old_key)
        assert await outcome(server, tls) == ("OK", "")
        (folder / "decode.key").write_bytes(new_key)
        assert await outcome(server, tls) == ("OK", "")


async def test_an_expired_certificate_is_refused(folder: Path, certificates: ModuleType) -> None:
    async with serving(folder) as server:
        certificates.issue(folder, Role.GATEWAY, datetime.timedelta(seconds=2))
        tls = credentials(folder, Role.GATEWAY)
        await asyncio.sleep(2.1)
        assert (await outcome(server, tls))[0] == "UNAVAILABLE"


async def test_a_server_keeps_its_certificate_if_peers_would_refuse_the_new_one(
    folder: Path, certificates: ModuleType
) -> None:
    async with serving(folder) as server:
        tls = credentials(folder, Role.GATEWAY)
        certificates.issue(folder, Role.DECODE, datetime.timedelta(seconds=-1))
        assert await outcome(server, tls) == ("OK", "")


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("expired", r"decode\.pem expired at 20.* \(this machine's clock says 20.*\); issue a new one"),
        ("early", r"decode\.pem is not valid before 20.*; set the clock, or issue a new one"),
        ("another role", r"not one of the role decode: .* lack DNS:tandem-decode and URI:spiffe://tandem/de"),
        (
            "another CA",
            r"that trust the CA .*ca\.pem would refuse .*decode\.pem \(unable to get local i",
        ),
        ("expired CA", r"would refuse .* \(certificate has expired\); give a certificate"),
    ],
)
def test_a_certificate_that_peers_would_refuse_ends_the_start_with_one_sentence(
    folder: Path,
    certificates: ModuleType,
    fault: str,
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    hour = datetime.timedelta(hours=1)
    if fault == "expired":
        certificates.issue(folder, Role.DECODE, datetime.timedelta(seconds=-1))
    elif fault == "early":
        monkeypatch.setattr(certificates, "_CLOCK_SKEW", -hour)
        certificates.issue(folder, Role.DECODE)
    elif fault == "another role":
        for suffix in ("pem", "key"):
            shutil.copy(folder / f"prefill.{suffix}", folder / f"decode.{suffix}")
    elif fault == "another CA":
        certificates.prepare(tmp_path / "other")
        shutil.copy(tmp_path / "other" / "ca.pem", folder / "ca.pem")
    else:
        monkeypatch.setattr(certificates, "_CA_VALIDITY", datetime.timedelta(seconds=-1))
        (folder / "ca.pem").unlink()
        certificates.prepare(folder)
    arguments = [f"--{name.replace('_', '-')}={path}" for name, path in flags(folder, Role.DECODE).items()]
    with pytest.raises(SystemExit):
        load(DecodeSettings, ["--model=m", *arguments])
    error = capsys.readouterr().err
    assert re.search(words, error)
    assert error.count("\n") == 1


def test_a_certificate_for_servers_alone_is_refused_at_the_start(
    folder: Path, certificates: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        certificates.ExtendedKeyUsageOID, "CLIENT_AUTH", certificates.ExtendedKeyUsageOID.CODE_SIGNING
    )
    files = certificates.issue(folder, Role.DECODE)
    with pytest.raises(TlsFileError, match=r"unsuitable certificate purpose.* for servers and clients"):
        PodTls(files)


def test_certificates_are_renewed_when_a_third_of_their_time_is_left(
    folder: Path, certificates: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = certificate_files(folder, Role.DECODE)
    first = files.read()
    assert not certificates.renew(folder)
    assert files.read() == first
    # The operator's is not due; this one is, after 5 of 7 minutes.
    certificates.issue(folder, Role.DECODE, datetime.timedelta(minutes=2))
    assert certificates.renew(folder)
    assert not files.read().is_due()
    certificates.issue(folder, Role.DECODE, datetime.timedelta(seconds=-1))
    assert certificates.renew(folder)
    assert files.read().not_after > datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=80)


def test_a_certificate_due_for_renewal_is_logged_once_a_day(
    folder: Path, certificates: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pems = ReloadingPems(certificates.issue(folder, Role.DECODE, datetime.timedelta(minutes=2)))
    now = 1000.0
    with structlog.testing.capture_logs() as lines:
        for now in (1000.0, 1001.0, 87_500.0, 88_000.0):
            monkeypatch.setattr(tls_module.time, "monotonic", lambda now=now: now)
            pems.current()
    assert [line["log_level"] for line in lines] == ["warning", "warning"]
    assert "less than a third" in lines[0]["event"]


def test_only_the_owner_can_read_keys_and_the_ca_is_made_once(folder: Path, certificates: ModuleType) -> None:
    ca = (folder / "ca.pem").read_bytes()
    certificates.prepare(folder)
    assert (folder / "ca.pem").read_bytes() == ca
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.key")} == {0o600}


@pytest.mark.parametrize("damage", ["missing", "garbage", "another key"])
def test_unusable_files_are_refused_in_one_sentence(folder: Path, damage: str) -> None:
    files = certificate_files(folder, Role.DECODE)
    if damage == "missing":
        files.key.unlink()
    elif damage == "garbage":
        files.cert.write_bytes(b"\x00 no PEM")
    else:
        shutil.copy(folder / "prefill.key", files.key)
    with pytest.raises(TlsFileError, match="cannot be used together"):
        PodTls(files)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 is not loopback and there is no TLS; give --pod-tls-cert"),
        (["--pod-tls-cert", "a.pem"], "go together; give all three or none"),
        (["--pod-tls-cert", "a", "--pod-tls-key", "b", "--pod-tls-ca", "c"], "cannot be used together"),
    ],
)
def test_a_pod_without_authentication_off_loopback_does_not_start(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as info:
        load(PodSettings, arguments)
    assert info.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("error: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "127.3.2.1", "::1", "localhost"])
def test_loopback_needs_no_tls(host: str) -> None:
    assert load(PodSettings, ["--host", host]).pod_tls() is None


def test_off_loopback_a_pod_starts_with_tls_or_insecure(folder: Path) -> None:
    assert load(PodSettings, ["--host", "0.0.0.0", "--insecure"]).pod_tls() is None
    files = certificate_files(folder, Role.DECODE)
    arguments = ["--pod-tls-cert", str(files.cert), "--pod-tls-key", str(files.key)]
    settings = load(PodSettings, ["--host", "0.0.0.0", *arguments, "--pod-tls-ca", str(files.ca)])
    assert settings.pod_tls() is not None


@pytest.mark.parametrize(
    ("host", "peer", "belongs"),
    [
        ("10.0.0.7", "ipv4:10.0.0.7:4711", True),
        ("10.0.0.8", "ipv4:10.0.0.7:4711", False),
        ("[fd00::7]", "ipv6:%5Bfd00:0::7%5D:4711", True),
        ("127.0.0.1", "ipv4:127.0.0.1:4711", True),
        ("localhost", "ipv6:[::1]:4711", True),
        ("0.0.0.0", "ipv4:127.0.0.1:4711", True),
        ("0.0.0.0", "ipv4:10.0.0.7:4711", False),
        ("127.0.0.1", "ipv4:10.0.0.7:4711", False),
        ("10.0.0.7", "ipv4:127.0.0.1:4711", False),
        ("169.254.169.254", "ipv4:127.0.0.1:4711", False),
        ("kv.example", "ipv4:10.0.0.7:4711", True),
        ("other.example", "ipv4:10.0.0.7:4711", False),
        ("", "ipv4:10.0.0.7:4711", False),
        ("", "unix:", False),
    ],
)
def test_a_ticket_names_its_own_host(host: str, peer: str, belongs: bool) -> None:
    certificate = {"x509_subject_alternative_name": [b"kv.example", b"spiffe://tandem/decode"]}
    assert belongs_to_peer(host, peer, certificate) is belongs


def test_the_host_of_a_peer_is_read_from_its_address() -> None:
    assert [peer_host(p) for p in ("ipv4:1.2.3.4:5", "ipv6:%5B::1%5D:5", "unix:/x")] == ["1.2.3.4", "::1", ""]
