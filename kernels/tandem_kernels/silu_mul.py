"""The activation of a gated feed-forward layer: silu(gate) * up, with silu(x) = x / (1 + exp(-x)).

SwiGLU: Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tandem_kernels import native


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [T, 2 * F], the gate in the first half of each row -> [T, F] of the same dtype.

    Raises:
        ValueError: a row cannot be halved.
    """
    num_tokens, doubled = gate_up.shape
    if doubled % 2:
        raise ValueError(f"gate_up has shape {list(gate_up.shape)}, wanted [T, 2 * F]")
    if gate_up.is_cuda:
        from tandem_kernels.gpu import silu_mul as gpu

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
