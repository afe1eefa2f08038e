"""CPU time of the gated delta rule per token, at the shape of Qwen3.5-9B: 24 layers of 32 value heads.

    OMP_NUM_THREADS=1 python benchmarks/gated_delta.py

One thread; convolution, gates and norm included, projections not. A draft's tokens are a chain. Figures are
the best of some runs: other processes only add to them.
"""

from __future__ import annotations

import time

import torch
from tandem_kernels import GatedDeltaWeights, StateMetadata, gated_delta

LAYERS, K_HEADS, V_HEADS, K_DIM, V_DIM, TAPS = 24, 16, 32, 128, 128, 4
RUNS = 7


def ms_per_token(num_tokens: int, *, is_draft: bool) -> float:
    values = V_HEADS * V_DIM
    channels = 2 * K_HEADS * K_DIM + values
    projected = torch.randn(num_tokens, channels + values + 2 * V_HEADS).bfloat16()
    qkv, z, b, a = torch.split(projected, [channels, values, V_HEADS, V_HEADS], 1)
    weights = GatedDeltaWeights(
        torch.randn(TAPS, channels) / 2,
        torch.rand(V_HEADS),
        torch.randn(V_HEADS) - 3,
        torch.ones(V_DIM),
        1e-6,
    )
    conv = torch.zeros(LAYERS, 1, TAPS - 1, channels, dtype=torch.bfloat16)
    recurrent = torch.zeros(LAYERS, 1, V_HEADS, K_DIM, V_DIM)
    none = torch.tensor([-1], dtype=torch.int32)
    slot = torch.zeros(1, dtype=torch.int32)
    bits = None
    if is_draft:
        bits = torch.tensor([(1 << node + 1) - 1 for node in range(num_tokens)])
    metadata = StateMetadata(
        torch.tensor([0, num_tokens], dtype=torch.int32), slot, none if is_draft else slot, none, slot, bits
    )
    best = float("inf")
    for _ in range(RUNS):
        began = time.thread_time()
        for layer in range(LAYERS):
            gated_delta(qkv, z, b, a, weights, conv[layer], recurrent[layer], metadata)
        best = min(best, time.thread_time() - began)
    return best * 1e3 / num_tokens


if __name__ == "__main__":
    torch.set_num_threads(1)
    for num_tokens in (1, 16, 64, 256):
        print(f"{num_tokens:4} tokens: {ms_per_token(num_tokens, is_draft=False):.2f} ms per token")
    for num_tokens in (8, 32):
        print(f"{num_tokens:4} nodes of a draft: {ms_per_token(num_tokens, is_draft=True):.2f} ms per token")
