"""Loads a model folder into transformers' modules: for types without a native family.

Weights are mapped from the checkpoint's safetensors, and transformers' own table of conversions brings old
names to its modules. Of models of more modalities only the text model is built. The checkpoint's code, if it
has any, is never run: the type must be one of transformers' own.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tandem_core.errors import ModelLoadError
from tandem_core.model.json_file import read_object
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.spec import ModelSpec
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from tandem_engine.model_loader.convert import open_source
from tandem_engine.model_loader.safetensors_files import weight_files
from tandem_engine.models import modules
from tandem_engine.models.executors import ModelFacts, module_types, text_type
from tandem_engine.models.layout import Quantization
from tandem_engine.models.modules import ModulesDecoder

log = logging.getLogger(__name__)

#: In names of weights of a text model within a larger one.
_TEXT_MODEL = "language_model."
#: Texts that a model without a limit of its own, such as Mamba, gets.
_UNLIMITED = 32_768


def read_facts(folder: Path) -> ModelFacts:
    """From config.json. Raises ModelLoadError."""
    config = _text_config(folder)
    limit = getattr(config, "max_position_embeddings", None)
    try:
        return ModelFacts(str(config.model_type), int(config.vocab_size), int(limit or _UNLIMITED))
    except (AttributeError, TypeError, ValueError) as error:
        raise ModelLoadError(
            f"{folder / 'config.json'} lacks or garbles a size ({error}); pull the model again"
        ) from error


def estimated_spec(folder: Path) -> ModelSpec:
    """Sizes of the model, without its weights. Raises ModelLoadError."""
    return modules.estimated_spec(_text_config(folder), ModelManifest.read(folder).max_model_len)


def load_modules(
    folder: Path,
    dtype: torch.dtype,
    device: str = "cpu",
    quantization: Quantization = Quantization.NONE,
    max_model_len: int = 0,
) -> ModulesDecoder:
    """The model of `folder` for texts of `max_model_len` tokens; 0: the model's own limit. Raises
    ModelLoadError."""
    raw, limit = read_object(folder / "config.json"), ModelManifest.read(folder).max_model_len
    model = eager_model(folder, dtype).to(device)
    in_chunks = module_types()[text_type(raw)].in_chunks
    return ModulesDecoder(model, max_model_len or limit, quantization, in_chunks=in_chunks)


def eager_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' own model of the folder, with eager attention, in eval mode. A GGUF file's weights are
    dequantized. Raises ModelLoadError."""
    config, manifest = _text_config(folder), ModelManifest.read(folder)
    path = (folder / manifest.weights).resolve()
    if path.suffix == ".gguf":
        source = open_source(path)
        weights = {name: source.get(name) for name in source.names()}
    else:
        weights = _read_weights(path)
    transformers_logging.disable_progress_bar()
    try:
        model, found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            None,
            config=config,
            state_dict=weights,
            dtype=dtype,
            attn_implementation="eager",
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises anything for a config that lies
        raise ModelLoadError(
            f"transformers cannot build the model of {folder} ({_first_line(error)}); the config and the "
            "weights are of different models or damaged, pull the model again"
        ) from error
    for what in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, found[what])):
            raise ModelLoadError(
                f"the weights of {folder} do not fit config.json ({what.replace('_', ' ')}: {names[0]}, "
                f"{len(names)} in total); the download is incomplete, pull the model again"
            )
    if names := sorted(found["unexpected_keys"]):
        log.warning("%s: %d tensors are not used, among them %s", folder.name, len(names), names[0])
    return model.eval()


def _text_config(folder: Path) -> Any:
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"{folder} has no config.json; pull the model again")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        return config.get_text_config(decoder=True)
    except Exception as error:  # transformers raises anything for a config that lies
        raise ModelLoadError(
            f"transformers cannot read {folder / 'config.json'} ({_first_line(error)}); pull the model again"
        ) from error


def _read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors, mapped; of a larger model those of its text model and head."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(path):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{file} is damaged ({error}); download it again") from error
    if not any(_TEXT_MODEL in name for name in tensors):
        return tensors
    return {
        _within_text_model(name): tensor
        for name, tensor in tensors.items()
        if _TEXT_MODEL in name or name.startswith("lm_head.")
    }


def _within_text_model(name: str) -> str:
    """language_model.model.X and model.language_model.X -> model.X; language_model.lm_head.X -> lm_head.X"""
    if _TEXT_MODEL not in name:
        return name
    inner = name.partition(_TEXT_MODEL)[2]
    return inner if inner.startswith(("model.", "lm_head.")) else f"model.{inner}"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
