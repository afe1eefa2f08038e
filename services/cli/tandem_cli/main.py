"""The `tandem` command. Commands import their modules when they run, so that `--help` is fast."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from tandem_core.model.registry import DEFAULT_MODEL
from tandem_core.speculation import SpeculationMode

from tandem_cli import bench_command, lookahead_command, model_command
from tandem_cli.doctor.command import doctor
from tandem_cli.options import (
    DEFAULT_TARGET,
    ApiKeyOption,
    CaOption,
    MaxTokensOption,
    ModelOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    fail,
)
from tandem_cli.plan.command import plan

app = typer.Typer(
    name="tandem",
    help="Serve a language model with separate prefill and decode pods.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(model_command.app, name="model")
app.add_typer(bench_command.app, name="bench")
app.add_typer(lookahead_command.app, name="lookahead")
app.command()(plan)
app.command()(doctor)


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class QuantizationName(StrEnum):
    AUTO = "auto"
    NONE = "none"
    W8A8 = "w8a8"
    W4A8 = "w4a8"


QuantizationOption = Annotated[
    QuantizationName,
    typer.Option(
        help="Bits of weights and activations (CPU). auto: as the weights come, if --dtype is auto."
    ),
]


class LogLevelName(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormatName(StrEnum):
    CONSOLE = "console"
    JSON = "json"


@app.command()
def up(
    model: ModelOption = DEFAULT_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="Element type of weights and KV.")] = Dtype.AUTO,
    quantization: QuantizationOption = QuantizationName.AUTO,
    prefill: Annotated[int, typer.Option(help="Number of prefill pods; 0: decode pods do it.")] = 1,
    decode: Annotated[int, typer.Option(help="Number of decode pods.")] = 1,
    gateways: Annotated[
        int, typer.Option(help="Number of gateways, at consecutive ports; clients resume at any of them.")
    ] = 1,
    host: Annotated[str, typer.Option(help="Address all pods listen on.")] = "127.0.0.1",
    grpc_port: Annotated[int, typer.Option(min=1, max=65535, help="Gateway, gRPC.")] = 50051,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="Gateway, HTTP.")] = 8000,
    base_port: Annotated[int, typer.Option(min=1, max=64000, help="First port of the other pods.")] = 51100,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per engine pod; unset: pods of a role divide the cores.")
    ] = None,
    max_model_len: Annotated[
        int, typer.Option(help="Longest text, prompt and answer, in tokens; 0: the model's context.")
    ] = 0,
    speculation: Annotated[
        SpeculationMode,
        typer.Option(
            help="Drafts: none, from the own request, or also from all others (chain: as one line of 7)."
        ),
    ] = SpeculationMode.GLOBAL,
    api_keys_file: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="Require API keys; the gateway's keys file."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="ROLE.FLAG=VALUE", help="Another flag of a role's pods; repeatable."),
    ] = None,
    log_format: Annotated[LogFormatName, typer.Option(help="Form of the log lines.")] = LogFormatName.CONSOLE,
    log_level: Annotated[
        LogLevelName, typer.Option(help="Least severe lines of the pods that are shown.")
    ] = LogLevelName.INFO,
    tls: Annotated[
        bool, typer.Option("--tls", help="Mutual TLS between pods, with certificates made here.")
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Off loopback: plaintext between pods, and no API keys.")
    ] = False,
    state_file: Annotated[
        Path | None, typer.Option(help="Where pids and ports are written; default: run/<grpc port>.json.")
    ] = None,
) -> None:
    """Run the whole system on this machine until Ctrl-C."""
    from tandem_core.errors import ModelLoadError
    from tandem_core.model.manifest import ModelManifest
    from tandem_core.model.registry import cache_root
    from tandem_service.tracing import TracingSettingsError, check_environment

    from tandem_cli import fleet, models, redis_server, up

    try:
        check_environment()
        folder = models.obtain(model)
        models.prepare_weights(folder, dtype.value, quantization.value)
        options = fleet.FleetOptions(
            model_dir=folder,
            dtype=dtype.value,
            quantization=quantization.value,
            num_prefill=prefill,
            num_decode=decode,
            num_gateways=gateways,
            host=host,
            grpc_port=grpc_port,
            http_port=http_port,
            base_port=base_port,
            threads=threads,
            max_model_len=max_model_len,
            memory_bytes=models.free_memory(folder, dtype.value, quantization.value),
            speculation=speculation,
            api_keys_file=api_keys_file,
            log_format=log_format.value,
            log_level=log_level.value,
            redis_dir=cache_root() / "lookahead" / str(grpc_port),
            redis_url=os.environ.get("REDIS_URL", ""),
            tls_dir=cache_root() / "tls" if tls else None,
            insecure=insecure,
            pod_flags=tuple(fleet.PodFlag.parse(text) for text in settings or ()),
        )
        code = up.run_fleet(
            options, ModelManifest.read(folder).name, state_file or cache_root() / "run" / f"{grpc_port}.json"
        )
    except (
        fleet.OptionError,
        fleet.PortInUseError,
        ModelLoadError,
        redis_server.RedisNotFoundError,
        TracingSettingsError,
    ) as error:
        fail(str(error), code=2 if isinstance(error, fleet.OptionError | TracingSettingsError) else 1)
    raise typer.Exit(code)


@app.command()
def certificates(
    folder: Annotated[
        Path, typer.Option(file_okay=False, help="Keeps the CA and its key; made if it is not there.")
    ],
    namespace: Annotated[str, typer.Option(help="Of the Secrets.")] = "tandem",
    days: Annotated[int, typer.Option(min=1, max=825, help="For how long the certificates are valid.")] = 90,
) -> None:
    """Print new certificates of all pods as Kubernetes Secrets, for `kubectl apply -f -`."""
    import datetime

    from tandem_cli import certificates

    try:
        print(certificates.kubernetes_secrets(folder, namespace, datetime.timedelta(days=days)))
    except (OSError, ValueError) as error:
        fail(f"no certificates in --folder {folder}: {error}")


@app.command()
def chat(
    target: TargetOption = DEFAULT_TARGET,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    temperature: TemperatureOption = 0.0,
    max_tokens: MaxTokensOption = 512,
    seed: SeedOption = None,
    slo_class: Annotated[str, typer.Option(help="interactive, chat or batch.")] = "interactive",
    speculation: Annotated[
        SpeculationMode | None, typer.Option(help="Drafts for this chat; unset: the mode of the pods.")
    ] = None,
    once: Annotated[str | None, typer.Option(help="Ask this question, print the answer and exit.")] = None,
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
) -> None:
    """Chat in the terminal; shows TTFT and TPOT during the answer, and its receipt."""
    from tandem_cli import chat

    options = chat.ChatOptions(
        target=target,
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        seed=seed,
        slo_class=slo_class,
        speculation=speculation or "",
        api_key=api_key,
        ca_file=ca,
    )
    try:
        code = chat.ask_once(options, once) if once is not None else chat.converse(options)
    except chat.GatewayError as error:
        fail(str(error))
    raise typer.Exit(code)


@app.command()
def top(
    target: Annotated[
        str, typer.Option(help="HTTP address of the gateway; https:// with TLS.")
    ] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None,
        typer.Option(envvar="TANDEM_API_KEY", help="An operator's key, if the gateway requires one."),
    ] = None,
    ca: CaOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
) -> None:
    """Show what a gateway and its pods do, as its page /dashboard does."""
    import contextlib

    from rich.console import Console

    from tandem_cli import top

    try:
        with contextlib.suppress(KeyboardInterrupt):
            top.show(top.Feed(target, api_key, ca), Console(), once=once)
    except top.TopError as error:
        fail(str(error))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: ModelOption = DEFAULT_MODEL,
    dtype: Annotated[Dtype, typer.Option(help="Element type of weights and KV.")] = Dtype.AUTO,
    quantization: QuantizationOption = QuantizationName.AUTO,
    as_chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Apply the model's chat template, or complete the text as is."),
    ] = True,
    temperature: TemperatureOption = 0.0,
    max_tokens: MaxTokensOption = 256,
    seed: SeedOption = None,
    speculation: Annotated[
        SpeculationMode,
        typer.Option(help="Drafts: none, trees, or one line of 7, from the request's own text; not global."),
    ] = SpeculationMode.LOCAL,
) -> None:
    """Generate in this process, without pods."""
    from tandem_core.errors import TandemError
    from tandem_core.model.conversation import Message
    from tandem_core.sampling import SamplingParams

    from tandem_cli import models

    if speculation is SpeculationMode.GLOBAL:
        fail("--speculation global needs the text of other requests; start a fleet with `tandem up`", code=2)
    try:
        folder = models.obtain(model)
        from tandem_drafting.drafter import drafter_for
        from tandem_engine.llm import LLM

        text = sys.stdin.read() if prompt == "-" else prompt
        if not text.strip():
            fail("the prompt is empty; give some text")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed or 0)
        llm = LLM(
            folder,
            drafter=drafter_for(speculation),
            dtype=dtype.value,
            quantization=quantization.value,
        )
        tokens = llm.tokenizer
        prompt_ids = tokens.encode_chat([Message("user", text)]) if as_chat else tokens.encode(text)
        for piece in llm.stream(prompt_ids, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except TandemError as error:
        fail(str(error))
    sys.stdout.write("\n")


@app.command(
    # The process's own settings read them: flags and TANDEM_* variables, as of all processes.
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
)
def scaler(context: typer.Context) -> None:
    """Scale prefill and decode pods of a Kubernetes cluster; --help lists the settings."""
    import asyncio

    import structlog
    from kubernetes.aio.config import ConfigException
    from tandem_service import logs, settings

    from tandem_cli.scaler.main import serve
    from tandem_cli.scaler.settings import ScalerSettings

    options = settings.load(ScalerSettings, context.args)
    logs.configure(options, "scaler")
    try:
        asyncio.run(serve(options))
    except (OSError, ConfigException) as error:
        structlog.get_logger("tandem.scaler").error("cannot start", reason=str(error))
        raise typer.Exit(1) from error


def main() -> None:
    """Entry point of the console script."""
    app()


if __name__ == "__main__":
    main()
