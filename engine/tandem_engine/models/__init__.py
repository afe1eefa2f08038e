"""Native decoders, driven by the spec of a model.

What needs torch is imported on first use (model_loader/__init__.py says why).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tandem_engine.models.config import ModelConfig

if TYPE_CHECKING:
    from tandem_engine.models.decoder import Decoder, ModelInputs
    from tandem_engine.models.layout import Quantization
    from tandem_engine.models.linear import pick_dtype

__all__ = ["Decoder", "ModelConfig", "ModelInputs", "Quantization", "pick_dtype"]

_WITH_TORCH = {
    "Decoder": "decoder",
    "ModelInputs": "decoder",
    "Quantization": "layout",
    "pick_dtype": "linear",
}


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
