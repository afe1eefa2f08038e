"""A model and a machine small enough to count bytes and operations by hand."""

from __future__ import annotations

import torch
from floors import Weights
from machine import Peaks
from tandem_engine.models.config import ModelConfig, RopeConfig

#: A layer has 432 weights: queries 8 x 8, keys and values 8 x 4 each, output 8 x 8, MLP 3 x 8 x 10.
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=50,
    hidden_size=8,
    intermediate_size=10,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    max_model_len=64,
    rms_norm_eps=1e-5,
    rope=RopeConfig(),
    windows=(None, None),
)
WEIGHTS = Weights(num_bytes=1000, dtype=torch.int8, kv_dtype=torch.bfloat16)
PEAKS = Peaks(1e3, {torch.float32: 1e3, torch.bfloat16: 4e3, torch.int8: 16e3})
