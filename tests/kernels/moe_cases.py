"""Random mixtures of experts, and what they compute in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tandem_kernels import (
    ExpertProjection,
    MoeWeights,
    PackedExperts,
    PackedWeight,
    Packing,
    Routing,
    SharedMlp,
    pack_quantized,
    pack_weight,
    unpack_quantized,
)
from tandem_kernels.moe import route
from test_quantized_linear import random, random_weight, rounded

#: Of a weight: dense, or parts of these packings, None for the activations' dtype.
Parts = tuple[Packing | None, ...] | None


def random_projection(
    experts: int, columns: int, depth: int, parts: Parts, dtype: torch.dtype, seed: int
) -> torch.Tensor | PackedExperts:
    """About N(0, 1 / depth) unless a packing has its own distribution; parts divide the columns equally."""
    if parts is None:
        return (random(experts, columns, depth, seed=seed) / depth**0.5).to(dtype)
    size = columns // len(parts)
    packed = [
        torch.stack(
            [
                pack_quantized(random_weight(size, depth, packing, seed + 10 * e + n))
                if packing
                else pack_weight((random(size, depth, seed=seed + 10 * e + n) / depth**0.5).to(dtype))
                for e in range(experts)
            ]
        )
        for n, packing in enumerate(parts)
    ]
    return PackedExperts(tuple(packed), columns)


def make_weights(
    experts: int,
    hidden: int,
    inner: int,
    routing: Routing,
    *,
    parts: Parts,
    dtype: torch.dtype = torch.float32,
    shared: bool = False,
) -> MoeWeights:
    """The shared MLP is twice as wide as an expert, and has a gate."""
    down = None if parts is None else parts[:1]

    def projection(number: int, columns: int, depth: int, kinds: Parts, seed: int) -> object:
        return random_projection(number, columns, depth, kinds, dtype, seed)

    gate_up, both = (projection(n, 2 * i, hidden, parts, 1) for n, i in ((experts, inner), (1, 2 * inner)))
    one, wide = (projection(n, hidden, i, down, 500) for n, i in ((experts, inner), (1, 2 * inner)))
    return MoeWeights(
        routing,
        random(experts, hidden, seed=900) / hidden**0.5,
        ExpertProjection(gate_up, random(experts, 2 * inner, seed=901)),
        ExpertProjection(one, random(experts, hidden, seed=902)),
        shared=SharedMlp(both[0], wide[0], random(hidden, seed=903) / 8) if shared else None,
    )


def exact_moe(x: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    """[T, H] float64, with the operator's own choice of experts; quantized products round their rows."""
    chosen, factors = route(x, weights.router, weights.router_bias, weights.correction, weights.routing)
    out = torch.zeros(x.shape, dtype=torch.double)
    up, down = weights.gate_up, weights.down
    for row, result, experts, shares in zip(x, out, chosen.tolist(), factors.double(), strict=True):
        for expert, share in zip(experts, shares, strict=True):
            inner = _product(row, up.weight[expert]) + (0 if up.bias is None else up.bias[expert])
            last = _product(_activated(inner, weights), down.weight[expert])
            result += share * (last + (0 if down.bias is None else down.bias[expert]))
        if (shared := weights.shared) is not None:
            last = _product(_activated(_product(row, shared.gate_up), weights), shared.down)
            gate = torch.ones(()) if shared.gate is None else (row.double() @ shared.gate.double()).sigmoid()
            result += gate * last
    return out


def _activated(inner: torch.Tensor, weights: MoeWeights) -> torch.Tensor:
    gate, up = inner.chunk(2) if weights.gated else (inner, inner.new_ones(()))
    if weights.limit is not None:
        gate, up = gate.clamp(max=weights.limit), up.clamp(-weights.limit, weights.limit)
        return gate * (1.702 * gate).sigmoid() * (up + 1)
    if weights.act == "silu":
        return F.silu(gate) * up
    return up * (gate.relu().square() if weights.act == "relu2" else F.gelu(gate, approximate="tanh"))


def _product(row: torch.Tensor, weight: torch.Tensor | PackedWeight) -> torch.Tensor:
    if isinstance(weight, torch.Tensor):
        return weight.double() @ row.double()
    results = []
    for part in weight.parts:
        if part.dtype == torch.uint8:
            quantized = unpack_quantized(part).dequantize().double()
            results.append(quantized @ rounded(row.unsqueeze(0))[0])
        else:
            panels, lanes, width, per_lane = part.shape
            dense = part.transpose(1, 2).reshape(panels * width, lanes * per_lane)
            results.append(dense.double() @ row.double())
    return torch.cat(results)[: weight.columns]
