"""What a decoder's sublayer computes between its matrix products.

add_norm       hidden <- hidden + scale * delta, then the norm of hidden
norm_rows      the norm of other rows: a sublayer's output, for example
activate       act(gate) * up or act(x)                                    (SwiGLU: Shazeer, 2020)
sigmoid_gate   x * sigmoid(gate), of attention's output
finish_logits  cap * tanh(scale * logits / cap), after the head

    rms     x / sqrt(mean(x ** 2) + eps)                                   (Zhang, Sennrich, 2019)
    layer   (x - mean(x)) / sqrt(mean((x - mean(x)) ** 2) + eps)           (Ba et al., 2016)

The residual stream `hidden` is float32 for every model dtype. In some models a few of its elements are
thousands of times larger than the rest, and sixty additions in bfloat16 lose much of the small ones.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tandem_kernels import native

NORM_KINDS = {"rms": 1, "layer": 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4}


@dataclass(frozen=True, eq=False)
class NormWeights:
    """A norm with its weight and bias [W], best float32, or None.

    Raises ValueError for a kind other than those of NORM_KINDS.
    """

    kind: str
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.kind not in NORM_KINDS:
            raise ValueError(f"norm has kind {self.kind!r}, wanted one of {[*NORM_KINDS]}")

    def float(self) -> NormWeights:
        """The same with float32 tensors, dense, as the compiled kernels read them."""
        weight, bias = (None if t is None else t.float().contiguous() for t in (self.weight, self.bias))
        return NormWeights(self.kind, self.eps, weight, bias)

    def check(self, name: str, width: int) -> None:
        """Raise ValueError unless weight and bias have this width."""
        for part, tensor in (("weight", self.weight), ("bias", self.bias)):
            if tensor is not None and tensor.shape != (width,):
                raise ValueError(f"{name} has a {part} of shape {list(tensor.shape)}, wanted [{width}]")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of x's last dimension in torch, float32."""
        norm, x, width = self.float(), x.float(), x.shape[-1]
        if norm.kind == "layer":
            normed = F.layer_norm(x, (width,), norm.weight, None, norm.eps)
        else:
            normed = F.rms_norm(x, (width,), norm.weight, norm.eps)
        return normed if norm.bias is None else normed + norm.bias


def native_norm(norm: NormWeights | None) -> native.Norm:
    """The kernels' description; holds no reference to the tensors, which are float32. None: no norm."""
    if norm is None:
        return native.Norm()
    weight, bias = (None if t is None else t.data_ptr() for t in (norm.weight, norm.bias))
    return native.Norm(weight, bias, norm.eps, NORM_KINDS[norm.kind])


