"""A GGUF model in transformers, and as safetensors in Hugging Face's layout.

python -P benchmarks/huggingface_model.py MODEL_FOLDER DTYPE FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tandem_core.model.manifest import ModelManifest


def load(gguf: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """With plain weights: dequantizing at each step would be slower. It has no end token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.generation_config.eos_token_id = None
    return model


def main() -> None:
    model_dir, dtype, folder = Path(sys.argv[1]), getattr(torch, sys.argv[2]), Path(sys.argv[3])
    manifest = ModelManifest.read(model_dir)
    load(model_dir / manifest.weights, dtype).save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir, gguf_file=manifest.weights)
    tokenizer.chat_template = manifest.chat_template
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
