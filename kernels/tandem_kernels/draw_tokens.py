"""One token per row of logits, greedily or at random, all rows in one call on the device.

    row        = (logits - max) / temperature
    top-k      the k largest stay, and those equal to the k-th
    top-p      then: the fewest most likely tokens with p of the remaining weight; of equals, lower ids
    min-p      then: tokens at least min_p times as likely as the most likely one
    race       token t arrives at time -log(1 - u_t) / exp(row_t); the first wins (Gumbel-max)
    u_t        52 bits of SplitMix64's output number t + 1 after the state `key`, in (0, 1)

Inverse transform sampling needs one random number instead of V, but noise in the logits shifts all its
intervals: noise of 1e-5 changed 5 of 1000 tokens, hence one 64-token text in four. In the race it changed
none of 1000, and noise of 1e-4 none either.

A token depends only on its row, its parameters and its key. Sums and times are float64. On CPUs, compiled
(csrc/sample.cpp) or not, exp has the bits of numpy's float32 exp: two ways to compute a token differ when two
tokens' times, or a sum and p, agree to 15 digits. On GPUs exp is rounded from float64: they differ from CPUs
when those agree to 6 digits.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt
import torch

from tandem_kernels import native

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
    """Return token ids [R] int64; -1 for a row that holds NaN or +inf, or nothing but -inf.

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
    if native.LIBRARY is None:
        return draw_reference(logits, keys, temperature, top_k, top_p, log_min_p)
    drawn = keys.new_empty(num_rows)
    parameters = [t.contiguous() for t in (keys, temperature, top_k, top_p, log_min_p)]
    native.LIBRARY.tandem_draw_tokens(
        logits.data_ptr(), *[t.data_ptr() for t in parameters], drawn.data_ptr(), num_rows, logits.shape[1],
        max(1, min(num_rows, torch.get_num_threads())),
    )  # fmt: skip
    return drawn


def draw_token(
    row: npt.NDArray[np.float32], key: int, temperature: float, top_k: int, top_p: float, log_min_p: float
) -> int:
    """draw_tokens of one row [V] on the host; key in [0, 2^64)."""
    row = np.ascontiguousarray(row)
    if native.LIBRARY is None:
        return int(
            draw_reference(
                torch.from_numpy(row)[None],
                torch.from_numpy(np.array([key], dtype=np.uint64).view(np.int64)),
                torch.tensor([temperature]),
                torch.tensor([top_k]),
                torch.tensor([top_p], dtype=torch.float64),
                torch.tensor([log_min_p]),
            )
        )
    drawn = ctypes.c_int64()
    native.LIBRARY.tandem_draw_tokens(
        row.ctypes.data, ctypes.byref(ctypes.c_uint64(key)), ctypes.byref(ctypes.c_float(temperature)),
        ctypes.byref(ctypes.c_int64(top_k)), ctypes.byref(ctypes.c_double(top_p)),
        ctypes.byref(ctypes.c_float(log_min_p)), ctypes.byref(drawn), 1, len(row), 1,
    )  # fmt: skip
    return drawn.value


def draw_reference(
    logits: torch.Tensor,
    keys: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    log_min_p: torch.Tensor,
) -> torch.Tensor:
    """draw_tokens of CPU tensors without compiled kernels."""
    vocab_size = logits.shape[1]
    largest = logits.amax(1, keepdim=True)
    is_greedy = temperature == 0.0
    row = (logits - largest) / torch.where(is_greedy, 1.0, temperature)[:, None]

    kth = row.sort(1, descending=True).values.gather(1, top_k.clamp(1, vocab_size)[:, None] - 1)
    row = torch.where((row < kth) & (top_k > 0)[:, None], -torch.inf, row)
    weights = torch.from_numpy(np.exp(row.numpy()))

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
    drawn = torch.where(is_greedy, logits.argmax(1), drawn)
    return torch.where(largest[:, 0].isfinite(), drawn, -1)


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
