"""Add a layer's contribution to the residual stream and normalise the sum, in one pass.

hidden <- hidden + delta
normed  = hidden / sqrt(mean(hidden ** 2) + eps) * weight          (RMSNorm: Zhang and Sennrich, 2019)

The residual stream is float32 whatever the model's dtype. It is small, and in some models a few of its
elements are thousands of times as large as the rest: in bfloat16, sixty additions round much of theirs away.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels import native


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return normed [T, H] of weight's dtype.

    Args:
        hidden: [T, H] float32, dense; changed in place unless delta is None.
        delta: [T, H] of weight's dtype, or None to add nothing.
        weight: [H].

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    num_tokens, width = hidden.shape
    if weight.shape != (width,) or (delta is not None and delta.shape != hidden.shape):
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, delta {None if delta is None else list(delta.shape)}, "
            f"weight {list(weight.shape)}, wanted [T, H], [T, H] and [H]"
        )
    if hidden.dtype != torch.float32:
        raise ValueError(f"hidden has dtype {hidden.dtype}, wanted float32, as the residual stream is kept")
    if hidden.is_cuda:
        from tandem_kernels.gpu import add_rms_norm as gpu

        return gpu.add_rms_norm(hidden, delta, weight, eps)
    if not native.covers(width, weight, delta) or not hidden.is_contiguous():
        if delta is not None:
            hidden += delta
        return F.rms_norm(hidden, (width,), weight.float(), eps).to(weight.dtype)
    out = torch.empty_like(hidden, dtype=weight.dtype)
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_add_rms_norm(
        hidden.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), out.data_ptr(),
        num_tokens, width, native.DTYPE[weight.dtype], eps, torch.get_num_threads(),
    )  # fmt: skip
    return out
