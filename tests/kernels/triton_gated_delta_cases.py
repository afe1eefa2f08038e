"""The gated delta rule in Triton against float64; run by test_triton_layer_ops in a process of its own."""

import os

import pytest
import torch
from gated_delta_cases import Case, Part
from native_libraries import native_library
from tandem_kernels.gpu import gated_delta as gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
MIXED = [
    Part(range(5), final=0),
    Part([5], initial=1, final=1),
    Part(range(6, 11), initial=3, parents=[-1, 0, 1, 0, 2]),
    Part(range(11, 15), initial=4, final=4, snapshot=(5, 2)),
]


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return (result.cpu().double() - exact).abs().max().item()


@pytest.mark.parametrize(
    "case",
    [
        Case(15, dtype=torch.bfloat16, k_heads=1, v_heads=2, k_dim=16, v_dim=16),
        Case(15, k_heads=1, v_heads=1, k_dim=24, v_dim=40, per_row=True, gate="sigmoid"),
    ],
    ids=str,
)
def test_a_mix_of_chunks_tokens_and_trees(case: Case) -> None:
    exact, torch_twin, result = case.exact(), case.clone(), case.clone().to(DEVICE)
    expected = exact.run(*MIXED)
    with native_library("off"):
        twin = torch_twin.run(*MIXED)
    out = gpu.gated_delta(*result.arguments(*MIXED))
    assert out.dtype == case.dtype
    floor = 2e-6 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps / 2
    assert error(out, expected) <= 2 * error(twin, expected) + floor * expected.abs().max().item()
    assert error(result.recurrent, exact.recurrent) <= 2 * error(torch_twin.recurrent, exact.recurrent) + 1e-6
    assert torch.equal(result.conv.cpu().double(), exact.conv)


def test_the_bits_do_not_depend_on_chunks_or_trees() -> None:
    case = Case(6, k_heads=1, v_heads=1, k_dim=16, v_dim=16).to(DEVICE)
    whole, single, tree = case.clone(), case.clone(), case.clone()
    expected = gpu.gated_delta(*whole.arguments(Part(range(6), initial=2, final=2)))
    outs = [gpu.gated_delta(*single.arguments(Part([row], initial=2, final=2))) for row in range(6)]
    assert torch.equal(torch.cat(outs), expected)
    assert torch.equal(single.recurrent, whole.recurrent)
    assert torch.equal(single.conv, whole.conv)
    # The text 0 .. 5 is the tree's path 0, 1, 3, 4, 6, 7.
    rows, parents = [0, 1, 5, 2, 3, 0, 4, 5], [-1, 0, 0, 1, 3, 3, 4, 6]
    verified = gpu.gated_delta(*tree.arguments(Part(rows, initial=2, parents=parents)))
    assert torch.equal(verified[[0, 1, 3, 4, 6, 7]], expected)
    assert torch.equal(tree.recurrent, case.recurrent)
