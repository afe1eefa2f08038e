"""A model and a machine small enough to count bytes and operations by hand."""

from __future__ import annotations

import torch
from floors import Weights
from machine import Peaks
from tandem_core.model.spec import (
    Activation,
    Attention,
    Branch,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    NormKind,
    Rope,
    Sublayer,
)

#: A layer has 432 weights: queries 8 x 8, keys and values 8 x 4 each, output 8 x 8, MLP 3 x 8 x 10.
_NORM = Norm(NormKind.RMS, 1e-5)
ATTENTION = Attention(heads=4, kv_heads=2, k_dim=2, v_dim=2, scale=0.7, rope=Rope(2))
SPEC = ModelSpec(
    vocab_size=50,
    hidden_size=8,
    max_len=64,
    sublayers=(
        Sublayer((Branch(ATTENTION, _NORM),)),
        Sublayer((Branch(Mlp(10, Activation.SILU), _NORM),)),
    )
    * 2,
    norm=_NORM,
    head=Head(tied=False),
)
WEIGHTS = Weights(num_bytes=1000, dtype=torch.int8, kv_dtype=torch.bfloat16)
PEAKS = Peaks(1e3, {torch.float32: 1e3, torch.bfloat16: 4e3, torch.int8: 16e3})
