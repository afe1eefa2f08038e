"""tandem.json: properties of a model that are readable without its weights.

`tandem model pull` writes it once, last, into the model folder. The engine, the gateway and the command line
read it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.model.json_file import read_object
from tandem_core.sampling import SamplingParams

MANIFEST_NAME = "tandem.json"


@dataclass(frozen=True)
class ModelManifest:
    name: str
    #: SHA-256 (hex) of the source weights: two pods with equal revisions compute the same model.
    revision: str
    #: Where the model came from, for people: a package, a hub id with its commit, or a path.
    source: str
    #: SPDX id, or "unknown".
    license: str
    #: llama, mistral, qwen2 or qwen3.
    architecture: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    #: "" when the model has none.
    bos_token: str
    eos_token: str
    #: Jinja with Hugging Face's conventions; "" for a base model.
    chat_template: str
    #: SHA-256 (hex) of tokenizer.json.
    tokenizer_hash: str
    #: Whether a raw prompt starts with bos_token (a chat template writes its own).
    add_bos: bool
    #: GGUF file or folder of safetensors to convert from; relative paths start at the model folder. "": none
    #: are here, the folder is for a gateway.
    weights: str
    #: Bits of the packing, 4 or 8, that the quantized projections need at least; 0: they are not quantized.
    #: None: the manifest predates this field (model_loader.source_bits fills it in).
    weight_bits: int | None = None
    #: The model's recommendation for fields of SamplingParams that a request leaves out. None: the manifest
    #: predates this field (model_loader.complete fills it in).
    recommended_sampling: Mapping[str, float] | None = None

    def write(self, folder: Path) -> None:
        """Replaces the file atomically, so that readers never see a part of it."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False)
        temporary = folder / f".{MANIFEST_NAME}.new"
        temporary.write_text(text + "\n", encoding="utf-8")
        temporary.replace(folder / MANIFEST_NAME)

    @property
    def sampling(self) -> dict[str, Any]:
        """`recommended_sampling` as arguments of SamplingParams. Raises ModelLoadError if a value is out of
        range."""
        found = dict(self.recommended_sampling or {})
        try:
            SamplingParams(**found)  # type: ignore[arg-type]
        except (InvalidRequestError, TypeError) as error:
            raise ModelLoadError(
                f"the sampling that {self.name} recommends cannot be used ({error}); correct it in its "
                f"{MANIFEST_NAME}, or start with --generation-config none"
            ) from error
        return found

    def limited_to(self, max_model_len: int) -> ModelManifest:
        """A manifest with a shorter context; 0: the model's own. Raises ModelLoadError for a longer one."""
        if max_model_len > self.max_model_len:
            raise ModelLoadError(
                f"--max-model-len {max_model_len}: {self.name} has a context of {self.max_model_len}; set "
                "that or less"
            )
        return dataclasses.replace(self, max_model_len=max_model_len or self.max_model_len)

    @classmethod
    def read(cls, folder: Path) -> ModelManifest:
        """The manifest of a model folder. Raises ModelLoadError."""
        path = folder / MANIFEST_NAME
        try:
            raw = read_object(path)
            # Newer versions may have written more fields.
            known = {field.name: raw[field.name] for field in dataclasses.fields(cls) if field.name in raw}
            return cls(**{**known, "eos_token_ids": tuple(raw["eos_token_ids"])})
        except FileNotFoundError:
            raise ModelLoadError(
                f"{folder} is not a model folder (it has no {MANIFEST_NAME}); "
                f"make one with `tandem model pull {folder}`"
            ) from None
        except (TypeError, KeyError) as error:
            raise ModelLoadError(f"{path} cannot be read ({error}); pull the model again") from error
