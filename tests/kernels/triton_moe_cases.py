"""Mixtures of experts in Triton against float64; run by test_triton_layer_ops in a process of its own.

Under TRITON_INTERPRET=1 the cases run on the CPU, without it on the GPU.
"""

from __future__ import annotations

import os
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
import torch
from moe_cases import exact_moe, make_weights
from native_libraries import native_library
from tandem_kernels import MoeWeights, Packing, RouterScore, Routing
from tandem_kernels.gpu import moe as gpu
from tandem_kernels.moe import reference
from test_quantized_linear import random

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
# Triton 3.6's interpreter multiplies bfloat16 wrongly.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
SOFTMAX, SIGMOID, TOP_SOFTMAX = RouterScore


def on_device(value: Any) -> Any:
    """A dataclass with its tensors on DEVICE."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_device(getattr(value, f.name)) for f in fields(value)})
    return value


@pytest.fixture(autouse=True)
def _activations_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter tensors are on the CPU, where `activate` would choose its compiled kernel."""
    if INTERPRETED:
        from tandem_kernels.gpu import elementwise

        monkeypatch.setattr(
            MoeWeights,
            "activated",
            lambda self, x: elementwise.activate(x, self.act, self.gated, self.limit, x.dtype),
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 40])
@pytest.mark.parametrize(
    "routing, experts, inner, shared",
    [
        (Routing(SOFTMAX, 3, renorm=True), 20, 40, False),
        (Routing(SIGMOID, 2, renorm=True, scale=2.5, groups=4, top_groups=2), 8, 72, True),
        (Routing(TOP_SOFTMAX, 4), 4, 64, False),
    ],
    ids=str,
)
def test_moe(
    routing: Routing, experts: int, inner: int, shared: bool, num_rows: int, dtype: torch.dtype
) -> None:
    weights = make_weights(experts, 112, inner, routing, parts=None, dtype=dtype, shared=shared)
    weights = replace(weights, correction=random(experts, seed=5) / 4)
    x = random(num_rows, 112, dtype=dtype)
    result = gpu.moe(x.to(DEVICE), on_device(weights)).cpu()
    with native_library("off"):
        twin = reference(x, weights)
    exact = exact_moe(x, weights)
    error, allowed = ((r.double() - exact).abs().max() for r in (result, twin))
    assert result.dtype == dtype
    assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.abs().max()


def test_a_plan_has_every_pair_once_in_blocks_of_its_expert() -> None:
    chosen = torch.randint(0, 7, (50, 3), generator=torch.Generator().manual_seed(2)).to(DEVICE)
    plan = gpu.Plan.of(chosen, 9)  # experts 7 and 8 have no pairs
    seen = []
    for expert, first in zip(plan.experts.tolist(), plan.first.tolist(), strict=True):
        end = int(plan.ends[expert])
        pairs = plan.order[first : min(first + plan.block_rows, end)]
        assert (chosen.flatten()[pairs] == expert).all()
        seen += pairs.tolist()
    assert sorted(seen) == list(range(150))


def test_no_rows_and_packed_weights() -> None:
    routing = Routing(SOFTMAX, 2)
    dense = make_weights(4, 64, 32, routing, parts=None)
    assert gpu.moe(torch.empty(0, 64, device=DEVICE), on_device(dense)).shape == (0, 64)
    packed = make_weights(4, 64, 32, routing, parts=(Packing.INT8,))
    with pytest.raises(ValueError, match="packed for CPUs"):
        gpu.moe(random(2, 64).to(DEVICE), replace(packed, router=packed.router.to(DEVICE)))
