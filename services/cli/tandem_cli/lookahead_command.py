"""`tandem lookahead`: shows, exports, imports and removes the text that the lookahead service holds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated

import typer

from tandem_cli.options import fail, table

app = typer.Typer(help="Show, export, import or remove shared text.", no_args_is_help=True)

ServiceOption = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="ADDRESS",
        help="host:port of the service, or of a gateway of this machine; default: the system that runs here.",
    ),
]


@app.command()
def stats(target: ServiceOption = "") -> None:
    """Show the namespaces of this replica."""
    from tandem_cli import lookahead_admin

    with _failures():
        status = lookahead_admin.status(target)
    answers = "answers" if status.redis_connected else "does not answer"
    typer.echo(
        f"{status.pod_id}: Redis {answers}; {status.streams_open} streams of pods; "
        f"{status.spans_received_total:,} spans received, {status.spans_dropped_total:,} dropped"
    )
    filled = [space for space in status.namespaces if space.num_tokens]
    if not filled:
        typer.echo("no shared text yet")
        return
    titles = ("tenant", "revision", ">sequences", ">tokens", ">shared", ">MiB", ">pods", ">snapshot", ">lag")
    rows = [
        (
            space.namespace.tenant,
            space.namespace.model_revision[:12],
            f"{space.num_runs:,}",
            f"{space.num_tokens:,}",
            f"{space.num_shared_tokens:,}",
            f"{space.num_bytes / 2**20:.1f}",
            str(space.num_followers),
            f"{space.compaction_age_s:.0f} s ago" if space.HasField("compaction_age_s") else "not yet",
            f"{space.lag_s:.1f} s" if space.HasField("lag_s") else "?",
        )
        for space in filled
    ]
    typer.echo(table(titles, *rows))
    if num_empty := len(status.namespaces) - len(filled):
        typer.echo(f"and {num_empty} without text")


@app.command("export")
def export_namespace(
    file: Annotated[str, typer.Argument(help="File to write; - writes to stdout.")],
    tenant: Annotated[str, typer.Option(help="Tenant, as the gateway knows it.")] = "default",
    revision: Annotated[
        str, typer.Option(help="Start of the model's revision, if the tenant has several namespaces.")
    ] = "",
    target: ServiceOption = "",
) -> None:
    """Write a namespace's shared text to a file."""
    from tandem_cli import lookahead_admin

    with _failures(), _opened(file, "wb") as out:
        num_bytes = lookahead_admin.export_namespace(target, tenant, revision, out)
    typer.echo(f"exported {num_bytes:,} bytes", err=True)


@app.command("import")
def import_namespace(
    file: Annotated[str, typer.Argument(help="An export; - reads from stdin.")],
    target: ServiceOption = "",
) -> None:
    """Add an export to a service; every replica and pod gets it."""
    from tandem_cli import lookahead_admin

    with _failures(), _opened(file, "rb") as source:
        num_tokens = lookahead_admin.import_namespace(target, source)
    typer.echo(f"imported {num_tokens:,} tokens", err=True)


@app.command()
def purge(
    tenant: Annotated[str, typer.Argument(help="Tenant whose text is removed.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    target: ServiceOption = "",
) -> None:
    """Remove a tenant's text permanently: here, in Redis, and in every pod."""
    from tandem_cli import lookahead_admin

    if not yes:
        typer.confirm(f"Remove all text of tenant {tenant}? This cannot be undone.", abort=True)
    with _failures():
        count = lookahead_admin.purge(target, tenant)
    if count == 0:
        fail(f"tenant {tenant!r} has no shared text; `tandem lookahead stats` lists tenants that do")
    typer.echo(f"removed {count} namespace{'s' if count > 1 else ''} of tenant {tenant}")


@contextmanager
def _failures() -> Iterator[None]:
    from tandem_cli.lookahead_admin import AdminError

    try:
        yield
    except AdminError as error:
        fail(str(error))


@contextmanager
def _opened(file: str, mode: str) -> Iterator[IO[bytes]]:
    if file == "-":
        yield sys.stdout.buffer if mode == "wb" else sys.stdin.buffer
        return
    try:
        with Path(file).open(mode) as opened:
            yield opened
    except OSError as error:
        fail(f"{file}: {error.strerror}")
