"""`tandem doctor`: chooses what is examined, and prints the findings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tandem_cli.options import fail

if TYPE_CHECKING:
    from tandem_cli.doctor.finding import Finding


def doctor(
    manifests: Annotated[
        Path | None,
        typer.Argument(help="A kustomize folder or rendered manifests; - reads them from stdin."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as a JSON array.")] = False,
) -> None:
    """Say what is wrong with an installation, where, and the remedy. Exit code 1: something is."""
    if manifests is None:
        fail("name a folder or a file of manifests", code=2)
    findings = list(_before(manifests))
    typer.echo(json.dumps([asdict(one) for one in findings], indent=2) if as_json else report(findings))
    if any(one.severity == "error" for one in findings):
        raise typer.Exit(1)


def _before(path: Path) -> Sequence[Finding]:
    from tandem_cli.doctor.before import examine_manifests
    from tandem_cli.doctor.manifests import ManifestError, read_manifests

    try:
        return examine_manifests(read_manifests(path))
    except ManifestError as error:
        fail(str(error), code=2)


def report(findings: Sequence[Finding]) -> str:
    """For people: errors first."""
    if not findings:
        return "nothing found"
    ordered = sorted(findings, key=lambda one: one.severity != "error")
    num_errors = sum(one.severity == "error" for one in findings)
    blocks = [f"{one.severity}: {one.where} [{one.check}]\n  {one.what}\n  {one.remedy}" for one in ordered]
    return "\n".join([*blocks, f"{num_errors} errors, {len(findings) - num_errors} warnings"])
