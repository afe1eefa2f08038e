"""What a layer computes between its matrix products.

add_rms_norm   hidden <- hidden + delta
               normed  = hidden / sqrt(mean(hidden ** 2) + eps) * weight   (RMSNorm: Zhang, Sennrich, 2019)
silu_mul       silu(gate) * up, with silu(x) = x / (1 + exp(-x))           (SwiGLU: Shazeer, 2020)

The residual stream `hidden` is float32 for every model dtype. In some models a few of its elements are
thousands of times larger than the rest, and sixty additions in bfloat16 lose much of the small ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels import native


def add_rms_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return normed [T, H] of dtype; None: weight's.

    Args:
        hidden: [T, H] float32, dense; changed in place unless delta is None.
        delta: [T, H] of the result's dtype, or None to add nothing.
        weight: [H]; the decoder's are float32, whatever the model's dtype.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    num_tokens, width = hidden.shape
    dtype = dtype or weight.dtype
    if weight.shape != (width,) or (delta is not None and delta.shape != hidden.shape):
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, delta {None if delta is None else list(delta.shape)}, "
            f"weight {list(weight.shape)}, wanted [T, H], [T, H] and [H]"
        )
    if hidden.dtype != torch.float32:
        raise ValueError(f"hidden has dtype {hidden.dtype}, wanted float32, as the residual stream is kept")
    if hidden.is_cuda:
        from tandem_kernels.gpu import elementwise as gpu

        return gpu.add_rms_norm(hidden, delta, weight, eps, dtype)
    weight = weight.float()
    out = torch.empty_like(hidden, dtype=dtype)
    if not native.covers(width, out, delta) or not hidden.is_contiguous():
        if delta is not None:
            hidden += delta
        return F.rms_norm(hidden, (width,), weight, eps).to(dtype)
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_add_rms_norm(
        hidden.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), out.data_ptr(),
        num_tokens, width, native.DTYPE[dtype], eps, torch.get_num_threads(),
    )  # fmt: skip
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * F], the gate in the first half of each row -> [T, F] of the same dtype.

    Raises:
        ValueError: a row cannot be halved.
    """
    num_tokens, doubled = gate_up.shape
    if doubled % 2:
        raise ValueError(f"gate_up has shape {list(gate_up.shape)}, wanted [T, 2 * F]")
    if gate_up.is_cuda:
        from tandem_kernels.gpu import elementwise as gpu

        return gpu.silu_mul(gate_up)
    width = doubled // 2
    if not native.covers(width, gate_up):
        gate, up = gate_up.chunk(2, dim=1)
        return F.silu(gate).mul_(up)
    out = gate_up.new_empty(num_tokens, width)
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_silu_mul(
        gate_up.data_ptr(), out.data_ptr(), num_tokens, width, native.DTYPE[gate_up.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out
