"""The model store: from a reference to a folder that pods can load.

pull(ref)             -> models/<name>/: config.json, tokenizer.json, tandem.json
resolve(name)         -> that folder
ensure_weights(...)   -> models/<name>/model-<dtype>.safetensors, made on first demand
"""

from tandem_engine.store.convert import ensure_weights, source_bits
from tandem_engine.store.files import Progress
from tandem_engine.store.manifest import ModelManifest
from tandem_engine.store.pull import CATALOGUE, DEFAULT_MODEL, pull
from tandem_engine.store.registry import cache_root, list_models, resolve

__all__ = [
    "CATALOGUE",
    "DEFAULT_MODEL",
    "ModelManifest",
    "Progress",
    "cache_root",
    "ensure_weights",
    "list_models",
    "pull",
    "resolve",
    "source_bits",
]
