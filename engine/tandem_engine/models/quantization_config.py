"""Which quantized checkpoints can be read, by the quantization_config of their config.json; without torch.

model_loader/checkpoints reads them. What is not known here is refused when the config is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem_core.errors import ModelLoadError, quoted

#: quant_method -> the module of model_loader.checkpoints that reads it.
METHODS = {
    "awq": "awq",
    "gptq": "gptq",
    "auto-round": "auto_round",
    "compressed-tensors": "compressed_tensors",
    "fp8": "fp8",
    "fbgemm_fp8": "fp8",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "mxfp4",
}
_TAKEN = "AWQ, GPTQ, compressed-tensors, fp8, bitsandbytes, MXFP4 or GGUF"


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config of a config.json; None: the weights are not quantized.

    Raises ModelLoadError for formats that cannot be read.
    """
    found = config.get("quantization_config", config.get("compression_config"))
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ModelLoadError(
            f"config.json: quantization_config is {quoted(str(found))}, not an object; pull the model again"
        )
    method = found.get("quant_method")
    if method is None and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in METHODS:
        raise ModelLoadError(
            f"config.json: quantization_config.quant_method is {quoted(str(method))}, which cannot be read; "
            f"use the model's files in {_TAKEN}, or its unquantized weights"
        )
    return {**found, "quant_method": method}
