"""The `tandem` command. Commands import their modules when they run, so that `--help` is fast."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from tandem_core.model.registry import DEFAULT_MODEL
from tandem_core.speculation import SpeculationMode

from tandem_cli import bench_command, keys_command, lookahead_command, model_command
from tandem_cli.doctor.command import doctor
from tandem_cli.options import (
    ApiKeyOption,
    CaOption,
    ChatOptions,
    ChatTemplateOption,
    DtypeOption,
    MaxTokensOption,
    ModelOption,
    QuantizationOption,
    SeedOption,
    TargetOption,
    TemperatureOption,
    fail,
    with_fields,
)
from tandem_cli.plan.command import plan
from tandem_cli.up.options import FleetOptions, OptionError, PodFlag

app = typer.Typer(
    name="tandem",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(model_command.app, name="model")
app.add_typer(bench_command.app, name="bench")
app.add_typer(lookahead_command.app, name="lookahead")
app.add_typer(keys_command.app, name="keys")
app.command()(plan)
app.command()(doctor)


def _show_version(is_asked: bool) -> None:
    if is_asked:
        from tandem_service.version import software_version

        typer.echo(f"tandem {software_version()}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Serve a language model with separate prefill and decode pods."""


@app.command()
@with_fields(FleetOptions)
def up(
    model: ModelOption = DEFAULT_MODEL,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="ROLE.FLAG=VALUE", help="Another flag of a role's pods; repeatable."),
    ] = None,
    tls: Annotated[
        bool, typer.Option("--tls", help="Mutual TLS between pods, with certificates made here.")
    ] = False,
    state_file: Annotated[
        Path | None, typer.Option(help="File for pids and ports; default: run/<grpc port>.json.")
    ] = None,
    **given: Any,
) -> None:
    """Run the whole system on this machine until Ctrl-C."""
    from dataclasses import replace

    from tandem_core.errors import ModelLoadError
    from tandem_core.model.manifest import ModelManifest
    from tandem_core.model.registry import cache_root
    from tandem_service.tracing import TracingSettingsError, check_environment

    from tandem_cli import models
    from tandem_cli.up.redis_server import RedisNotFoundError
    from tandem_cli.up.run import run_fleet
    from tandem_cli.up.supervisor import StartupError
    from tandem_cli.up.up_plan import PortInUseError, check_settings, plan_fleet

    try:
        check_environment()
        port = given["grpc_port"]
        options = FleetOptions(
            model_dir=Path(model),
            redis_dir=cache_root() / "lookahead" / str(port),
            redis_url=os.environ.get("REDIS_URL", ""),
            tls_dir=cache_root() / "tls" if tls else None,
            pod_flags=tuple(PodFlag.parse(text) for text in settings or ()),
            **given,
        )
        check_settings(options, plan_fleet(options))
        folder = models.obtain(model)
        manifest = ModelManifest.read(folder).limited_to(options.max_model_len)
        models.check_for_gateways(manifest, options.chat_template, options.generation_config)
        numerics = options.dtype, options.quantization
        models.prepare_weights(folder, *numerics)
        options = replace(options, model_dir=folder, memory_bytes=models.free_memory(folder, *numerics))
        run_fleet(options, manifest.name, state_file or cache_root() / "run" / f"{port}.json")
    except (OptionError, TracingSettingsError) as error:
        fail(str(error), code=2)
    except (PortInUseError, ModelLoadError, RedisNotFoundError, StartupError) as error:
        fail(str(error))


@app.command()
def certificates(
    folder: Annotated[
        Path, typer.Option(file_okay=False, help="Folder of the CA and its key; created if absent.")
    ],
    namespace: Annotated[str, typer.Option(help="Namespace of the Secrets.")] = "tandem",
    days: Annotated[int, typer.Option(min=1, max=825, help="Validity of the certificates.")] = 90,
) -> None:
    """Print new certificates of all pods as Kubernetes Secrets, for `kubectl apply -f -`."""
    import datetime

    from tandem_cli.up import certificates

    try:
        print(certificates.kubernetes_secrets(folder, namespace, datetime.timedelta(days=days)))
    except (OSError, ValueError) as error:
        fail(f"no certificates in --folder {folder}: {error}")


