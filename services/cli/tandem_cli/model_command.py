"""`tandem model`: lists, shows, downloads and removes models."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer
from tandem_core.errors import ModelLoadError
from tandem_core.model import registry

from tandem_cli.options import fail, megabytes, table

app = typer.Typer(help="Download, list, show and remove models.", no_args_is_help=True)


@app.command("pull")
def pull_model(
    reference: Annotated[
        str, typer.Argument(help="A name of the catalogue, a Hugging Face id, a folder, a GGUF file.")
    ] = registry.DEFAULT_MODEL,
    tokenizer_only: Annotated[
        bool, typer.Option("--tokenizer-only", help="Pull only the files of a gateway, without weights.")
    ] = False,
    convert: Annotated[
        bool, typer.Option("--convert", help="Convert the weights too, for pods that only read the folder.")
    ] = False,
) -> None:
    """Download a model, or import a local one, and print its folder."""
    from tandem_cli import models

    if tokenizer_only and convert:
        fail("--tokenizer-only pulls no weights for --convert; give one of them")
    try:
        if tokenizer_only:
            typer.echo(models.pull_tokenizer(reference))
            return
        # `pull` compares a local source with the stored model; a stored model needs no check.
        is_local = Path(reference).expanduser().exists()
        folder = models.pull(reference) if is_local else models.obtain(reference)
        if convert:
            models.prepare_weights(folder, "auto", "auto")
        typer.echo(folder)
    except ModelLoadError as error:
        fail(str(error))


@app.command("list")
def list_models(
    families: Annotated[
        bool,
        typer.Option("--families", help="List the model types that can be served, and what computes them."),
    ] = False,
) -> None:
    """The models on this machine."""
    if families:
        from tandem_engine.models import type_table

        typer.echo(table(type_table.TITLES, *map(type_table.cells, type_table.type_rows())))
        return
    try:
        manifests = registry.list_models()
    except ModelLoadError as error:
        fail(str(error))
    for folder in registry.models_root().glob(".*.new"):
        name, size = folder.name[1:-4], sum(path.stat().st_size for path in folder.iterdir())
        typer.echo(
            f"unfinished: {name}, {megabytes(size)}; pull it again to continue, or `tandem model rm {name}`",
            err=True,
        )
    if not manifests:
        typer.echo(f"no models yet; get one with `tandem model pull {registry.DEFAULT_MODEL}`")
        return
    rows = []
    for one in manifests:
        folder = registry.resolve(one.name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        converted = sum(path.stat().st_size for path in registry.converted_weights(folder, one))
        sizes = f"{one.max_model_len:,}", megabytes(size), megabytes(converted) if converted else "-"
        rows.append((one.name, _family(folder, one.architecture), *sizes, one.license))
    typer.echo(table(("name", "family", ">context", ">on disk", ">of it converted", "licence"), *rows))


def _family(folder: Path, model_type: str) -> str:
    """The type, marked where our own decoder does not compute it."""
    from tandem_core.model.json_file import read_object
    from tandem_engine.models.executors import Executor, executor_of

    path = folder / "config.json"
    with contextlib.suppress(ModelLoadError, OSError):  # a gateway's folder; a type of a later version
        if executor_of(read_object(path), path) is Executor.TRANSFORMERS:
            return f"{model_type} ({Executor.TRANSFORMERS.value})"
    return model_type


@app.command("check")
def check_model(
    name: Annotated[
        str, typer.Argument(help="Name of a pulled model, or its folder.")
    ] = registry.DEFAULT_MODEL,
    prompt: Annotated[
        str, typer.Option(help="Text that both continue.")
    ] = "The delivery of your order takes three to five days. If it is late",
) -> None:
    """Compare a model's log probabilities and 20 greedy tokens with those of transformers, in float32.

    Exits with 1 if they disagree. Takes about four bytes of memory per parameter.
    """
    from tandem_engine.model_loader.checking import check

    try:
        result = check(registry.resolve(name), prompt)
    except ModelLoadError as error:
        fail(str(error))
    first = result.first_difference
    same = "20 tokens are equal"
    if first is not None:
        same = f"token {first + 1} differs" + " (a tie)" * result.is_tie
    rows = {
        "compared": f"{result.executor} with {result.reference}, in float32",
        "prompt": f"{result.num_prompt_tokens} tokens",
        "likelihood": f"the 5 likeliest tokens' log probabilities differ by {result.difference:.1e} at most",
        "text": same,
        "ours": repr(result.text),
    }
    if first is not None:
        rows["reference"] = repr(result.reference_text)
    for title, text in rows.items():
        typer.echo(f"{title + ':':<12}{text}")
    if not result.agrees:
        fail(f"{name}: the executors disagree; please report the model with these lines")


@app.command("show")
def show_model(
    name: Annotated[
        str, typer.Argument(help="Name of a pulled model, or its folder.")
    ] = registry.DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="All fields of the manifest too, as JSON.")] = False,
) -> None:
    """Show a model's shape, size and number formats on this machine."""
    import dataclasses
    import json

    from tandem_cli import models

    try:
        folder = registry.resolve(name)
        shown = models.described(folder)
    except ModelLoadError as error:
        fail(str(error))
    is_converted = (folder / shown.weight_file).is_file()
    if as_json:
        fields = {"folder": str(folder), "is_converted": is_converted, **dataclasses.asdict(shown)}
        typer.echo(json.dumps(fields, indent=2, ensure_ascii=False))
        return
    manifest = shown.manifest
    formats = "\n".join(
        f"{f.kind}: {f.num_tensors} tensor{'s' * (f.num_tensors > 1)}, {megabytes(f.num_bytes)}"
        for f in shown.formats
    )
    computed = [shown.dtype, *([shown.quantization] if shown.quantization != "none" else [])]
    computed += ["packed for the compiled kernels"] if shown.packed else []
    state = "converted" if is_converted else "converted at the first start"
    sampling = manifest.recommended_sampling or {}
    rows = {
        "family": f"{_family(folder, manifest.architecture)}, {shown.num_parameters / 1e6:,.0f} million "
        "parameters",
        "formats": formats,
        "computed in": f"{', '.join(computed)} ({shown.weight_file}, {state})",
        "bytes per token": f"{megabytes(shown.step_bytes)} of weights in a decode step",
        "context": f"{manifest.max_model_len:,} tokens of {shown.kv_bytes_per_token:,} bytes of KV "
        f"({megabytes(manifest.max_model_len * shown.kv_bytes_per_token)} for all)",
        "memory": f"{megabytes(shown.weight_bytes)} of weights, shared by pods; each pod: its process, KV,\n"
        f"{megabytes(shown.working_bytes)} for the largest step and {megabytes(shown.transfer_bytes)} for KV "
        "transfers (default settings)",
        "chat template": _template(manifest.chat_template),
        "sampling": ", ".join(f"{name} {value}" for name, value in sampling.items()) or "no recommendation",
        "licence": manifest.license,
        "source": manifest.source,
        "folder": str(folder),
    }
    for title, text in rows.items():
        typer.echo(f"{title + ':':<17}" + text.replace("\n", "\n" + 17 * " "))


