"""Mixtures of experts: choices, products and sums, compiled and in torch, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from moe_cases import Parts, exact_moe, make_weights, random
from native_libraries import COMPILED, native_library
from tandem_kernels import (
    ExpertProjection,
    MoeWeights,
    PackedExperts,
    Packing,
    RouterScore,
    Routing,
    SharedMlp,
    moe,
    pack_quantized,
    quantize_weight,
)

LIBRARIES = ["off", *COMPILED]
DTYPES = [torch.float32, torch.bfloat16]
INT8, _, Q4_K, Q6_K, *_ = Packing
SOFTMAX, SIGMOID, TOP_SOFTMAX = RouterScore
ROUTINGS = {
    "qwen3": Routing(SOFTMAX, 3, renorm=True),
    "olmoe": Routing(SOFTMAX, 5),
    "deepseek": Routing(SIGMOID, 4, renorm=True, scale=2.5, groups=4, top_groups=2),
    "groups of one": Routing(SIGMOID, 2, groups=12, top_groups=3),
    "gpt-oss": Routing(TOP_SOFTMAX, 4),
    "all": Routing(SIGMOID, 12),
}


def chosen_weights(logits: torch.Tensor, correction: torch.Tensor, routing: Routing) -> torch.Tensor:
    """[T, E] float64, one row and expert at a time: the weights of the chosen experts, zeros elsewhere."""
    out = torch.zeros(logits.shape, dtype=torch.double)
    for row, result in zip(logits.double(), out, strict=True):
        scores = {SOFTMAX: row.softmax(0), SIGMOID: row.sigmoid(), TOP_SOFTMAX: row}[routing.score]
        # As the kernels round: equal numbers stay equal.
        ranks = (scores.float() + correction).tolist()
        size = len(ranks) // routing.groups
        groups = [range(g * size, (g + 1) * size) for g in range(routing.groups)]
        groups.sort(key=lambda g: -sum(sorted((ranks[e] for e in g), reverse=True)[:2]))
        allowed = sorted(e for g in groups[: routing.top_groups] for e in g)
        chosen = sorted(allowed, key=lambda e: -ranks[e])[: routing.top_k]
        weights = scores[chosen]
        if routing.score is TOP_SOFTMAX:
            weights = weights.softmax(0)
        elif routing.renorm:
            weights = weights / weights.sum()
        result[chosen] = weights * routing.scale
    return out


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", ROUTINGS)
def test_experts_are_chosen_and_weighed(name: str, library: str) -> None:
    """Each expert's result is a unit vector, so that the sum shows the weights."""
    hidden, experts, routing = 64, 12, ROUTINGS[name]

    def zeros(columns: int, depth: int) -> PackedExperts:
        packed = pack_quantized(quantize_weight(torch.zeros(columns, depth), INT8))
        return PackedExperts((packed.repeat(experts, 1, 1, 1),), columns)

    x, correction = random(40, hidden), random(experts, seed=5) / 4
    x[1] = 0  # all logits are equal
    correction[7] = correction[3]
    weights = MoeWeights(
        routing,
        random(experts, hidden, seed=1) / 8,
        ExpertProjection(zeros(64, hidden)),
        ExpertProjection(zeros(hidden, 32), torch.eye(experts, hidden)),
        correction=correction,
    )
    with native_library(library):
        result = moe(x, weights)
    wanted = chosen_weights(x @ weights.router.T, correction, routing)
    torch.testing.assert_close(result[:, :experts].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "parts, inner",
    [
        ((None,), 48),
        ((INT8,), 32),
        ((Q4_K, Q6_K), 256),
        ((INT8, None), 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_rows", [2, 30])
def test_results_are_those_of_the_rounded_numbers(
    num_rows: int, parts: Parts, inner: int, dtype: torch.dtype, library: str
) -> None:
    if library == "off" and None in parts:
        parts = None
    weights = make_weights(10, 256, inner, ROUTINGS["qwen3"], parts=parts, dtype=dtype, shared=num_rows == 2)
    x = random(num_rows, 256, dtype=dtype)
    with native_library(library):
        result = moe(x, weights)
    exact = exact_moe(x, weights)
    assert result.dtype == dtype
    error, size = (result.double() - exact).abs(), exact.abs().max()
    median, most = (1e-6, 1e-2) if dtype == torch.float32 else (3e-3, 2e-2)
    # An activation on a rounding boundary may fall to the other side.
    assert error.median() <= median * size
    assert error.max() <= (1e-5 if parts in (None, (None,)) and dtype == torch.float32 else most) * size


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", [None, INT8, Q6_K], ids=str)
def test_a_row_gives_the_same_bits_alone_and_in_any_company(
    packing: Packing | None, dtype: torch.dtype, library: str
) -> None:
    """Also with several threads: 300 rows give some experts more rows than one product of tiles has."""
    weights = make_weights(6, 256, 256, ROUTINGS["qwen3"], parts=(packing,), dtype=dtype, shared=True)
    x = random(300, 256, dtype=dtype)
    try:
        with native_library(library):
            together = moe(x, weights)
            torch.set_num_threads(3)
            assert torch.equal(moe(x, weights), together)
            for first, end in ((0, 1), (5, 9), (40, 70), (70, 300)):
                assert torch.equal(moe(x[first:end].contiguous(), weights), together[first:end])
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "act, gated, limit", [("gelu_tanh", True, None), ("relu2", False, None), ("silu", True, 0.6)]
)
def test_activations(act: str, gated: bool, limit: float | None, library: str) -> None:
    weights = make_weights(6, 64, 64, ROUTINGS["gpt-oss"], parts=(INT8,), shared=True)
    if not gated:  # each expert is twice as wide, and so is what its down projection reads
        wide = make_weights(6, 64, 128, ROUTINGS["gpt-oss"], parts=(INT8,), shared=True)
        shared = SharedMlp(weights.shared.gate_up, wide.shared.down)  # type: ignore[union-attr]
        weights = replace(weights, down=wide.down, shared=shared, act=act, gated=False)
    x = random(7, 64)
    weights = replace(weights, act=act, gated=gated, limit=limit)
    with native_library(library):
        result = moe(x, weights)
    torch.testing.assert_close(result.double(), exact_moe(x, weights), atol=0.05, rtol=0)


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("packing", [None, INT8], ids=str)
def test_experts_that_are_not_chosen_are_not_read(packing: Packing | None, library: str) -> None:
    weights = make_weights(8, 64, 32, Routing(SOFTMAX, 2), parts=(packing,))
    x = random(1, 64)
    chosen = (x @ weights.router.T).topk(2).indices[0].tolist()
    with native_library(library):
        expected = moe(x, weights)
        for projection in (weights.gate_up, weights.down):
            for part in projection.weight.parts:  # type: ignore[union-attr]
                others = [e for e in range(8) if e not in chosen]
                part[others] = 255 if part.dtype == torch.uint8 else torch.nan
        assert torch.equal(moe(x, weights), expected)


@pytest.mark.parametrize("library", COMPILED)
def test_rows_that_are_no_numbers_stay_so_and_harm_no_others(library: str) -> None:
    weights = make_weights(8, 64, 32, ROUTINGS["qwen3"], parts=(INT8,))
    x = random(4, 64)
    with native_library(library):
        expected = moe(x, weights)
        x[1], x[2, 3] = torch.nan, torch.inf
        result = moe(x, weights)
        assert moe(x[:0], weights).shape == (0, 64)
    assert torch.equal(result[[0, 3]], expected[[0, 3]])
    assert not result[1:3].isfinite().any()


def test_weights_that_do_not_fit_are_refused() -> None:
    good = make_weights(8, 64, 32, ROUTINGS["qwen3"], parts=(INT8,))
    for changes, message in (
        ({"gated": False}, r"gate_up and down have shapes .* wanted \[8, I, 64\]"),
        (
            {"shared": SharedMlp(random(6, 64), random(64, 2))},
            r"the shared MLP has shapes .* wanted \[2 I, 64\]",
        ),
        ({"router": good.router.double()}, r"router has shape \[8, 64\] and dtype torch.float64"),
        ({"correction": torch.zeros(7)}, r"correction has shape \[7\] .* wanted \[8\] of float32"),
        ({"routing": Routing(SOFTMAX, 9)}, "9 experts cannot be chosen of 1 groups of 8"),
        ({"routing": Routing(SOFTMAX, 3, groups=4)}, "3 experts cannot be chosen of 1 groups of 2"),
        ({"routing": Routing(SOFTMAX, 1, groups=3)}, "1 of 3 groups cannot be chosen of 8 experts"),
    ):
        with pytest.raises(ValueError, match=message):
            MoeWeights(**(vars(good) | changes))  # type: ignore[arg-type]
    for x in (random(2, 32), random(64, 2).T):
        with pytest.raises(ValueError, match=r"wanted a dense \[T, 64\]"):
            moe(x, good)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_shared_mlp_counts_as_much_as_its_gate_says(library: str) -> None:
    weights = make_weights(8, 64, 32, ROUTINGS["qwen3"], parts=(INT8,), shared=True)
    assert weights.shared is not None
    x = random(5, 64)
    alone = SharedMlp(weights.shared.gate_up, weights.shared.down)
    with native_library(library):
        routed = moe(x, replace(weights, shared=None))
        whole = moe(x, replace(weights, shared=alone)) - routed
        gated = moe(x, weights) - routed
    share = (x @ weights.shared.gate).sigmoid().unsqueeze(1)  # type: ignore[operator]
    torch.testing.assert_close(gated, whole * share, atol=1e-5, rtol=1e-5)
