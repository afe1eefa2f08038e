"""Native decoders of the llama family, driven by configuration."""

from tandem_engine.models.config import ModelConfig, RopeConfig
from tandem_engine.models.decoder import Decoder, ModelInputs
from tandem_engine.models.layout import Quantization
from tandem_engine.models.linear import pick_dtype

__all__ = ["Decoder", "ModelConfig", "ModelInputs", "Quantization", "RopeConfig", "pick_dtype"]
