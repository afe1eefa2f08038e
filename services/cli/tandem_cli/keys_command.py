"""`tandem keys`: makes API keys, and checks a keys file."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from tandem_cli.options import fail

app = typer.Typer(help="Make and check API keys.", no_args_is_help=True)


@app.command("new")
def new_key(
    tenant: Annotated[str, typer.Option(help="Owner of the key.")],
    slo_classes: Annotated[
        list[str] | None,
        typer.Option(
            "--slo-class", help="A class that it may use, the first by default; repeatable. Unset: all."
        ),
    ] = None,
    operator: Annotated[
        bool, typer.Option("--operator", help="Allows the dashboard and metrics, which show all tenants.")
    ] = False,
    file: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Keys file to append to; gateways read it again.")
    ] = None,
) -> None:
    """Make a key and its line in a keys file. The line has only the key's digest; the key is shown once."""
    if not tenant:
        fail("--tenant is empty; name the owner of the key", code=2)
    key = f"tandem-{secrets.token_urlsafe(32)}"
    fields: dict[str, object] = {"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant}
    if slo_classes:
        fields["slo_classes"] = slo_classes
    if operator:
        fields["operator"] = True
    line = json.dumps(fields, ensure_ascii=False)
    if file is None:
        typer.echo(f"{key}\n{line}")
        typer.echo("The first line is the key; append the second to the file of --api-keys-file.", err=True)
        return
    try:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        with os.fdopen(handle, "r+", encoding="utf-8") as out:
            is_open = not out.read().endswith("\n") and out.tell() > 0
            out.write("\n" * is_open + line + "\n")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"--file {file} cannot be changed: {error}")
    typer.echo(key)


@app.command("check")
def check_keys(
    file: Annotated[Path, typer.Argument(help="A keys file.")],
    slo_classes_file: Annotated[
        Path | None, typer.Option(help="The gateway's file of SLO classes, if it has one.")
    ] = None,
) -> None:
    """Print the first fault of a keys file, or the number of its keys."""
    from tandem_gateway.auth import ApiKeys, KeyFileError
    from tandem_service.slo_file import SloFileError, load_slo_classes

    try:
        typer.echo(ApiKeys.load(file, load_slo_classes(slo_classes_file)).described())
    except (KeyFileError, SloFileError) as error:
        fail(str(error))
