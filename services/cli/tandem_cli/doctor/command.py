"""`tandem doctor`: chooses the checks, and prints the findings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem_cli.options import ApiKeyOption, CaOption, fail, pod_tls

if TYPE_CHECKING:
    from tandem_cli.doctor.finding import Finding
    from tandem_cli.doctor.system import Access, System


def doctor(
    manifests: Annotated[
        Path | None,
        typer.Argument(
            help="A kustomize folder or rendered manifests; - reads them from stdin. "
            "Unset: examine the running system."
        ),
    ] = None,
    gateways: Annotated[
        list[str] | None,
        typer.Option(
            "--gateway",
            "--target",
            metavar="ADDRESS",
            help="A running gateway, which names the pods; repeatable. Unset: the system that runs here.",
        ),
    ] = None,
    lookahead: Annotated[
        list[str] | None,
        typer.Option(metavar="HOST:PORT", help="With --gateway: the lookahead service; repeatable."),
    ] = None,
    redis_url: Annotated[
        str, typer.Option(envvar="TANDEM_REDIS_URL", help="With --gateway: Redis of the system.")
    ] = "",
    redis_ca_file: Annotated[
        Path | None, typer.Option(envvar="TANDEM_REDIS_CA_FILE", help="Verifies Redis (rediss://).")
    ] = None,
    state_file: Annotated[
        Path | None, typer.Option(help="State file of the `tandem up` that is examined.")
    ] = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
    pod_tls_cert: Annotated[
        Path | None,
        typer.Option(envvar="TANDEM_POD_TLS_CERT", help="A gateway's certificate, if pods use TLS."),
    ] = None,
    pod_tls_key: Annotated[Path | None, typer.Option(envvar="TANDEM_POD_TLS_KEY", help="Its key.")] = None,
    pod_tls_ca: Annotated[Path | None, typer.Option(envvar="TANDEM_POD_TLS_CA", help="Its CA.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON array.")] = False,
) -> None:
    """Find faults of an installation: what, where and the remedy. Exit code 1: errors were found."""
    if manifests is not None:
        if gateways or state_file:
            fail("give manifests, or --gateway or --state-file for a running system", code=2)
        findings, examined = _before(manifests)
    else:
        from tandem_service.redis_client import RedisAddress
        from tandem_service.tls import TlsFileError

        from tandem_cli import targets
        from tandem_cli.doctor.system import Access, ask_by_gateways

        try:
            access = Access(pod_tls(pod_tls_cert, pod_tls_key, pod_tls_ca), ca, api_key)
        except TlsFileError as error:
            fail(str(error), code=2)
        address = gateways[0] if gateways else ""
        if gateways and targets.fleet_of(address) is None:
            redis = RedisAddress(redis_url, redis_ca_file) if redis_url else None
            addresses = [targets.gateway(address, "grpc") for address in gateways]
            asking: Coroutine[None, None, System] = ask_by_gateways(addresses, access, redis, lookahead or ())
        else:
            asking = _of_up(state_file, address, access)
        findings, examined = asyncio.run(_after(asking))
    shown = [asdict(one) for one in findings]
    typer.echo(json.dumps(shown, indent=2) if as_json else report(findings, examined))
    if any(one.severity == "error" for one in findings):
        raise typer.Exit(1)


def _before(path: Path) -> tuple[list[Finding], str]:
    from tandem_cli.doctor.examine import MANIFEST_CHECKS, examine_manifests
    from tandem_cli.doctor.manifests import ManifestError, read_manifests

    try:
        objects = read_manifests(path)
        examined = f"{len(MANIFEST_CHECKS)} checks, {len(objects.workloads)} workloads"
        return examine_manifests(objects), examined
    except ManifestError as error:
        fail(str(error), code=2)


def _of_up(state_file: Path | None, address: str, access: Access) -> Coroutine[None, None, System]:
    from dataclasses import replace

    from tandem_service.tls import PodTls, Role, TlsFileError

    from tandem_cli.doctor.system import ask_by_state
    from tandem_cli.targets import fleet_of
    from tandem_cli.up.state_file import read_state
    from tandem_cli.up.up_plan import certificate_files

    try:
        record = read_state(state_file) if state_file else fleet_of(address)
    except (OSError, ValueError) as error:
        fail(f"--state-file {state_file} cannot be read: {error}", code=2)
    if record is None:
        fail("no `tandem up` runs here; give a gateway with --target, or manifests", code=2)
    if record.tls_dir and access.tls is None:
        try:
            access = replace(access, tls=PodTls(certificate_files(Path(record.tls_dir), Role.GATEWAY)))
        except TlsFileError as error:
            fail(str(error), code=2)
    return ask_by_state(record, access)


async def _after(asking: Coroutine[None, None, System]) -> tuple[list[Finding], str]:
    from tandem_cli.doctor.examine import NUM_SYSTEM_CHECKS, examine_system

    system = await asking
    num_processes = len((*system.gateways, *system.pods, *system.lookahead)) + (system.redis is not None)
    examined = f"{NUM_SYSTEM_CHECKS} checks, {num_processes} processes"
    typer.echo(f"{examined}; the requests of some take up to a minute", err=True)
    return await examine_system(system), examined


def report(findings: Sequence[Finding], examined: str) -> str:
    """The findings as text, errors first."""
    if not findings:
        return f"{examined}: no problem"
    ordered = sorted(findings, key=lambda one: one.severity != "error")
    num_errors = sum(one.severity == "error" for one in findings)
    blocks = [f"{one.severity}: {one.where} [{one.check}]\n  {one.what}\n  {one.remedy}" for one in ordered]
    return "\n".join([*blocks, f"{examined}: {num_errors} errors, {len(findings) - num_errors} warnings"])
