"""The options of `python tests/chaos`, what it prints, and its exit code."""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Annotated

import toy_models
import typer
from tandem_cli import models
from tandem_cli.options import fail
from tandem_cli.up.supervisor import StartupError
from tandem_core.errors import ModelLoadError

from tandem_chaos.faults import PROCESS_KINDS, ROLES, FaultKind
from tandem_chaos.frame_faults import FrameFault
from tandem_chaos.frame_simulation import KINDS, FrameSimulation
from tandem_chaos.frames import FrameOptions, run_frames
from tandem_chaos.run import ChaosOptions, run_chaos
from tandem_chaos.violations import Violations

RANDOM_MODEL = "random"
#: Longest text of the random model in tokens.
_CONTEXT = 8192


def chaos(
    model: Annotated[
        str, typer.Option(help="`random`: one of three layers, made here; or as in `tandem up`.")
    ] = RANDOM_MODEL,
    seed: Annotated[int, typer.Option(min=0, help="Equal seeds give equal requests and faults.")] = 0,
    faults: Annotated[int, typer.Option(min=0, help="Faults of processes and links to inject.")] = 40,
    frames: Annotated[
        int, typer.Option(min=0, help="Instead: damaged frames between prefill and decode pods.")
    ] = 0,
    simulated: Annotated[
        int, typer.Option(min=0, help="Instead: damaged frames without sockets, exactly repeated by a seed.")
    ] = 0,
    kinds: Annotated[
        str,
        typer.Option(
            help="Of kill, term, pause, hang, slow, clock, stuck, full, cut, reset; "
            "with --frames, of frame faults."
        ),
    ] = "",
    roles: Annotated[str, typer.Option(help="Of gateway, decode, prefill, lookahead, redis.")] = "",
    prefill: Annotated[int, typer.Option(min=1, help="Prefill pods.")] = 2,
    decode: Annotated[int, typer.Option(min=2, help="Decode pods; one can always be spared.")] = 3,
    gateways: Annotated[int, typer.Option(min=1, help="Gateways; clients resume at another one.")] = 2,
    concurrency: Annotated[int, typer.Option(min=1, help="Clients.")] = 6,
    contexts: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "60,500,4000",
    cases: Annotated[int, typer.Option(min=1, help="Different requests.")] = 36,
    minutes: Annotated[
        float, typer.Option(help="Begin no new round after this time, whatever --faults says.")
    ] = math.inf,
    settle_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds in which everything must be given back.")
    ] = 1.0,
    fork: Annotated[
        bool,
        typer.Option(help="Start pods by fork, in a tenth of the CPU time; --no-fork: as `tandem up` does."),
    ] = True,
    report: Annotated[Path | None, typer.Option(help="Write the report to this file, too.")] = None,
    log: Annotated[Path | None, typer.Option(help="Folder for the output of all processes.")] = None,
) -> None:
    """Inject faults into a system of its own, and check that no client sees them."""

    def show(line: str) -> None:
        typer.echo(f"{time.strftime('%H:%M:%S', time.gmtime())}  {line}", err=True)

    violations = Violations(lambda sentence: show(f"VIOLATION: {sentence}"))
    with tempfile.TemporaryDirectory(prefix="tandem-chaos-") as scratch:
        try:
            if simulated:
                simulation = FrameSimulation(seed, violations, _frame_kinds(kinds) or KINDS)
                text = str(simulation.run(simulated))
            elif frames:
                frame_options = FrameOptions(
                    _folder(model, Path(scratch)),
                    seed,
                    frames,
                    _frame_kinds(kinds) or tuple(FrameFault),
                    settle_s=settle_s,
                )
                text = str(asyncio.run(run_frames(frame_options, violations)))
            else:
                process_kinds = tuple(map(FaultKind, _words(kinds))) or PROCESS_KINDS
                if not fork and any(kind.needs_fork for kind in process_kinds):
                    raise ValueError(
                        "--no-fork: slow, clock and stuck need pods that start by fork; leave them out"
                    )
                options = ChaosOptions(
                    model=_folder(model, Path(scratch)),
                    folder=log or Path(scratch),
                    seed=seed,
                    num_faults=faults,
                    kinds=process_kinds,
                    roles=_words(roles) or ROLES,
                    num_prefill=prefill,
                    num_decode=decode,
                    num_gateways=gateways,
                    longest_s=60 * minutes,
                    concurrency=concurrency,
                    contexts=tuple(map(int, _words(contexts))),
                    num_cases=cases,
                    settle_s=settle_s,
                    forks=fork,
                )
                text = str(asyncio.run(run_chaos(options, violations, show)))
        except (ModelLoadError, StartupError) as error:
            fail(str(error))
        except ValueError as error:
            fail(str(error), code=2)
    typer.echo(text)
    if report is not None:
        report.write_text(text + "\n", encoding="utf-8")
    for sentence in violations.sentences:
        typer.echo(f"violation: {sentence}", err=True)
    if violations.sentences:
        fail(f"{len(violations.sentences)} violations; --seed {seed} repeats the requests and the faults")


def _folder(model: str, scratch: Path) -> Path:
    """The model's folder, with its weights converted. Raises ModelLoadError."""
    if model == RANDOM_MODEL:
        os.environ["TANDEM_HOME"] = str(scratch / "home")
        folder = models.pull(str(toy_models.save_llama(scratch, seed=3, context=_CONTEXT)))
    else:
        folder = models.obtain(model)
    models.prepare_weights(folder, "float32", "auto")
    return folder


def _frame_kinds(text: str) -> tuple[FrameFault, ...]:
    return tuple(map(FrameFault, _words(text)))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def main() -> None:
    typer.run(chaos)
