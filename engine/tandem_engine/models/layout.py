"""Our weight file: which tensors it holds and which Hugging Face tensors each is made of.

The file (`model-<dtype>.safetensors`) has the layout that the decoder computes with, so processes map it and
share its pages without a private copy:

    embed_tokens.weight         [V, H]
    positions.weight            [P, H]      a learned embedding of positions
    sublayers.S.B...            branch B of sublayer S:
      pre_norm.weight (, bias)  [H]
      qkv_proj.weight (, bias)  [(Hq + 2 Hkv) D, H]   queries, keys, values: one GEMM
      gate_proj.weight          [Hq D or Hq, H]       of attention's output
      q_norm.weight, k_norm     [D], or [Hq D] and [Hkv D] over all heads
      sinks                     [Hq]
      o_proj.weight (, bias)    [H, Hq D]
      gate_up_proj.weight       [2 I, H]              of an MLP: one GEMM; up_proj [I, H] without a gate
      down_proj.weight (, bias) [H, I]
      router.weight             [E, H] float32        of a mixture of E experts
      correction                [E]
      experts.gate_up_proj.weight [E, 2 I, H]         packed: each expert's panels
      experts.down_proj.weight  [E, H, I]
      shared.gate_up_proj.weight, shared.down_proj.weight, shared.gate [H]
      in_proj.weight            [2 Hk K + 2 Hv V + 2 Hv, H]   of a gated delta rule: q, k, v, z, b, a
      conv                      [2 Hk K + Hv V, 1, taps]
      a_log, dt_bias            [Hv]
      norm.weight               [V]                   of its output; o_proj as above
      post_norm.weight (, bias) [H]
    sublayers.S.post_norm       [H]         of all branches
    norm.weight (, bias)        [H]
    lm_head.weight (, bias)     [V, H]      weight: absent when tied to the embedding

Further forms of the file hold the projections as the compiled CPU kernels want them
(tandem_kernels.packed_linear), in dtype (`-packed`) or quantized (`-w8a8`, `-w4a8`), and always
lm_head.weight, as the embedding is looked up by row. Where the parts of a fused projection have different
bits, the file holds it in pieces: qkv_proj.weight, qkv_proj.weight.1 and so on.

Rows of queries, keys and their norms are interleaved within the rotated part of each head, dimension d beside
d + r/2 (the order of llama GGUFs), for rope.py. Norms that checkpoints store as w for 1 + w hold 1 + w.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import groupby
from math import prod
from operator import itemgetter
from types import MappingProxyType

import torch
from tandem_core.model.spec import Attention, Branch, GatedDelta, Mlp, ModelSpec, Moe, Norm
from tandem_kernels import PANEL, Packing, packed_shape, quantized_shape
from torch import Tensor

from tandem_engine.models.families import Fused, Names, kind_of


class Quantization(StrEnum):
    """How projections are multiplied: in the model's dtype, or by activations of 8 bits; weights then have 8
    bits (W8A8) or as many as the source's, 4 if that is not quantized (W4A8)."""

    NONE = "none"
    W8A8 = "w8a8"
    W4A8 = "w4a8"


@dataclass(frozen=True)
class WeightForm:
    """What one weight file holds."""

    #: Type of the embedding, of weights that are not quantized, of activations and of KV. Norms and biases
    #: are float32.
    dtype: torch.dtype
    packed: bool = False
    quantization: Quantization = Quantization.NONE

    @property
    def suffix(self) -> str:
        if self.quantization is not Quantization.NONE:
            return f"-{self.quantization}"
        return "-packed" if self.packed else ""

    @property
    def file_name(self) -> str:
        return f"model-{str(self.dtype).removeprefix('torch.')}{self.suffix}.safetensors"

    @property
    def holds_head(self) -> bool:
        """Whether lm_head.weight is there although it is tied to the embedding."""
        return self.packed or self.quantization is not Quantization.NONE


