"""The gated delta rule: a recurrent state instead of keys and values, after a short causal convolution.

    x_t       silu of a convolution of the token's and the last taps - 1 inputs, per channel: q, k, v
    q, k      divided by their lengths; q also by sqrt(k_dim)
    decay_t   exp(-rate * softplus(a_t + bias)), per value head, or per row of its state
    S_t       decay_t * S_{t-1} + k_t outer sigmoid(b_t) * (v_t - k_t (decay_t * S_{t-1}))
    out_t     rms_norm(q_t S_t) * weight * silu(z_t)

(Gated DeltaNet: Yang, Kautz, Hatamizadeh, 2024, arxiv 2412.06464, in Qwen3-Next and Qwen3.5; with decay per
row Kimi Delta Attention, arxiv 2510.26692.) S is [k_dim, v_dim] per value head; value heads share the k heads
in groups of v_heads / k_heads neighbours.

Tokens are computed one by one, in the same order in a chunk, alone and as a draft's nodes: in the compiled
and the Triton kernels the bits depend on the text alone. A tree continues the state of each node's parent and
writes nothing. When its path is accepted, a second call over the path's rows as a causal sequence, with the
same inputs, advances the state: one pass more over a state than a step without drafts takes, and states never
lag behind their texts.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from tandem_kernels import native
from tandem_kernels.turbo_attention.interface import MAX_TREE_NODES

#: Added to the squared lengths of q and k.
LENGTH_EPS = 1e-6
#: Most taps of the convolution, in the compiled and the Triton kernels.
MAX_TAPS = 8


@dataclass(frozen=True, eq=False)
class StateMetadata:
    """The B sequences of one step and the slots of their states; contiguous tensors on one device.

    A sequence is a tree by the rule of `AttentionMetadata`; its nodes come after their parents, and have one
    root. A sequence without rows writes nothing. A slot that a sequence writes is no other sequence's.
    """

    #: [B + 1] int32, from 0: rows of sequence b are [query_start_loc[b], query_start_loc[b + 1]).
    query_start_loc: torch.Tensor
    #: [B] int32: the slot of the state before the first row; -1: zeros, the state before any text.
    initial_slots: torch.Tensor
    #: [B] int32: the slot that receives the state after the last row, perhaps the initial one; -1: none. -1
    #: for trees.
    final_slots: torch.Tensor
    #: [B] int32: the slot that receives the state after snapshot_rows[b] rows, 1 to all of them; -1: none.
    snapshot_slots: torch.Tensor
    snapshot_rows: torch.Tensor
    #: [T] int64 as of `AttentionMetadata`; None: no trees.
    ancestor_bits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        num_seqs = self.initial_slots.shape[0]
        for name, size in (
            ("query_start_loc", num_seqs + 1), ("initial_slots", num_seqs), ("final_slots", num_seqs),
            ("snapshot_slots", num_seqs), ("snapshot_rows", num_seqs),
        ):  # fmt: skip
            self._check(name, getattr(self, name), torch.int32, size)
        if self.ancestor_bits is not None:
            self._check("ancestor_bits", self.ancestor_bits, torch.int64, None)

    def _check(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int | None) -> None:
        if tensor.dim() != 1 or size not in (None, tensor.shape[0]) or tensor.dtype != dtype:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, wanted "
                f"[{'T' if size is None else size}] of {dtype}"
            )
        if tensor.device != self.initial_slots.device or not tensor.is_contiguous():
            raise ValueError(f"{name} is on {tensor.device} or strided, wanted dense and all on one device")

    def parents(self) -> list[list[int]]:
        """Per sequence and row, the row of the sequence that it continues; -1: none. CPU tensors only.

        Raises ValueError where the bits are not those of a tree in topological order.
        """
        starts = self.query_start_loc.tolist()
        parents = []
        for start, stop in itertools.pairwise(starts):
            rows = list(range(-1, stop - start - 1))
            bits = None if self.ancestor_bits is None else self.ancestor_bits[start:stop].tolist()
            if bits and len(bits) <= MAX_TREE_NODES and bits[0]:
                bits = [b & (1 << 64) - 1 for b in bits]
                for node, others in enumerate(b ^ 1 << node for node, b in enumerate(bits)):
                    rows[node] = others.bit_length() - 1
                    if rows[node] >= node or (rows[node] < 0) != (node == 0) or (
                        node and bits[rows[node]] != others
                    ):  # fmt: skip
                        raise ValueError(
                            f"ancestor_bits[{start + node}] is {bits[node]:#x}, wanted its own bit and the "
                            "bits of an earlier node"
                        )
            parents.append(rows)
        return parents


@dataclass(frozen=True, eq=False)
class GatedDeltaWeights:
    """One layer's own weights, dense float32 on the device of the states."""

    #: [taps, 2 * k_heads * k_dim + v_heads * v_dim], the oldest input's first.
    conv: torch.Tensor
    #: [v_heads], positive: the exponential of what models store as A_log.
    decay_rate: torch.Tensor
    #: [v_heads], or [v_heads * k_dim] for a decay per row of the state.
    decay_bias: torch.Tensor
    #: [v_dim]
    norm: torch.Tensor
    eps: float
    #: Applied to z, multiplies the normed output.
    gate: Literal["silu", "sigmoid"] = "silu"


