"""What `tandem model show` prints, kept in the model folder, because it takes torch more than a second.

read_kept -> the file is there, and of this model on a machine like this one? the description
otherwise    describing.describe, then keep
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tandem_core.model.manifest import MANIFEST_NAME, ModelManifest

_FILE_NAME = ".description.json"
_CPU_INFO = ("model name", "flags")


class StoredFormat(NamedTuple):
    """The tensors of one element type in the source."""

    kind: str
    num_tensors: int
    num_bytes: int


@dataclass(frozen=True)
class ModelDescription:
    manifest: ModelManifest
    #: Formats of the source, most bytes first.
    formats: tuple[StoredFormat, ...]
    num_parameters: int
    #: dtype and quantization that `auto` picks on this machine, and the weight file of these.
    dtype: str
    quantization: str
    packed: bool
    weight_file: str
    #: Bytes of the weight file, and those that a decode step of one token reads; known before the conversion.
    weight_bytes: int
    step_bytes: int
    kv_bytes_per_token: int
    #: Further memory of a pod with default settings on a CPU: for its largest step, and for frames of KV
    #: transfers.
    working_bytes: int
    transfer_bytes: int


def read_kept(folder: Path) -> ModelDescription | None:
    """None: there is none, or it is of another model or machine."""
    try:
        kept = json.loads((folder / _FILE_NAME).read_text(encoding="utf-8"))
        if kept.pop("made_for") != _fingerprint(folder):
            return None
        kept["formats"] = tuple(StoredFormat(*values) for values in kept["formats"])
        return ModelDescription(manifest=ModelManifest.read(folder), **kept)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(folder: Path, description: ModelDescription) -> None:
    fields: dict[str, Any] = dataclasses.asdict(description)
    del fields["manifest"]
    text = json.dumps({"made_for": _fingerprint(folder), **fields})
    with contextlib.suppress(OSError):  # a read-only folder is described anew each time
        temporary = folder / f"{_FILE_NAME}.{os.getpid()}"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / _FILE_NAME)


def _fingerprint(folder: Path) -> str:
    """A digest of all that a description depends on: model, processor, kernels, GPUs, threads."""
    lines = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    kernels = find_spec("tandem_kernels")
    native = Path(kernels.origin or "").with_name("native") if kernels else Path()
    facts = [
        *((folder / name).read_text(encoding="utf-8") for name in (MANIFEST_NAME, "config.json")),
        *(line for line in lines if line.startswith(_CPU_INFO)),
        *(f"{path.name} {path.stat().st_mtime_ns}" for path in sorted(native.glob("*.so"))),
        *sorted(str(path) for path in Path("/dev").glob("nvidia[0-9]*")),
        *(os.environ.get(name, "") for name in ("TANDEM_NATIVE", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")),
        *(str(len(os.sched_getaffinity(0))), version("torch"), version("tandem")),
    ]
    return hashlib.sha256("\0".join(facts).encode()).hexdigest()
