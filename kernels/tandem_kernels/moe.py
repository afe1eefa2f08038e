"""A mixture of experts: a router chooses some of many small MLPs for each row.

    logits = x @ router.T                                 in float32, as everything up to the weights
    scores = softmax(logits) or sigmoid(logits)
    chosen = the top_k experts by score + correction, largest first, the lower of equals first
    w      = scores[chosen] (/ their sum) * scale
    out    = sum over chosen of w * down(act(gate(x)) * up(x)) (+ sigmoid(x . shared_gate)) * shared MLP)

Choice in groups: DeepSeek-V3 (arxiv 2412.19437), where only experts of the best groups may be chosen; a group
counts as much as its two best. Compiled kernels (csrc/moe.cpp) sort the chosen experts' rows by expert and
read only experts that were chosen; `reference` is the same in plain torch. A row's result does not depend on
the other rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import chain

import torch
import torch.nn.functional as F

from tandem_kernels import native
from tandem_kernels.elementwise import ACTIVATIONS, activate
from tandem_kernels.packed_linear import PackedWeight, native_weight, pack_weight, packed_linear


class RouterScore(StrEnum):
    """How logits become scores; top_softmax: softmax over the chosen ones."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    TOP_SOFTMAX = "top_softmax"


@dataclass(frozen=True)
class Routing:
    """How experts are chosen and weighed."""

    score: RouterScore
    top_k: int
    #: Whether the chosen weights are divided by their sum.
    renorm: bool = False
    scale: float = 1.0
    #: Experts are chosen among the top_groups of `groups` groups.
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class PackedExperts:
    """The packings of E weights [columns, depth] of equal shape: each part is [E, ...], of which part[e] is a
    part of a `PackedWeight`."""

    parts: tuple[torch.Tensor, ...]
    columns: int

    def __post_init__(self) -> None:
        if len({len(part) for part in self.parts}) != 1:
            raise ValueError(f"parts are of {[len(part) for part in self.parts]} experts")
        _ = self[0]

    @property
    def depth(self) -> int:
        return self[0].depth

    def __getitem__(self, expert: int) -> PackedWeight:
        return PackedWeight(tuple(part[expert] for part in self.parts), self.columns)

    def __len__(self) -> int:
        return len(self.parts[0])


@dataclass(frozen=True)
class ExpertProjection:
    """weight: [E, N, K] of the activations' dtype, or packed. bias: [E, N] float32."""

    weight: torch.Tensor | PackedExperts
    bias: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, int, int]:
        if isinstance(self.weight, PackedExperts):
            return len(self.weight), self.weight.columns, self.weight.depth
        return self.weight.shape[0], self.weight.shape[1], self.weight.shape[2]


@dataclass(frozen=True)
class SharedMlp:
    """An MLP that every row passes; its inner width may differ from the experts'."""

    #: [2 I, H] or [I, H], and [H, I], of the activations' dtype, or packed.
    gate_up: torch.Tensor | PackedWeight
    down: torch.Tensor | PackedWeight
    #: [H] float32, or None: the result is multiplied by the sigmoid of its product with a row.
    gate: torch.Tensor | None = None

    def check(self, hidden: int, *, gated: bool) -> None:
        """Raise ValueError unless the shapes fit."""
        shapes = [
            (w.columns, w.depth) if isinstance(w, PackedWeight) else tuple(w.shape)
            for w in (self.gate_up, self.down)
        ]
        inner = shapes[1][1]
        if shapes != [((1 + gated) * inner, hidden), (hidden, inner)]:
            raise ValueError(
                f"the shared MLP has shapes {shapes}, wanted [{'2 ' * gated}I, {hidden}] and [{hidden}, I]"
            )
        if self.gate is not None and (self.gate.shape != (hidden,) or self.gate.dtype != torch.float32):
            raise ValueError(
                f"the shared MLP's gate has shape {list(self.gate.shape)} and dtype {self.gate.dtype}, "
                f"wanted [{hidden}] of float32"
            )