@app.command()
@with_fields(ChatOptions)
def chat(
    once: Annotated[str | None, typer.Option(help="Ask this question, print the answer and exit.")] = None,
    **given: Any,
) -> None:
    """Chat in the terminal; shows TTFT and TPOT during the answer, and its receipt."""
    from tandem_cli import chat, targets

    options = ChatOptions(**{**given, "target": targets.gateway(given["target"], "grpc")})
    try:
        code = chat.ask_once(options, once) if once is not None else chat.converse(options)
    except targets.GatewayError as error:
        fail(str(error))
    raise typer.Exit(code)


@app.command()
def top(
    target: TargetOption = "",
    api_key: ApiKeyOption = None,
    ca: CaOption = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and end.")] = False,
) -> None:
    """Show the activity of a gateway and its pods, like its page /dashboard."""
    import contextlib

    from rich.console import Console

    from tandem_cli import targets, top

    url = targets.gateway(target, "http")
    try:
        with contextlib.suppress(KeyboardInterrupt):
            top.show(top.Feed(url, api_key, ca), Console(), once=once)
    except top.TopError as error:
        fail(str(error))


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.")],
    model: ModelOption = DEFAULT_MODEL,
    dtype: DtypeOption = "auto",
    quantization: QuantizationOption = "auto",
    as_chat: Annotated[
        bool,
        typer.Option("--chat/--raw", help="Apply the model's chat template, or complete the text as is."),
    ] = True,
    chat_template: ChatTemplateOption = None,
    temperature: TemperatureOption = None,
    max_tokens: MaxTokensOption = 256,
    seed: SeedOption = None,
    speculation: Annotated[
        SpeculationMode,
        typer.Option(help="Drafts from the request's own text: none, trees, or one line of 7; not global."),
    ] = SpeculationMode.LOCAL,
) -> None:
    """Generate in this process, without pods."""
    import dataclasses

    from tandem_core.errors import TandemError
    from tandem_core.model.conversation import Message
    from tandem_core.sampling import SamplingParams

    from tandem_cli import models

    if speculation is SpeculationMode.GLOBAL:
        fail("--speculation global needs the text of other requests; start a fleet with `tandem up`", code=2)
    try:
        folder = models.obtain(model)
        from tandem_core.model.tokenizer import Tokenizer
        from tandem_drafting.drafter import drafter_for
        from tandem_engine.llm import LLM

        text = sys.stdin.read() if prompt == "-" else prompt
        if not text.strip():
            fail("the prompt is empty; give some text")
        tokens = Tokenizer(folder, chat_template)
        if sys.stderr.isatty():
            typer.echo(f"loading {folder.name}", err=True)
        llm = LLM(folder, drafter=drafter_for(speculation), dtype=dtype, quantization=quantization)
        sampling = SamplingParams(**{**llm.manifest.sampling, "max_tokens": max_tokens, "seed": seed or 0})
        if temperature is not None:
            sampling = dataclasses.replace(sampling, temperature=temperature)
        prompt_ids = tokens.encode_chat([Message("user", text)]) if as_chat else tokens.encode(text)
        pieces = llm.stream(prompt_ids, sampling)
        try:
            while True:
                sys.stdout.write(next(pieces))
                sys.stdout.flush()
        except StopIteration as end:
            completion = end.value
    except TandemError as error:
        fail(str(error))
    sys.stdout.write("\n")
    sys.stdout.flush()
    stats, num_tokens = completion.stats, len(completion.token_ids)
    typer.echo(
        f"TTFT {stats.ttft_s:.3f} s, E2E {stats.e2e_s:.3f} s; prompt {stats.prompt_tokens} tokens, output "
        f"{num_tokens} in {stats.decode_steps} steps; drafted {stats.drafted_tokens}, accepted "
        f"{stats.accepted_tokens}; ended by {completion.finish_reason.name.lower()}",
        err=True,
    )


@app.command(
    # The process parses them like all processes: flags and TANDEM_* variables.
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