def add_norm(
    hidden: torch.Tensor,
    delta: torch.Tensor | None,
    norm: NormWeights | None,
    out_dtype: torch.dtype,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Return the norm of hidden + scale * delta, [T, W] of out_dtype; norm None: these numbers themselves.

    Args:
        hidden: [T, W] float32, dense; changed in place unless delta is None.
        delta: [T, W] of out_dtype, or None to add nothing.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    num_tokens, width = hidden.shape
    if delta is not None and delta.shape != hidden.shape:
        raise ValueError(f"delta has shape {list(delta.shape)}, wanted hidden's {list(hidden.shape)}")
    if hidden.dtype != torch.float32:
        raise ValueError(f"hidden has dtype {hidden.dtype}, wanted float32, as the residual stream is kept")
    if norm is not None:
        norm.check("norm", width)
    if hidden.is_cuda:
        from tandem_kernels.gpu import elementwise as gpu

        return gpu.add_norm(hidden, delta, norm, out_dtype, scale=scale)
    out = torch.empty_like(hidden, dtype=out_dtype)
    if not native.covers(width, out, delta) or not hidden.is_contiguous():
        if delta is not None:
            hidden.add_(delta.float(), alpha=scale)
        return (hidden if norm is None else norm(hidden)).to(out_dtype, copy=norm is None)
    assert native.LIBRARY is not None
    held = None if norm is None else norm.float()
    native.LIBRARY.tandem_add_norm(
        hidden.data_ptr(), None if delta is None else delta.data_ptr(), ctypes.byref(native_norm(held)),
        out.data_ptr(), num_tokens, width, native.DTYPE[out_dtype], scale, torch.get_num_threads(),
    )  # fmt: skip
    return out


def norm_rows(x: torch.Tensor, norm: NormWeights, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """x [T, W], dense -> the norm of each row, of out_dtype; None: x's.

    Raises:
        ValueError: a shape does not fit.
    """
    num_tokens, width = x.shape
    out_dtype = out_dtype or x.dtype
    norm.check("norm", width)
    if x.is_cuda:
        from tandem_kernels.gpu import elementwise as gpu

        return gpu.norm_rows(x, norm, out_dtype)
    if not native.covers(width, x) or out_dtype not in native.DTYPE:
        return norm(x).to(out_dtype)
    out = torch.empty_like(x, dtype=out_dtype)
    held = norm.float()
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_norm_rows(
        x.data_ptr(), ctypes.byref(native_norm(held)), out.data_ptr(), num_tokens, width,
        native.DTYPE[x.dtype], native.DTYPE[out_dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def activate(
    x: torch.Tensor,
    act: str,
    gated: bool,
    limit: float | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [T, 2 * F], the gate in the first half of each row, or ungated [T, F] -> [T, F] of out_dtype.

    Args:
        act: one of ACTIVATIONS; relu2 is the square of relu, gelu_tanh the approximation by tanh.
        limit: None, or gpt-oss's clamped SwiGLU: gate <= limit, -limit <= up <= limit, and the result is
            gate * sigmoid(1.702 gate) * (up + 1), whatever act is.
        out_dtype: None is x's.

    Raises:
        ValueError: act is unknown, a row cannot be halved, or limit comes without a gate or is not positive.
    """
    num_tokens, columns = x.shape
    if act not in ACTIVATIONS:
        raise ValueError(f"act is {act!r}, wanted one of {[*ACTIVATIONS]}")
    if gated and columns % 2:
        raise ValueError(f"x has shape {list(x.shape)}, wanted [T, 2 * F] with a gate")
    if limit is not None and not (gated and limit > 0):
        raise ValueError(f"limit is {limit} and gated {gated}, wanted a positive limit with a gate")
    out_dtype = out_dtype or x.dtype
    if x.is_cuda:
        from tandem_kernels.gpu import elementwise as gpu

        return gpu.activate(x, act, gated, limit, out_dtype)
    width = columns // 2 if gated else columns
    if not native.covers(width, x) or out_dtype not in native.DTYPE:
        return _activate(x.float(), act, gated, limit).to(out_dtype)
    out = x.new_empty(num_tokens, width, dtype=out_dtype)
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_activate(
        x.data_ptr(), ctypes.byref(native.Activation(ACTIVATIONS[act], gated, limit or 0.0)), out.data_ptr(),
        num_tokens, width, native.DTYPE[x.dtype], native.DTYPE[out_dtype], torch.get_num_threads(),
    )  # fmt: skip
    return out


def _activate(x: torch.Tensor, act: str, gated: bool, limit: float | None) -> torch.Tensor:
    """`activate` in torch, float32."""
    if limit is not None:
        gate, up = x.chunk(2, dim=1)
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate = x.chunk(2, dim=1)[0] if gated else x
    if act == "silu":
        result = F.silu(gate)
    elif act.startswith("gelu"):
        result = F.gelu(gate, approximate="tanh" if act == "gelu_tanh" else "none")
    else:
        result = gate.relu() if act == "relu" else gate.relu().square()
    return result * x.chunk(2, dim=1)[1] if gated else result


def sigmoid_gate(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x [T, Hq, D], dense, times sigmoid(gate), in place; gate [T, Hq * D] or, per head, [T, Hq], of x's
    dtype.

    Raises:
        ValueError: a shape or dtype does not fit.
    """
    num_tokens, heads, size = x.shape
    per_head = gate.shape == (num_tokens, heads)
    if gate.dtype != x.dtype or not (per_head or gate.shape == (num_tokens, heads * size)):
        raise ValueError(
            f"gate has shape {list(gate.shape)} and dtype {gate.dtype}, wanted "
            f"[{num_tokens}, {heads * size}] or [{num_tokens}, {heads}] of {x.dtype}"
        )
    if not native.covers(size, x, gate):
        factors = torch.sigmoid(gate.float()).view(num_tokens, heads, -1)
        return x.copy_(x.float().mul_(factors))
    assert native.LIBRARY is not None
    native.LIBRARY.tandem_sigmoid_gate(
        x.data_ptr(), gate.data_ptr(), per_head, num_tokens, heads, size, native.DTYPE[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return x


def finish_logits(logits: torch.Tensor, scale: float = 1.0, cap: float | None = None) -> torch.Tensor:
    """logits [R, V] float32, dense, times scale, then cap * tanh(logits / cap) unless cap is None;
    in place."""
    if scale == 1 and cap is None:
        return logits
    if native.LIBRARY is None or logits.is_cuda:
        return logits.mul_(scale) if cap is None else logits.mul_(scale / cap).tanh_().mul_(cap)
    native.LIBRARY.tandem_finish_logits(
        logits.data_ptr(), *logits.shape, scale, cap or 0.0, torch.get_num_threads()
    )
    return logits