@dataclass(frozen=True, eq=False)
class MoeWeights:
    """One layer's mixture of E experts, checked and ready to run.

    Raises:
        ValueError: shapes do not fit, or top_k experts cannot be chosen.
    """

    routing: Routing
    #: [E, H] float32.
    router: torch.Tensor
    #: gate above up of each expert, [E, 2 I, H]; or [E, I, H] if not gated.
    gate_up: ExpertProjection
    #: [E, H, I].
    down: ExpertProjection
    #: [E] float32.
    router_bias: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    shared: SharedMlp | None = None
    #: As of `activate`, also of the shared MLP.
    act: str = "silu"
    gated: bool = True
    limit: float | None = None

    def __post_init__(self) -> None:
        routing = self.routing
        experts, hidden = self.router.shape
        _, columns, _ = self.gate_up.shape
        wanted = {
            "router": (self.router, (experts, hidden)),
            "router_bias": (self.router_bias, (experts,)),
            "correction": (self.correction, (experts,)),
            "gate_up.bias": (self.gate_up.bias, (experts, columns)),
            "down.bias": (self.down.bias, (experts, hidden)),
        }
        for name, (tensor, shape) in wanted.items():
            if tensor is not None and (tensor.shape != shape or tensor.dtype != torch.float32):
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, wanted {list(shape)} "
                    "of float32"
                )
        inner = columns // 2 if self.gated else columns
        shapes = self.gate_up.shape, self.down.shape
        if shapes != ((experts, (1 + self.gated) * inner, hidden), (experts, hidden, inner)):
            raise ValueError(
                f"gate_up and down have shapes {shapes}, wanted [{experts}, {'2 ' * self.gated}I, {hidden}] "
                f"and [{experts}, {hidden}, I]"
            )
        if self.shared is not None:
            self.shared.check(hidden, gated=self.gated)
        groups, top_groups = routing.groups, routing.top_groups
        if experts % groups or not 0 < top_groups <= groups:
            raise ValueError(f"{top_groups} of {groups} groups cannot be chosen of {experts} experts")
        if not 0 < routing.top_k <= experts // groups * top_groups:
            raise ValueError(
                f"{routing.top_k} experts cannot be chosen of {top_groups} groups of {experts // groups}"
            )

    def activated(self, inner: torch.Tensor) -> torch.Tensor:
        return activate(inner, self.act, self.gated, self.limit)

    @property
    def described(self) -> native.Moe:
        """For the compiled kernels, if `runs_natively`; points into these weights."""
        return self._described[0]

    @cached_property
    def _described(self) -> tuple[native.Moe, object]:
        """The description, and what it points to that has no other owner."""
        routing, shared = self.routing, self.shared
        router = PackedWeight((pack_weight(self.router),), len(self.router))
        arrays = [
            native_weight(router, self.router_bias),
            _native_experts(self.gate_up),
            _native_experts(self.down),
        ]
        described = native.Moe(
            router=arrays[0], gate_up=arrays[1], down=arrays[2],
            act=native.Activation(ACTIVATIONS[self.act], self.gated, self.limit or 0.0),
            experts=len(self.router), top_k=routing.top_k, score=list(RouterScore).index(routing.score),
            groups=routing.groups, top_groups=routing.top_groups, renorm=routing.renorm, scale=routing.scale,
        )  # fmt: skip
        if self.correction is not None:
            described.correction = self.correction.data_ptr()
        if shared is not None:
            assert isinstance(shared.gate_up, PackedWeight) and isinstance(shared.down, PackedWeight)
            arrays += [native_weight(shared.gate_up, None), native_weight(shared.down, None)]
            described.shared_gate_up, described.shared_down = arrays[3], arrays[4]
            if shared.gate is not None:
                described.shared_gate = shared.gate.data_ptr()
        return described, (router, arrays)

    def runs_natively(self, dtype: torch.dtype) -> bool:
        """Whether the compiled kernels take these weights, with rows of this dtype."""
        projections: list[object] = [self.gate_up.weight, self.down.weight]
        sizes = [*self.down.shape[1:]]
        if isinstance(shared := self.shared, SharedMlp):
            projections += [shared.gate_up, shared.down]
            sizes.append(shared.down.depth if isinstance(shared.down, PackedWeight) else 0)
        return (
            native.LIBRARY is not None
            and dtype in (torch.float32, torch.bfloat16)
            and not any(isinstance(weight, torch.Tensor) for weight in projections)
            and not any(size % 16 for size in sizes)
        )


