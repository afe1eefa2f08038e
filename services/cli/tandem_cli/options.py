"""Options and output that several commands share."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, get_origin, get_type_hints

import typer
from tandem_core.speculation import SpeculationMode

if TYPE_CHECKING:
    from tandem_service.tls import PodTls, Role

ModelOption = Annotated[str, typer.Option(help="Name of a pulled model, a Hugging Face id, or a path.")]
DtypeOption = Annotated[
    Literal["auto", "float32", "bfloat16"], typer.Option(help="Element type of weights and KV.")
]
QuantizationOption = Annotated[
    Literal["auto", "none", "w8a8", "w4a8"],
    typer.Option(
        help="Bits of weights and activations (CPU). auto: those of the weights, if --dtype is auto."
    ),
]
TargetOption = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        help="The gateway's host:port or URL (https:// with TLS); default: the system that runs here.",
    ),
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
TemperatureOption = Annotated[
    float | None,
    typer.Option(min=0.0, max=2.0, help="0 picks the likeliest token; unset: as the model recommends."),
]
ChatTemplateOption = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="File of a Jinja template instead of the model's own."),
]
MaxTokensOption = Annotated[int, typer.Option(min=1, help="Most tokens per answer.")]
SeedOption = Annotated[int | None, typer.Option(min=0, help="Equal seeds give equal texts.")]


@dataclass(frozen=True)
class ChatOptions:
    """Options of `tandem chat`."""

    target: TargetOption = ""
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None
    temperature: TemperatureOption = None
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per answer; unset: until the context ends.")
    ] = None
    seed: SeedOption = None
    slo_class: Annotated[str, typer.Option(help="SLO class; default: the gateway's.")] = ""
    speculation: Annotated[
        SpeculationMode | None, typer.Option(help="Drafts for this chat; unset: the mode of the pods.")
    ] = None
    api_key: ApiKeyOption = None
    ca: CaOption = None


def megabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB" if num_bytes >= 1e6 else f"{num_bytes / 1e6:.2g} MB"


def table(titles: Sequence[str], *rows: Sequence[str]) -> str:
    """Rows in columns; titles that begin with > are those of numeric columns."""
    lines = [[title.removeprefix(">") for title in titles], *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    forms = ["<>"[title.startswith(">")] + str(width) for title, width in zip(titles, widths, strict=True)]
    return "\n".join("  ".join(map(format, line, forms)).rstrip() for line in lines)


def fail(message: str, code: int = 1) -> NoReturn:
    """Ends the command with one sentence on stderr."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)


def pod_tls(cert: Path | None, key: Path | None, ca: Path | None, role: Role | None = None) -> PodTls | None:
    """Credentials for pods; None if none are given. Raises TlsFileError."""
    from tandem_service.tls import PemFiles, PodTls, TlsFileError

    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise TlsFileError(
            "--pod-tls-cert, --pod-tls-key and --pod-tls-ca (TANDEM_POD_TLS_CERT, _KEY and _CA) go together; "
            "give all three"
        )
    return PodTls(PemFiles(cert, key, ca, role))


def with_fields(options: type) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds the annotated fields of a dataclass as options to a command, which gets them as keywords."""

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**values: Any) -> None:
            command(**values)

        parameters = [
            parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
            for source in (command, options)
            for hints in (get_type_hints(source, include_extras=True),)
            for name, parameter in inspect.signature(source).parameters.items()
            if get_origin(hints.get(name)) is Annotated
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        return run

    return decorate
