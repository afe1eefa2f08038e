"""Add a layer's contribution to the residual stream and normalise the sum, in one pass.

hidden <- hidden + delta
normed  = hidden / sqrt(mean(hidden ** 2) + eps) * weight          (RMSNorm: Zhang and Sennrich, 2019)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels import native


def add_rms_norm(
    hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Return normed [T, H].

    Args:
        hidden: [T, H], dense; changed in place unless delta is None.
        delta: [T, H] of hidden's dtype, or None to add nothing.
        weight: [H] of hidden's dtype.

    Raises:
        ValueError: the shapes do not fit.
    """
    num_tokens, width = hidden.shape
    if weight.shape != (width,) or (delta is not None and delta.shape != hidden.shape):
        raise ValueError(
            f"hidden has shape {list(hidden.shape)}, delta {None if delta is None else list(delta.shape)}, "
            f"weight {list(weight.shape)}, wanted [T, H], [T, H] and [H]"
        )
    if not native.covers(width, hidden, delta, weight):
        if delta is not None:
            hidden += delta
        return F.rms_norm(hidden, (width,), weight, eps)
    out = torch.empty_like(hidden)
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_add_rms_norm(
        hidden.data_ptr(), None if delta is None else delta.data_ptr(), weight.data_ptr(), out.data_ptr(),
        num_tokens, width, native.DTYPE[hidden.dtype], eps, torch.get_num_threads(),
    )  # fmt: skip
    return out