def gated_delta(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: GatedDeltaWeights,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    metadata: StateMetadata,
) -> torch.Tensor:
    """Return out [T, v_heads * v_dim] of qkv's dtype; conv and recurrent are changed as metadata says.

    Args:
        qkv: [T, 2 * k_heads * k_dim + v_heads * v_dim] float32, bfloat16 or float16: before the convolution.
        z: [T, v_heads * v_dim]; b: [T, v_heads]; a: [T, v_heads] or [T, v_heads * k_dim]: of qkv's dtype.
            Rows of these four may lie apart, as columns of one projection do.
        conv: [slots, taps - 1, channels of qkv] of qkv's dtype, dense: the last inputs, the oldest first.
        recurrent: [slots, v_heads, k_dim, v_dim] float32, dense. (The torch path also takes float64.)

    Raises:
        ValueError: a shape, stride, dtype, device or value does not fit; nothing is changed.
    """
    _check(qkv, z, b, a, weights, conv, recurrent, metadata)
    if qkv.is_cuda:
        from tandem_kernels.gpu import gated_delta as gpu

        return gpu.gated_delta(qkv, z, b, a, weights, conv, recurrent, metadata)
    _, v_heads, k_dim, v_dim = recurrent.shape
    if (
        native.LIBRARY is None
        or qkv.dtype not in native.DTYPE
        or recurrent.dtype != torch.float32
        or k_dim % 16
        or v_dim % 16
    ):
        return _torch_gated_delta(qkv, z, b, a, weights, conv, recurrent, metadata)
    out = qkv.new_empty(qkv.shape[0], v_heads * v_dim)
    bits = metadata.ancestor_bits
    states = native.States(
        metadata.query_start_loc.data_ptr(), None if bits is None else bits.data_ptr(),
        metadata.initial_slots.data_ptr(), metadata.final_slots.data_ptr(),
        metadata.snapshot_slots.data_ptr(), metadata.snapshot_rows.data_ptr(),
        metadata.initial_slots.shape[0], qkv.shape[0], recurrent.shape[0],
    )  # fmt: skip
    layer = native.GatedDelta(
        weights.conv.data_ptr(), weights.decay_rate.data_ptr(), weights.decay_bias.data_ptr(),
        weights.norm.data_ptr(), conv.data_ptr(), recurrent.data_ptr(),
        (qkv.shape[1] - v_heads * v_dim) // (2 * k_dim), v_heads, k_dim, v_dim, weights.conv.shape[0],
        a.shape[1] != v_heads, weights.gate == "sigmoid", weights.eps,
    )  # fmt: skip
    rows = [value for tensor in (qkv, z, b, a) for value in (tensor.data_ptr(), tensor.stride(0))]
    wrong = native.LIBRARY.tandem_gated_delta(
        states, layer, native.GatedDeltaInputs(*rows), out.data_ptr(), native.DTYPE[qkv.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    if wrong >= 0:
        _check_values(metadata, qkv.shape[0], recurrent.shape[0])
        raise ValueError(f"the metadata of sequence {wrong} does not fit")
    return out


def _torch_gated_delta(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: GatedDeltaWeights,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    metadata: StateMetadata,
) -> torch.Tensor:
    """`gated_delta` as its formulas, in the dtype of recurrent."""
    _check_values(metadata, qkv.shape[0], recurrent.shape[0])
    dtype = recurrent.dtype
    _, v_heads, k_dim, v_dim = recurrent.shape
    num_taps, channels = weights.conv.shape
    k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
    starts = metadata.query_start_loc.tolist()
    slots = [
        tensor.tolist()
        for tensor in (
            metadata.initial_slots, metadata.final_slots, metadata.snapshot_slots, metadata.snapshot_rows
        )
    ]  # fmt: skip
    beta = b.to(dtype).sigmoid()
    rate = weights.decay_rate.to(dtype)[:, None]
    softplus = F.softplus(a.to(dtype) + weights.decay_bias)
    decay = (-rate * softplus.view(len(a), v_heads, -1)).exp()
    out = torch.empty(qkv.shape[0], v_heads, v_dim, dtype=dtype)
    written = []
    for seq, (parents, initial, final, snapshot, snapshot_rows) in enumerate(
        zip(metadata.parents(), *slots, strict=True)
    ):
        first, num_rows = starts[seq], len(parents)
        kept = qkv.new_zeros(num_taps - 1, channels) if initial < 0 else conv[initial]
        inputs = torch.cat([kept, qkv[first : first + num_rows]])
        # Row t of inputs is token t - (num_taps - 1); that before the first token is num_taps - 2.
        chains = []
        for row in range(num_rows):
            chain = [row]
            while len(chain) < num_taps:
                chain.append(parents[chain[-1]] if chain[-1] >= 0 else chain[-1] - 1)
            chains.append([num_taps - 1 + r for r in reversed(chain)])
        windows = inputs[torch.tensor(chains, dtype=torch.int64).view(-1, num_taps)].to(dtype)
        x = F.silu((windows * weights.conv).sum(1))
        q, k, v = torch.split(x, [k_heads * k_dim, k_heads * k_dim, v_heads * v_dim], 1)
        q, k = (
            (heads / (heads.square().sum(2, keepdim=True) + LENGTH_EPS).sqrt())
            .repeat_interleave(v_heads // k_heads, 1)
            for heads in (q.reshape(-1, k_heads, k_dim), k.reshape(-1, k_heads, k_dim))
        )  # fmt: skip
        q, v = q / k_dim**0.5, v.reshape(-1, v_heads, v_dim)
        before = (
            torch.zeros(v_heads, k_dim, v_dim, dtype=dtype) if initial < 0 else recurrent[initial].clone()
        )
        states: dict[int, torch.Tensor] = {-1: before}
        is_chain = parents == list(range(-1, num_rows - 1))
        for row, parent in enumerate(parents):
            state = states[parent] * decay[first + row].unsqueeze(2)
            known = (k[row].unsqueeze(2) * state).sum(1)
            change = beta[first + row].unsqueeze(1) * (v[row] - known)
            state = state + k[row].unsqueeze(2) * change.unsqueeze(1)
            out[first + row] = (q[row].unsqueeze(2) * state).sum(1)
            states[row] = state
            if snapshot >= 0 and row + 1 == snapshot_rows:
                written.append((snapshot, inputs[row + 1 : row + num_taps], state))
            if is_chain:
                del states[parent]
        if final >= 0 and num_rows:
            written.append((final, inputs[num_rows:], states[num_rows - 1]))
    for slot, kept, state in written:
        conv[slot], recurrent[slot] = kept, state
    normed = F.rms_norm(out, (v_dim,), eps=weights.eps) * weights.norm
    gate = z.to(dtype).reshape(-1, v_heads, v_dim)
    return (normed * (F.silu(gate) if weights.gate == "silu" else gate.sigmoid())).flatten(1).to(qkv.dtype)


def _check(
    qkv: torch.Tensor,
    z: torch.Tensor,
    b: torch.Tensor,
    a: torch.Tensor,
    weights: GatedDeltaWeights,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    metadata: StateMetadata,
) -> None:
    if recurrent.dim() != 4 or weights.conv.dim() != 2:
        raise ValueError(
            f"recurrent has shape {list(recurrent.shape)} and weights.conv {list(weights.conv.shape)}, "
            "wanted [slots, v_heads, k_dim, v_dim] and [taps, channels]"
        )
    num_slots, v_heads, k_dim, v_dim = recurrent.shape
    num_taps, channels = weights.conv.shape
    k_heads, rest = divmod(channels - v_heads * v_dim, 2 * k_dim)
    if rest or k_heads < 1 or v_heads % k_heads:
        raise ValueError(
            f"weights.conv has {channels} channels, wanted 2 * k_heads * {k_dim} + {v_heads} * {v_dim} with "
            "k_heads a divisor of v_heads"
        )
    if not 2 <= num_taps <= MAX_TAPS:
        raise ValueError(f"weights.conv has {num_taps} taps, wanted 2 to {MAX_TAPS}")
    num_tokens, per_row = qkv.shape[0], a.shape[-1] == v_heads * k_dim and k_dim > 1
    num_decays = v_heads * (k_dim if per_row else 1)
    float32 = recurrent.dtype if recurrent.dtype == torch.float64 else torch.float32
    wanted = {
        "qkv": (qkv, (num_tokens, channels), qkv.dtype),
        "z": (z, (num_tokens, v_heads * v_dim), qkv.dtype),
        "b": (b, (num_tokens, v_heads), qkv.dtype),
        "a": (a, (num_tokens, num_decays), qkv.dtype),
        "conv": (conv, (num_slots, num_taps - 1, channels), qkv.dtype),
        "recurrent": (recurrent, recurrent.shape, float32),
        "weights.conv": (weights.conv, (num_taps, channels), float32),
        "weights.decay_rate": (weights.decay_rate, (v_heads,), float32),
        "weights.decay_bias": (weights.decay_bias, (num_decays,), float32),
        "weights.norm": (weights.norm, (v_dim,), float32),
    }
    for name, (tensor, shape, dtype) in wanted.items():
        if tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, wanted {list(shape)} of "
                f"{dtype}"
            )
        is_dense = tensor.stride(-1) == 1 if name in ("qkv", "z", "b", "a") else tensor.is_contiguous()
        if not is_dense or tensor.device != metadata.initial_slots.device:
            raise ValueError(
                f"{name} has strides {list(tensor.stride())} on {tensor.device}, wanted it dense on the "
                f"metadata's device {metadata.initial_slots.device}"
            )
    if metadata.ancestor_bits is not None and metadata.ancestor_bits.shape[0] != num_tokens:
        raise ValueError(
            f"ancestor_bits has shape {list(metadata.ancestor_bits.shape)}, wanted [{num_tokens}]"
        )


def _check_values(metadata: StateMetadata, num_tokens: int, num_slots: int) -> None:
    """Raise ValueError unless the values fit each other, T rows and the slots; CPU tensors only."""
    starts = metadata.query_start_loc.tolist()
    if starts[0] != 0 or starts[-1] > num_tokens or starts != sorted(starts):
        raise ValueError(
            f"query_start_loc is {starts}, wanted non-decreasing from 0 to T = {num_tokens} at most"
        )
    for name in ("initial_slots", "final_slots", "snapshot_slots"):
        slots = getattr(metadata, name).tolist()
        if not all(-1 <= slot < num_slots for slot in slots):
            raise ValueError(f"{name} is {slots}, wanted slots below {num_slots}, or -1")
    bits = None if metadata.ancestor_bits is None else metadata.ancestor_bits.tolist()
    for seq, parents in enumerate(metadata.parents()):
        n = len(parents)
        snapshot, rows = metadata.snapshot_slots[seq].item(), metadata.snapshot_rows[seq].item()
        if snapshot >= 0 and not 1 <= rows <= n:
            raise ValueError(f"snapshot_rows[{seq}] is {rows}, wanted 1 to its sequence's {n} rows")
        is_tree = bits is not None and 0 < n <= MAX_TREE_NODES and bits[starts[seq]] != 0
        if is_tree and (snapshot >= 0 or metadata.final_slots[seq] >= 0):
            raise ValueError(f"sequence {seq} is a tree, which writes no slot: wanted final and snapshot -1")