def _native_experts(projection: ExpertProjection) -> ctypes.Array[native.LinearWeight]:
    """One expert's pieces after the other's."""
    weight, bias = projection.weight, projection.bias
    assert isinstance(weight, PackedExperts)
    pieces = [native_weight(weight[e], None if bias is None else bias[e]) for e in range(len(weight))]
    return (native.LinearWeight * (len(pieces) * len(pieces[0])))(*chain.from_iterable(pieces))


def moe(x: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    """x [T, H], dense -> [T, H] of the same dtype.

    Raises:
        ValueError: x does not fit.
    """
    if x.shape[1:] != weights.router.shape[1:] or not x.is_contiguous():
        raise ValueError(
            f"x has shape {list(x.shape)} and strides {list(x.stride())}, wanted a dense "
            f"[T, {weights.router.shape[1]}]"
        )
    if x.is_cuda:
        from tandem_kernels.gpu import moe as gpu

        return gpu.moe(x, weights)
    if not weights.runs_natively(x.dtype):
        return reference(x, weights)
    assert native.LIBRARY is not None
    out = torch.empty_like(x)
    native.LIBRARY.tandem_moe(
        ctypes.byref(weights.described), x.data_ptr(), out.data_ptr(), len(x), native.DTYPE[x.dtype],
        torch.get_num_threads(),
    )  # fmt: skip
    return out


def route(
    x: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None, correction: torch.Tensor | None,
    routing: Routing,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """x [T, H] -> the chosen experts [T, top_k] int64, largest score first, and their weights, float32."""
    scores = F.linear(x.float(), router, bias)
    if routing.score is RouterScore.SOFTMAX:
        scores = scores.softmax(1)
    elif routing.score is RouterScore.SIGMOID:
        scores = scores.sigmoid()
    ranks = scores if correction is None else scores + correction
    if routing.groups > 1:
        by_group = ranks.view(len(x), routing.groups, -1)
        sums = by_group.topk(min(2, by_group.shape[2]), dim=2).values.sum(2)
        groups = _largest(sums, routing.top_groups)
        allowed = torch.zeros_like(sums, dtype=torch.bool).scatter_(1, groups, value=True)
        ranks = by_group.masked_fill(~allowed.unsqueeze(2), -torch.inf).flatten(1)
    chosen = _largest(ranks, routing.top_k)
    weights = scores.gather(1, chosen)
    if routing.score is RouterScore.TOP_SOFTMAX:
        weights = weights.softmax(1)
    elif routing.renorm:
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-20)
    return chosen, weights * routing.scale


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """[T, count] indices, the lower of equals first, which topk does not promise."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :count]


def reference(x: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    """The definition, expert by expert; without compiled kernels only quantized packings are taken."""
    chosen, factors = route(x, weights.router, weights.router_bias, weights.correction, weights.routing)
    partial = x.new_zeros(*chosen.shape, x.shape[1], dtype=torch.float32)
    for expert in sorted({*chosen.flatten().tolist()}):
        rows, ranks = (chosen == expert).nonzero(as_tuple=True)
        inner = _linear(x[rows], weights.gate_up, expert)
        partial[rows, ranks] = _linear(weights.activated(inner.to(x.dtype)), weights.down, expert)
    out = (partial * factors.unsqueeze(2)).sum(1)
    if (shared := weights.shared) is not None:
        inner = _product(x, shared.gate_up).to(x.dtype)
        product = _product(weights.activated(inner), shared.down)
        if shared.gate is not None:
            product *= (x.float() @ shared.gate).sigmoid().unsqueeze(1)
        out += product
    return out.to(x.dtype)


def _linear(x: torch.Tensor, projection: ExpertProjection, expert: int) -> torch.Tensor:
    """x [T, K] -> [T, N] float32."""
    product = _product(x, projection.weight[expert])
    return product if projection.bias is None else product + projection.bias[expert]


def _product(x: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return F.linear(x.float(), weight.float())
    return packed_linear(x, weight, out_dtype=torch.float32)
