"""A model as its config.json describes it: what it computes and where its weights are.

A config that asks for what we do not compute is refused when it is read, never run approximately.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_core.errors import ModelLoadError, quoted
from tandem_core.model.json_file import read_object
from tandem_core.model.spec import ModelSpec

from tandem_engine.models.families import FAMILIES, Names, check_architecture
from tandem_engine.models.quantization_config import quantization_of


@dataclass(frozen=True)
class ModelConfig:
    model_type: str
    spec: ModelSpec
    names: Names

    @classmethod
    def from_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` of a model folder. Raises ModelLoadError."""
        path = folder / "config.json"
        try:
            return cls.from_hf(read_object(path))
        except FileNotFoundError:
            raise ModelLoadError(f"{folder} has no config.json; pull the model again") from None

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Parse a Hugging Face config. Raises ModelLoadError."""
        text = raw.get("text_config")
        nested = text.get("model_type") if isinstance(text, Mapping) else None
        model_type = check_architecture(nested or raw.get("model_type"), "config.json")
        quantization_of(raw)
        try:
            return cls(model_type, *FAMILIES[model_type].parse(raw))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise ModelLoadError(
                f"config.json lacks or garbles a value ({type(error).__name__}: {quoted(str(error))}); "
                "pull the model again"
            ) from error
