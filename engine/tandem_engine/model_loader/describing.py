"""What is in a model folder and how it runs here, from headers alone: for `tandem model show`."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from tandem_core.errors import ModelLoadError
from tandem_core.model.json_file import read_object
from tandem_core.model.manifest import ModelManifest
from tandem_kernels import runs_packed

from tandem_engine.kv_pool import KVShape
from tandem_engine.memory import step_bytes, transfer_bytes
from tandem_engine.model_loader.checkpoints.source import QuantizedSource
from tandem_engine.model_loader.convert import file_tensors, open_source
from tandem_engine.model_loader.description import ModelDescription, StoredFormat
from tandem_engine.model_loader.gguf_file import open_all
from tandem_engine.model_loader.loading import pick_numerics
from tandem_engine.model_loader.safetensors_files import weight_files
from tandem_engine.models.config import ModelConfig
from tandem_engine.models.executors import Executor, executor_of
from tandem_engine.models.layout import WeightForm, share_read
from tandem_engine.workspace import StepLimits

#: Limits of a decode pod with default settings: chunks of 512 tokens, 16 sequences of a token and 31 draft
#: tokens.
_BLOCK_SIZE, _LIMITS = 64, StepLimits(max_tokens=512, max_seqs=16, max_decode_tokens=16 * 32)


class _Tensor(NamedTuple):
    name: str
    kind: str
    num_bytes: int


def describe(folder: Path) -> ModelDescription:
    """Reads the headers; description.py keeps the result. Raises ModelLoadError."""
    manifest = ModelManifest.read(folder)
    path = folder / "config.json"
    through_modules = path.is_file() and executor_of(read_object(path), path) is Executor.TRANSFORMERS
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    numerics = pick_numerics(folder, device=str(device))
    form = WeightForm(numerics.dtype, runs_packed(numerics.dtype, device), numerics.quantization)
    path = (folder / manifest.weights).resolve()
    opened = open_source(path)
    formats_of = opened.formats_of if isinstance(opened, QuantizedSource) else {}
    source = [t._replace(kind=formats_of.get(t.name, t.kind)) for t in _source_tensors(path)]
    kinds = {tensor.kind for tensor in source}
    formats = [
        StoredFormat(kind, len(same), sum(t.num_bytes for t in same))
        for kind in kinds
        if (same := [t for t in source if t.kind == kind])
    ]
    if through_modules:
        num_parameters = sum(prod(opened.shape(name)) for name in opened.names())
        return _of_modules(manifest, folder, form, num_parameters, formats)
    config = ModelConfig.from_folder(folder)
    spec = config.spec
    in_file = file_tensors(config, opened, form)
    # All but the embedding, of which a step reads one row, unless it is the head too.
    read = sum(
        t.num_bytes * share_read(spec, name)
        for name, t in in_file.items()
        if name != "embed_tokens.weight" or "lm_head.weight" not in in_file
    )
    shape = KVShape.of(spec, _BLOCK_SIZE, form.dtype)
    step = step_bytes(
        spec,
        form.dtype,
        _LIMITS,
        packed=form.packed,
        quantization=form.quantization,
        threads=torch.get_num_threads(),
    )
    return ModelDescription(
        manifest=manifest,
        formats=tuple(sorted(formats, key=lambda f: -f.num_bytes)),
        num_parameters=sum(prod(opened.shape(name)) for name in opened.names()),
        dtype=str(form.dtype).removeprefix("torch."),
        quantization=form.quantization.value,
        packed=form.packed,
        weight_file=form.file_name,
        weight_bytes=sum(t.num_bytes for t in in_file.values()),
        step_bytes=round(read),
        kv_bytes_per_token=shape.num_layers * shape.block_bytes // _BLOCK_SIZE,
        working_bytes=step,
        transfer_bytes=transfer_bytes([shape], _LIMITS.max_seqs),
    )


def _of_modules(
    manifest: ModelManifest,
    folder: Path,
    form: WeightForm,
    num_parameters: int,
    formats: list[StoredFormat],
) -> ModelDescription:
    """The same for a model through transformers: no weights are converted, and a token reads all."""
    from tandem_engine.model_loader.modules_loading import estimated_spec

    spec = estimated_spec(folder)
    shape = KVShape.of(spec, _BLOCK_SIZE, form.dtype)
    num_bytes = num_parameters * form.dtype.itemsize
    return ModelDescription(
        manifest=manifest,
        formats=tuple(sorted(formats, key=lambda f: -f.num_bytes)),
        num_parameters=num_parameters,
        dtype=str(form.dtype).removeprefix("torch."),
        quantization=form.quantization.value,
        packed=form.packed,
        weight_file="config.json",
        weight_bytes=num_bytes,
        step_bytes=num_bytes,
        kv_bytes_per_token=shape.num_layers * shape.block_bytes // _BLOCK_SIZE,
        working_bytes=step_bytes(
            spec,
            form.dtype,
            _LIMITS,
            packed=False,
            quantization=form.quantization,
            threads=torch.get_num_threads(),
        ),
        transfer_bytes=transfer_bytes([shape], _LIMITS.max_seqs),
    )


def _source_tensors(path: Path) -> list[_Tensor]:
    if path.suffix != ".gguf":
        return [tensor for file in weight_files(path) for tensor in _safetensors(file)]
    found = [tensor for file in open_all(path) for tensor in file.tensors.values()]
    return [_Tensor(t.name, t.kind.name, t.rows.nbytes) for t in found]


def _safetensors(path: Path) -> list[_Tensor]:
    try:
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        return [
            _Tensor(name, t["dtype"], t["data_offsets"][1] - t["data_offsets"][0])
            for name, t in header.items()
            if name != "__metadata__"
        ]
    except (OSError, ValueError, KeyError, TypeError, MemoryError) as error:
        raise ModelLoadError(f"{path} is damaged ({error}); pull the model again") from error
