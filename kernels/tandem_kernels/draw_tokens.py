"""One token per row of logits, greedily or at random, all rows in one call on the device.

    row        = (logits - max) / temperature
    top-k      the k largest stay, and those equal to the k-th
    top-p      then: the fewest most likely tokens with p of the remaining weight; of equals, lower ids
    min-p      then: tokens at least min_p times as likely as the most likely one
    race       token t arrives at time -log(1 - u_t) / exp(row_t); the first wins (Gumbel-max)
    u_t        52 bits of SplitMix64's output number t + 1 after the state `key`, in (0, 1)

A token depends only on its row, its parameters and its key. exp is computed in float64 and rounded to
float32, sums and times in float64: two ways to compute this differ when two tokens' times, or a sum and p,
agree to 15 digits.
"""

from __future__ import annotations

import torch

#: SplitMix64 (Steele, Lea, Flood 2014): output n of the generator with state `key` is mix(key + n * GAMMA).
GAMMA = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def draw_tokens(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> torch.Tensor:
    """Return token ids [R] int64; -1 for a sampled row that holds NaN or +inf, or nothing but -inf.

    Args:
        logits: [R, V] float32, dense.
        keys: [R] int64, random bits.
        temperature: [R] float32; 0 takes the largest logit, the lowest id of equals.
        top_k: [R] int64, 0 for all tokens.
        top_p: [R] float64, 1 for all.
        log_min_p: [R] float32, the logarithm of min_p, -inf for all.

    Raises:
        ValueError: a shape, stride or dtype does not fit.
    """
    num_rows = logits.shape[0]
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(
            f"logits has shape {list(logits.shape)}, strides {list(logits.stride())} and dtype "
            f"{logits.dtype}, wanted a dense [R, V] of float32"
        )
    for name, tensor, dtype in (
        ("keys", keys, torch.int64),
        ("temperature", temperature, torch.float32),
        ("top_k", top_k, torch.int64),
        ("top_p", top_p, torch.float64),
        ("log_min_p", log_min_p, torch.float32),
    ):
        if tensor.shape != (num_rows,) or tensor.dtype != dtype or tensor.device != logits.device:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}, "
                f"wanted [{num_rows}] of {dtype} on {logits.device}"
            )
    if logits.is_cuda:
        from tandem_kernels.gpu import draw_tokens as gpu

        return gpu.draw_tokens(logits, keys, temperature, top_k, top_p, log_min_p)
    vocab_size = logits.shape[1]
    largest = logits.amax(1, keepdim=True)
    is_greedy = temperature == 0.0
    row = (logits - largest) / torch.where(is_greedy, 1.0, temperature)[:, None]

    kth = row.sort(1, descending=True).values.gather(1, top_k.clamp(1, vocab_size)[:, None] - 1)
    row = torch.where((row < kth) & (top_k > 0)[:, None], -torch.inf, row)
    weights = row.double().exp().float()

    sorted_weights = weights.sort(1, descending=True).values
    mass = sorted_weights.double().cumsum(1)
    num_kept = ((mass < top_p[:, None] * mass[:, -1:]).sum(1, keepdim=True) + 1).clamp(max=vocab_size)
    lightest = sorted_weights.gather(1, num_kept - 1)
    heavier, equal = weights > lightest, weights == lightest
    equal &= equal.cumsum(1) <= num_kept - heavier.sum(1, keepdim=True)
    in_nucleus = heavier | equal | (top_p >= 1.0)[:, None]
    weights = torch.where(in_nucleus & (row >= log_min_p[:, None]), weights, 0.0)

    times = -torch.log1p(-uniforms(keys, vocab_size)) / weights.double()
    drawn = torch.where(weights > 0.0, times, torch.inf).argmin(1)
    drawn = torch.where(largest[:, 0].isfinite(), drawn, -1)
    return torch.where(is_greedy, logits.argmax(1), drawn)


def uniforms(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """keys [R] int64 -> [R, num_tokens] float64 in (0, 1): 52 bits of output number t + 1 for token t."""

    def signed(bits: int) -> int:
        return bits - (1 << 64)

    # int64 wraps as uint64 does, but shifts repeat the sign.
    z = torch.arange(1, num_tokens + 1, device=keys.device) * signed(GAMMA) + keys[:, None]
    for shift, factor in zip((30, 27), FACTORS, strict=True):
        z = (z ^ (z >> shift & (1 << 64 - shift) - 1)) * signed(factor)
    z = z ^ (z >> 31 & (1 << 33) - 1)
    return ((z >> 12 & (1 << 52) - 1).double() + 0.5) * 2.0**-52
