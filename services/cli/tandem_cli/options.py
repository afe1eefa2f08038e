"""Options that several commands share, and what several commands print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NoReturn

import typer

DEFAULT_TARGET = "127.0.0.1:50051"

ModelOption = Annotated[str, typer.Option(help="Name of a pulled model, a Hugging Face id, or a path.")]
TargetOption = Annotated[
    str, typer.Option(help="gRPC address of the gateway: host:port, or https://host:port with TLS.")
]
CaOption = Annotated[
    Path | None,
    typer.Option(
        "--ca",
        exists=True,
        dir_okay=False,
        help="PEM file of the authorities of the gateway's certificate; default: the system's.",
    ),
]
ApiKeyOption = Annotated[
    str | None, typer.Option(envvar="TANDEM_API_KEY", help="Key, if the gateway requires one.")
]
TemperatureOption = Annotated[float, typer.Option(min=0.0, max=2.0, help="0 picks the likeliest token.")]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens per answer.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Equal seeds give equal texts.")]


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e6:.2g} MB"


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
