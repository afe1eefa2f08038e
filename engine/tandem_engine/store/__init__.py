"""The model store: from a reference to a folder that pods can load.

pull(ref)             -> models/<name>/: config.json, tokenizer.json, tandem.json
ensure_weights(...)   -> models/<name>/model-<dtype>.safetensors, made on first demand

Where the folders are and how they are found is in tandem_core.model.
"""

from tandem_core.model.registry import DEFAULT_MODEL

from tandem_engine.store.convert import ensure_weights, source_bits
from tandem_engine.store.files import OnProgress
from tandem_engine.store.pull import CATALOGUE, pull

__all__ = ["CATALOGUE", "DEFAULT_MODEL", "OnProgress", "ensure_weights", "pull", "source_bits"]
