"""Who computes a model: our decoder, for the types in families/, else transformers' modules.

module_types.json lists the types whose modules are proven to give transformers' text through our engine, as
benchmarks/decoder_types.py found. Nothing here needs torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeAlias

from tandem_core.errors import ModelLoadError, quoted

from tandem_engine.models.families import FAMILIES

if TYPE_CHECKING:
    from tandem_engine.models.decoder import Decoder
    from tandem_engine.models.modules import ModulesDecoder

    AnyDecoder: TypeAlias = Decoder | ModulesDecoder


class Executor(StrEnum):
    NATIVE = "native"
    TRANSFORMERS = "through transformers"


@dataclass(frozen=True)
class ModelFacts:
    """What the manifest holds of a config.json."""

    model_type: str
    vocab_size: int
    max_model_len: int


@dataclass(frozen=True)
class ModuleType:
    """What is proven of a type's modules."""

    #: Sequences have a state besides their KV: no drafts, prefix hits, beams or transfers.
    is_recurrent: bool = False
    #: Recurrent modules take a later chunk in one call, not token by token.
    in_chunks: bool = False
    takes_drafts: bool = True


@cache
def module_types() -> Mapping[str, ModuleType]:
    """By the model_type of text models."""
    return {name: ModuleType(**proven) for name, proven in _table()["types"].items()}


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = files("tandem_engine.models").joinpath("module_types.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


def text_type(config: Mapping[str, Any]) -> str:
    """The type of the text model in a config.json, which may be part of a model of more modalities."""
    name, inner = str(config.get("model_type") or ""), config.get("text_config")
    if name in FAMILIES or name in module_types() or not isinstance(inner, Mapping):
        return name
    return str(inner.get("model_type") or _table()["text_types"].get(name, name))


def executor_of(config: Mapping[str, Any], where: object = "config.json") -> Executor:
    """Raises ModelLoadError for a type that neither computes."""
    name = config.get("model_type")
    if name in FAMILIES:
        return Executor.NATIVE
    if not name:
        raise ModelLoadError(f"{where} names no architecture (model_type); download the whole model")
    if text_type(config) not in module_types():
        raise ModelLoadError(
            f"{where}: architecture {quoted(str(name))} is not supported; `tandem model list --families` "
            "lists those that are"
        )
    if "quantization_config" in config:
        raise ModelLoadError(
            f"{where}: quantized safetensors of {quoted(str(name))} are not supported; use the "
            "unquantized model"
        )
    return Executor.TRANSFORMERS
