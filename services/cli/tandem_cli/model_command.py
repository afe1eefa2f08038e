"""`tandem model`: lists, shows and downloads models."""

from __future__ import annotations

from typing import Annotated

import typer
from tandem_core.errors import ModelLoadError
from tandem_core.model import registry
from tandem_core.model.manifest import ModelManifest

from tandem_cli.options import fail

app = typer.Typer(help="Download, list and show models.", no_args_is_help=True)


@app.command("pull")
def pull_model(
    reference: Annotated[
        str, typer.Argument(help="A name of the catalogue, a Hugging Face id, a folder, a GGUF file.")
    ] = registry.DEFAULT_MODEL,
) -> None:
    """Download a model, or import a local one, and print its folder."""
    from pathlib import Path

    from tandem_cli import models

    try:
        # `pull` compares a local source with the stored model of its name; a stored name needs no check.
        is_local = Path(reference).expanduser().exists()
        typer.echo(models.pull(reference) if is_local else models.obtain(reference))
    except ModelLoadError as error:
        fail(str(error))


@app.command("list")
def list_models() -> None:
    """The models on this machine."""
    from rich.console import Console
    from rich.table import Table

    try:
        manifests = registry.list_models()
    except ModelLoadError as error:
        fail(str(error))
    if not manifests:
        typer.echo(f"no models yet; get one with `tandem model pull {registry.DEFAULT_MODEL}`")
        return
    table = Table(box=None)
    for title in ("name", "architecture", "context", "licence", "revision", "source"):
        table.add_column(title, overflow="fold")
    for manifest in manifests:
        table.add_row(
            manifest.name,
            manifest.architecture,
            str(manifest.max_model_len),
            manifest.license,
            manifest.revision[:12],
            manifest.source,
        )
    Console().print(table)


@app.command("show")
def show_model(
    name: Annotated[
        str, typer.Argument(help="Name of a pulled model, or its folder.")
    ] = registry.DEFAULT_MODEL,
) -> None:
    """Show the manifest and the weight files of a model, as JSON."""
    import dataclasses
    import json

    try:
        folder = registry.resolve(name)
        manifest = ModelManifest.read(folder)
    except ModelLoadError as error:
        fail(str(error))
    weights = {path.name: path.stat().st_size for path in sorted(folder.glob("model-*.safetensors"))}
    shown = {"folder": str(folder), **dataclasses.asdict(manifest), "weights_bytes": weights}
    typer.echo(json.dumps(shown, indent=2, ensure_ascii=False))
