"""The options of `tandem up`, which define its command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from tandem_core.speculation import SpeculationMode

from tandem_cli.options import ChatTemplateOption, DtypeOption, QuantizationOption
from tandem_cli.up.log_view import LogFormat, LogLevel

ROLES = ("gateway", "decode", "prefill", "lookahead")
MAX_PODS_PER_ROLE = 100
MAX_GATEWAYS = 8


class OptionError(ValueError):
    """An option of `tandem up` cannot be used; the message names it."""


@dataclass(frozen=True)
class PodFlag:
    """An extra flag for all pods of a role, from `--set decode.max-batch=8`."""

    role: str
    flag: str
    value: str
    #: The text as the user wrote it.
    text: str = ""

    @classmethod
    def parse(cls, text: str) -> PodFlag:
        """Raises OptionError for anything but ROLE.FLAG=VALUE with a known role."""
        name, equals, value = text.partition("=")
        role, dot, flag = name.partition(".")
        if not (equals and dot and flag) or role not in ROLES:
            raise OptionError(f"--set {text}: expected ROLE.FLAG=VALUE with ROLE one of {', '.join(ROLES)}")
        return cls(role, flag.removeprefix("--").replace("_", "-"), value, text)

    def arguments(self) -> tuple[str, ...]:
        """The flag and its value, or one of the two flags of a switch."""
        if self.value in ("true", "false"):
            return (f"--{'' if self.value == 'true' else 'no-'}{self.flag}",)
        return (f"--{self.flag}", self.value)


@dataclass(frozen=True)
class FleetOptions:
    """The annotated fields are options of the command. Raises OptionError for numbers out of range."""

    model_dir: Path
    dtype: DtypeOption = "auto"
    quantization: QuantizationOption = "auto"
    num_prefill: Annotated[
        int, typer.Option("--prefill", help="Number of prefill pods; 0: decode pods compute prompts.")
    ] = 1
    num_decode: Annotated[int, typer.Option("--decode", help="Number of decode pods.")] = 1
    num_gateways: Annotated[
        int,
        typer.Option(
            "--gateways", help="Number of gateways, at consecutive ports; clients resume at any of them."
        ),
    ] = 1
    host: Annotated[str, typer.Option(help="Address all pods listen on.")] = "127.0.0.1"
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Gateway, gRPC.")] = 20051
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="Gateway, HTTP.")] = 8000
    base_port: Annotated[
        int,
        typer.Option(min=1, max=64000, help="First of the other processes' ports, which end at this + 1407."),
    ] = 21100
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per engine pod; unset: pods of a role divide the cores.")
    ] = None
    max_model_len: Annotated[
        int, typer.Option(help="Longest text, prompt and answer, in tokens; 0: the model's context.")
    ] = 0
    chat_template: ChatTemplateOption = None
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(help="Sampling left out by requests: as the model recommends, or OpenAI's defaults."),
    ] = "auto"
    speculation: Annotated[
        SpeculationMode,
        typer.Option(
            help="Drafts: none, from the request itself, or also from others (chain: one line of 7)."
        ),
    ] = SpeculationMode.GLOBAL
    api_keys_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Require API keys; the gateway's keys file."),
    ] = None
    log_format: Annotated[LogFormat, typer.Option(help="Form of the log lines.")] = "console"
    log_level: Annotated[LogLevel, typer.Option(help="Least severe lines of the pods that are shown.")] = (
        "info"
    )
    insecure: Annotated[bool, typer.Option("--insecure", help="Off loopback: plaintext between pods.")] = (
        False
    )
    no_api_keys: Annotated[
        bool, typer.Option("--no-api-keys", help="Off loopback: everyone may use the models.")
    ] = False
    #: RAM for all engine pods in addition to the mapped weights; 0: each pod takes what is free at its start.
    memory_bytes: int = 0
    #: Folder of the Redis server's data.
    redis_dir: Path = Path("lookahead")
    #: Redis server to use; empty: the fleet runs one.
    redis_url: str = ""
    pod_flags: tuple[PodFlag, ...] = ()
    #: Folder of the pods' certificates; None: plaintext between pods.
    tls_dir: Path | None = None

    def __post_init__(self) -> None:
        from tandem_service.tls import is_loopback  # with gRPC

        if not 0 <= self.num_prefill <= MAX_PODS_PER_ROLE:
            raise OptionError(f"--prefill {self.num_prefill}: must be between 0 and {MAX_PODS_PER_ROLE}")
        if not 1 <= self.num_decode <= MAX_PODS_PER_ROLE:
            raise OptionError(f"--decode {self.num_decode}: must be between 1 and {MAX_PODS_PER_ROLE}")
        if not 1 <= self.num_gateways <= MAX_GATEWAYS:
            raise OptionError(f"--gateways {self.num_gateways}: must be between 1 and {MAX_GATEWAYS}")
        if self.threads is not None and self.threads < 1:
            raise OptionError(f"--threads {self.threads}: must be at least 1")
        if self.max_model_len < 0:
            raise OptionError(f"--max-model-len {self.max_model_len}: must be 0 or more")
        if self.tls_dir is None and not self.insecure and not is_loopback(self.host):
            raise OptionError(
                f"--host {self.host} is not loopback: give --tls to encrypt and authenticate the links "
                "between pods, or --insecure on a network where every machine is trusted"
            )
        if self.api_keys_file is not None and self.no_api_keys:
            raise OptionError("--api-keys-file and --no-api-keys exclude each other; give one")
        if self.api_keys_file is None and not self.no_api_keys and not is_loopback(self.host):
            raise OptionError(
                f"--host {self.host} is not loopback: give --api-keys-file to require keys, or --no-api-keys "
                "on a network where all machines may use the models"
            )

    @property
    def serves_tls(self) -> bool:
        """Whether the gateway's ports speak TLS."""
        return any(flag.role == "gateway" and flag.flag == "tls-cert" for flag in self.pod_flags)