@dataclass(frozen=True)
class FileTensor:
    """Shape and dtype of one tensor in the file; a packed projection has more than two dimensions, and uint8
    where it is quantized."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Heads:
    """Rows of rotated heads; of each, the first `dims` are to be interleaved."""

    count: int
    dims: int


@dataclass(frozen=True)
class TensorPart:
    """One Hugging Face tensor or some of its rows, and how they become rows of ours."""

    hf_name: str
    shape: tuple[int, ...]
    #: Shape of the whole tensor, and its rows that belong to the part: `count` from `first` on, and from each
    #: further multiple of `stride`, `groups` times.
    in_source: tuple[int, ...]
    first: int = 0
    count: int = 0
    groups: int = 1
    stride: int = 0
    heads: Heads | None = None
    #: The source has [in, out].
    transposed: bool = False
    #: The source has w for 1 + w.
    one_plus: bool = False
    #: Rows are divided by their lengths.
    normalized: bool = False

    @property
    def is_in_order(self) -> bool:
        """Whether its rows are neighbours in the source and stay in order."""
        return self.groups == 1 and not (self.heads or self.transposed)

    def in_rows(self, span: slice) -> slice:
        """The source's rows to read for these of the part, which are all of them unless `is_in_order`."""
        if self.is_in_order:
            return slice(self.first + span.start, self.first + span.stop)
        if self.transposed:
            return slice(0, self.in_source[0])
        return slice(self.first, self.first + (self.groups - 1) * self.stride + self.count)

    def order(self) -> Tensor | None:
        """Which of the rows read becomes each row of ours; None: they are in order."""
        if self.groups == 1 and not self.heads:
            return None
        starts = torch.arange(self.groups) * self.stride
        rows = (starts.unsqueeze(1) + torch.arange(self.count)).flatten()
        if self.heads:
            heads = rows.view(self.heads.count, -1)
            turned, rest = heads[:, : self.heads.dims], heads[:, self.heads.dims :]
            pairs = turned.view(self.heads.count, 2, -1).transpose(1, 2).flatten(1)
            rows = torch.cat([pairs, rest], 1).flatten()
        return rows

    def arrange(self, read: Tensor) -> Tensor:
        """What was read by `in_rows` as rows of ours."""
        if self.transposed:
            read = read.t()[self.first : self.first + (self.groups - 1) * self.stride + self.count]
        order = self.order()
        rows = read if order is None else read[order]
        if self.normalized:
            return torch.nn.functional.normalize(rows.float())
        return rows.float() + 1 if self.one_plus else rows


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of our file: its parts joined along the first dimension.

    With experts, all of them have equal parts, those of one after those of another; each expert's are joined
    to a matrix, and these are stacked."""

    name: str
    parts: tuple[TensorPart, ...]
    experts: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape(self.parts)

    def _shape(self, parts: tuple[TensorPart, ...]) -> tuple[int, ...]:
        rows, rest = sum(p.shape[0] for p in parts), parts[0].shape[1:]
        return (self.experts, rows // self.experts, *rest) if self.experts else (rows, *rest)

    @property
    def is_projection(self) -> bool:
        return self.name.endswith(("_proj.weight", "lm_head.weight"))

    def by_packing(
        self, packings: Sequence[Packing | None]
    ) -> list[tuple[Packing | None, tuple[TensorPart, ...]]]:
        """Neighbouring parts with equal packings; packings: of each part, None for the form's dtype.

        They are apart only at the boundaries of panels; else all have 8 bits, or the form's dtype.
        """
        each = len(self.parts) // (self.experts or 1)
        by_role = [set(packings[n::each]) for n in range(each)]
        grouped = [
            (packing, [n for n, _ in numbered])
            for packing, numbered in groupby(enumerate(packings[:each]), key=itemgetter(1))
        ]
        sizes = [sum(self.parts[n].shape[0] for n in numbers) for _, numbers in grouped]
        if any(size % PANEL for size in sizes[:-1]) or any(len(found) > 1 for found in by_role):
            return [(None if None in packings else Packing.INT8, self.parts)]
        firsts = range(0, len(self.parts), each)
        return [
            (packing, tuple(self.parts[first + n] for first in firsts for n in numbers))
            for packing, numbers in grouped
        ]

    def in_file(
        self, form: WeightForm, packing: Packing | None, parts: tuple[TensorPart, ...] = ()
    ) -> FileTensor:
        """Shape and dtype in a file of this form, of these parts or of all; packing: where quantized.

        A projection that the kernels do not take (tandem_kernels.packed_linear) stays as it is.
        """
        shape = self._shape(parts or self.parts)
        if not self.is_projection:
            is_exact = len(shape) == 1 or self.name.endswith(".router.weight")
            return FileTensor(shape, torch.float32 if is_exact else form.dtype)
        *stack, rows, depth = shape
        if packing and (quantized := quantized_shape(rows, depth, packing)):
            return FileTensor((*stack, *quantized), torch.uint8)
        if form.holds_head and (packed := packed_shape(rows, depth, form.dtype)):
            return FileTensor((*stack, *packed), form.dtype)
        return FileTensor(shape, form.dtype)


def piece_name(name: str, piece: int) -> str:
    """Name of the n-th tensor in the file that makes up a stored tensor."""
    return f"{name}.{piece}" if piece else name


def share_read(spec: ModelSpec, name: str) -> float:
    """How much of a tensor of the file a step of one token reads: of experts only those that are chosen."""
    match name.split("."):
        case ["sublayers", s, b, "experts", *_]:
            mixer = spec.sublayers[int(s)].branches[int(b)].mixer
            if isinstance(mixer, Moe):
                return mixer.router.top_k / mixer.experts
    return 1.0


def stored_tensors(spec: ModelSpec, names: Names, form: WeightForm) -> Iterator[StoredTensor]:
    """Every tensor of the file for this model, in file order."""
    hidden = spec.hidden_size

    def plain(name: str, hf_name: str, *shape: int, one_plus: bool = False) -> StoredTensor:
        return StoredTensor(name, (TensorPart(hf_name, shape, shape, count=shape[0], one_plus=one_plus),))

    embedding = f"{names.prefix}{names.embed}.weight"
    yield plain("embed_tokens.weight", embedding, spec.vocab_size, hidden)
    if spec.learned_positions:
        positions = f"{names.prefix}{names.positions}.weight"
        yield plain("positions.weight", positions, spec.learned_positions, hidden)
    for s, sublayer in enumerate(spec.sublayers):
        for b, branch in enumerate(sublayer.branches):
            yield from _Branch(names, s, b, branch, hidden).tensors()
        if sublayer.post:
            first = _Branch(names, s, 0, sublayer.branches[0], hidden)
            yield from first.norm("sublayer_post", f"sublayers.{s}.post_norm", sublayer.post, hidden)
    norm = f"{names.prefix}{names.norm}"
    if spec.norm.weight:
        yield plain("norm.weight", f"{norm}.weight", hidden, one_plus=names.one_plus)
    if spec.norm.bias:
        yield plain("norm.bias", f"{norm}.bias", hidden)
    if form.holds_head or not spec.head.tied:
        head = embedding if spec.head.tied else f"{names.head}.weight"
        shape = (spec.vocab_size, hidden)
        part = TensorPart(head, shape, shape, count=shape[0], normalized=names.head_normalized)
        yield StoredTensor("lm_head.weight", (part,))
    if spec.head.bias:
        yield plain("lm_head.bias", f"{names.head}.bias", spec.vocab_size)


class _Branch:
    """The tensors of one branch."""

    def __init__(self, names: Names, sublayer: int, n: int, branch: Branch, hidden: int) -> None:
        self._names, self._sublayer, self._branch, self._hidden = names, sublayer, branch, hidden
        self._kind = kind_of(branch.mixer)
        self._ours = f"sublayers.{sublayer}.{n}"

    def tensors(self) -> Iterator[StoredTensor]:
        branch = self._branch
        if branch.pre:
            yield from self.norm("pre", f"{self._ours}.pre_norm", branch.pre, self._hidden)
        match branch.mixer:
            case Attention():
                yield from self._attention(branch.mixer)
            case Mlp():
                yield from self._mlp(branch.mixer)
            case Moe():
                yield from self._moe(branch.mixer)
            case GatedDelta():
                yield from self._delta(branch.mixer)
        if branch.post:
            yield from self.norm("post", f"{self._ours}.post_norm", branch.post, self._hidden)

    def _attention(self, a: Attention) -> Iterator[StoredTensor]:
        sizes = {"q": a.heads * a.k_dim, "k": a.kv_heads * a.k_dim, "v": a.kv_heads * a.v_dim}
        sizes["gate"] = {None: 0, "head": a.heads, "element": a.heads * a.v_dim}[a.gate]
        rotated = {"q": self._heads(a, a.heads), "k": self._heads(a, a.kv_heads)}
        yield self._projection("qkv_proj", ("q", "k", "v"), sizes, rotated)
        if "q" in a.biases:
            yield self._bias("qkv_proj", ("q", "k", "v"), sizes, rotated)
        if a.gate:
            yield self._projection("gate_proj", ("gate",), sizes)
        if a.qk_norm:
            for role, count in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
                heads = self._heads(a, count if a.norm_whole else 1)
                width = count * a.k_dim if a.norm_whole else a.k_dim
                yield from self.norm(role, f"{self._ours}.{role}", a.qk_norm, width, heads)
        if a.v_norm:
            yield from self.norm("v_norm", f"{self._ours}.v_norm", a.v_norm, a.v_dim)
        if a.sinks:
            yield StoredTensor(f"{self._ours}.sinks", (self._part("sinks", "", (a.heads,), {}),))
        yield self._projection("o_proj", ("o",), {"o": self._hidden}, depth=a.heads * a.v_dim)
        if "o" in a.biases:
            yield self._bias("o_proj", ("o",), {"o": self._hidden})

    def _heads(self, a: Attention, count: int) -> Heads | None:
        return None if a.rope is None or self._names.paired else Heads(count, a.rope.dims)

    def _mlp(self, mlp: Mlp) -> Iterator[StoredTensor]:
        sizes = {"gate": mlp.inner, "up": mlp.inner, "down": self._hidden}
        first, roles = ("gate_up_proj", ("gate", "up")) if mlp.gated else ("up_proj", ("up",))
        yield self._projection(first, roles, sizes)
        if mlp.bias:
            yield self._bias(first, roles, sizes)
        yield self._projection("down_proj", ("down",), sizes, depth=mlp.inner)
        if mlp.bias:
            yield self._bias("down_proj", ("down",), sizes)

    def _moe(self, moe: Moe) -> Iterator[StoredTensor]:
        experts, inner = moe.experts, moe.expert.inner
        yield StoredTensor(
            f"{self._ours}.router.weight", (self._part("router", ".weight", (experts, self._hidden), {}),)
        )
        if moe.router.bias:
            yield StoredTensor(f"{self._ours}.router.bias", (self._part("router", ".bias", (experts,), {}),))
        if moe.router.correction:
            yield StoredTensor(f"{self._ours}.correction", (self._part("correction", "", (experts,), {}),))
        first, roles = ("gate_up_proj", ("gate", "up")) if moe.expert.gated else ("up_proj", ("up",))
        sizes = {"gate": inner, "up": inner, "down": self._hidden}
        for name, wanted, depth in ((first, roles, self._hidden), ("down_proj", ("down",), inner)):
            parts = [
                self._expert(e, experts, role, (sizes[role], depth), sizes)
                for e in range(experts)
                for role in wanted
            ]
            yield StoredTensor(f"{self._ours}.experts.{name}.weight", tuple(parts), experts)
        if moe.shared:
            width = moe.shared.inner
            sizes = {"shared_gate": width, "shared_up": width, "shared_down": self._hidden}
            yield self._projection(f"shared.{first}", [f"shared_{role}" for role in roles], sizes)
            yield self._projection("shared.down_proj", ("shared_down",), sizes, depth=width)
        if moe.shared_gate:
            part = self._part("shared_share", ".weight", (self._hidden,), {})
            yield StoredTensor(f"{self._ours}.shared.gate", (part,))

    def _expert(
        self, expert: int, experts: int, role: str, shape: tuple[int, int], sizes: Mapping[str, int]
    ) -> TensorPart:
        """One expert's part of a tensor of its own, or of one that holds all experts."""
        part = self._part(role, "", shape, sizes)
        if "{}" in part.hf_name:
            return replace(part, hf_name=f"{part.hf_name.format(expert)}.weight")
        rows, depth = part.in_source
        return replace(part, in_source=(experts, rows, depth), first=part.first + expert * rows)

    def _delta(self, d: GatedDelta) -> Iterator[StoredTensor]:
        keys, values = d.k_heads * d.k_dim, d.v_heads * d.v_dim
        sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": d.v_heads, "a": d.v_heads}
        yield self._projection("in_proj", tuple(sizes), sizes)
        conv = self._part("conv", ".weight", (2 * keys + values, 1, d.conv), {})
        yield StoredTensor(f"{self._ours}.conv", (conv,))
        for role in ("a_log", "dt_bias"):
            yield StoredTensor(f"{self._ours}.{role}", (self._part(role, "", (d.v_heads,), {}),))
        # Not 1 + w in any family.
        norm = self._part("norm", ".weight", (d.v_dim,), {})
        yield StoredTensor(f"{self._ours}.norm.weight", (norm,))
        yield self._projection("o_proj", ("o",), {"o": self._hidden}, depth=values)

    def norm(
        self, role: str, name: str, norm: Norm, width: int, heads: Heads | None = None
    ) -> Iterator[StoredTensor]:
        if norm.weight:
            one_plus = self._names.one_plus
            part = self._part(role, ".weight", (width,), {}, heads, one_plus=one_plus)
            yield StoredTensor(f"{name}.weight", (part,))
        if norm.bias:
            yield StoredTensor(f"{name}.bias", (self._part(role, ".bias", (width,), {}, heads),))

    def _projection(
        self,
        name: str,
        roles: Sequence[str],
        sizes: Mapping[str, int],
        rotated: Mapping[str, Heads | None] = MappingProxyType({}),
        depth: int = 0,
    ) -> StoredTensor:
        parts = [
            self._part(r, ".weight", (sizes[r], depth or self._hidden), sizes, rotated.get(r)) for r in roles
        ]
        return StoredTensor(f"{self._ours}.{name}.weight", tuple(parts))

    def _bias(
        self,
        name: str,
        roles: Sequence[str],
        sizes: Mapping[str, int],
        rotated: Mapping[str, Heads | None] = MappingProxyType({}),
    ) -> StoredTensor:
        parts = [self._part(r, ".bias", (sizes[r],), sizes, rotated.get(r)) for r in roles]
        return StoredTensor(f"{self._ours}.{name}.bias", tuple(parts))

    def _part(
        self,
        role: str,
        suffix: str,
        shape: tuple[int, ...],
        sizes: Mapping[str, int],
        heads: Heads | None = None,
        *,
        one_plus: bool = False,
    ) -> TensorPart:
        """sizes: rows of each role of the mixer, for tensors that hold several."""
        source = self._names.of(self._sublayer, f"{self._kind}.{role}")
        fused = source if isinstance(source, Fused) else Fused(source, (role,))
        sizes = sizes or {role: shape[0]}
        before = sum(sizes[r] for r in fused.roles[: fused.roles.index(role)])
        total = sum(sizes[r] for r in fused.roles)
        transposed = self._names.transposed and len(shape) == 2
        in_source = (total, *shape[1:])
        return TensorPart(
            f"{fused.name}{suffix}",
            shape,
            in_source[::-1] if transposed else in_source,
            first=before // fused.groups,
            count=shape[0] // fused.groups,
            groups=fused.groups,
            stride=total // fused.groups,
            heads=heads,
            transposed=transposed,
            one_plus=one_plus,
        )
