"""From a reference to a decoder that is ready to run.

pull(ref)             -> models/<name>/: config.json, tokenizer.json, tandem.json
complete(folder)      -> the same, where an earlier version made them
remove(name)          -> that folder deleted, unless a process uses it
pull_tokenizer(ref)   -> tokenizers/<name>/: the same, for a gateway
ensure_weights(...)   -> models/<name>/model-<dtype>.safetensors, converted on first demand
load_decoder(...)     -> that file mapped into a Decoder
describe(folder)      -> what `tandem model show` prints

Where the folders are and how they are found is in tandem_core.model.

Importing torch takes more than a second, so what needs it is imported on first use: a wrong reference, or a
model that is not supported, is refused without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tandem_core.model.registry import DEFAULT_MODEL

from tandem_engine.model_loader.description import ModelDescription
from tandem_engine.model_loader.files import OnProgress
from tandem_engine.model_loader.pull import complete, pull, pull_tokenizer
from tandem_engine.model_loader.remove import RemovedModel, remove

if TYPE_CHECKING:
    from tandem_engine.model_loader.convert import ensure_weights, source_bits
    from tandem_engine.model_loader.describing import describe
    from tandem_engine.model_loader.loading import load_decoder

__all__ = [
    "DEFAULT_MODEL",
    "ModelDescription",
    "OnProgress",
    "RemovedModel",
    "complete",
    "describe",
    "ensure_weights",
    "load_decoder",
    "pull",
    "pull_tokenizer",
    "remove",
    "source_bits",
]

_WITH_TORCH = {
    "describe": "describing",
    "ensure_weights": "convert",
    "load_decoder": "loading",
    "source_bits": "convert",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
