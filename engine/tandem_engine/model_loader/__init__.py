"""From a reference to a decoder that is ready to run.

pull(ref)             -> models/<name>/: config.json, tokenizer.json, tandem.json
ensure_weights(...)   -> models/<name>/model-<dtype>.safetensors, converted on first demand
load_decoder(...)     -> that file mapped into a Decoder
describe(folder)      -> what `tandem model show` prints

Where the folders are and how they are found is in tandem_core.model.
"""

from tandem_core.model.registry import DEFAULT_MODEL

from tandem_engine.model_loader.convert import ensure_weights, source_bits
from tandem_engine.model_loader.describe import ModelDescription, describe
from tandem_engine.model_loader.files import OnProgress
from tandem_engine.model_loader.loading import load_decoder
from tandem_engine.model_loader.pull import pull

__all__ = [
    "DEFAULT_MODEL",
    "ModelDescription",
    "OnProgress",
    "describe",
    "ensure_weights",
    "load_decoder",
    "pull",
    "source_bits",
]