@app.command("rm")
def remove_model(
    name: Annotated[str, typer.Argument(help="Name of a model as in `tandem model list`.")],
    converted: Annotated[
        bool,
        typer.Option("--converted", help="Only the converted weights, which the next start makes again."),
    ] = False,
) -> None:
    """Delete a model and print the freed space. Refused while a process on this machine uses the model."""
    from tandem_engine.model_loader import remove

    try:
        removed = remove(name, only_converted=converted)
    except ModelLoadError as error:
        fail(str(error))
    for file, size in removed.files.items():
        typer.echo(f"{megabytes(size):>10}  {file}")
    typer.echo(f"{megabytes(removed.num_bytes):>10}  freed in {removed.folder}")
    if removed.kept is not None:
        typer.echo(f"kept: {removed.kept}, which is outside Tandem's folder")


#: Marks of chat template formats.
_TEMPLATES = {
    "<|im_start|>": "ChatML",
    "<|start_header_id|>": "Llama 3",
    "[INST]": "Llama 2 or Mistral",
    "<start_of_turn>": "Gemma",
}


def _template(text: str) -> str:
    """The format's name, or the first line, and whether it supports tools."""
    if not text:
        return "none (a base model: `tandem generate --raw`)"
    first = text.strip().splitlines()[0]
    name = next((name for mark, name in _TEMPLATES.items() if mark in text), first[:60])
    return f"{name}, {'with' if 'tools' in text else 'without'} tools"
