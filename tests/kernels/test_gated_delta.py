"""The gated delta rule: compiled and in torch, against float64; the same bits in every division of a text."""

import pytest
import torch
from gated_delta_cases import NUM_SLOTS, Case, Part
from native_libraries import NATIVE, native_library
from tandem_kernels import gated_delta

LIBRARIES = ["off", *NATIVE]
#: A prompt's chunk, a token of a text, the first token of one, a tree, and a chunk that leaves a snapshot.
MIXED = [
    Part(range(20), final=0),
    Part([20], initial=1, final=1),
    Part([21], final=2),
    Part(range(22, 29), initial=3, parents=[-1, 0, 1, 1, 0, 4, 2]),
    Part(range(29, 64), initial=4, final=4, snapshot=(5, 17)),
]


def error(result: torch.Tensor, exact: torch.Tensor) -> float:
    return (result.double() - exact).abs().max().item()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(
    "case",
    [
        Case(64),
        Case(64, dtype=torch.bfloat16),
        Case(64, dtype=torch.float16, per_row=True),
        Case(64, per_row=True, gate="sigmoid", k_heads=3, v_heads=3, k_dim=16, v_dim=16),
        Case(64, k_heads=1, v_heads=3, k_dim=48, v_dim=144, seed=1),
        Case(64, k_heads=1, v_heads=2, k_dim=8, v_dim=12),  # no compiled kernel
    ],
    ids=str,
)
def test_a_mix_of_chunks_tokens_and_trees(case: Case, library: str) -> None:
    exact, torch_twin, result = case.exact(), case.clone(), case.clone()
    expected = exact.run(*MIXED)
    with native_library("off"):
        twin = torch_twin.run(*MIXED)
    with native_library(library):
        out = result.run(*MIXED)
    assert out.dtype == case.dtype
    floor = 2e-6 if case.dtype == torch.float32 else torch.finfo(case.dtype).eps / 2
    assert error(out, expected) <= 2 * error(twin, expected) + floor * expected.abs().max().item()
    assert error(result.recurrent, exact.recurrent) <= 2 * error(torch_twin.recurrent, exact.recurrent) + 1e-6
    assert torch.equal(result.conv.double(), exact.conv)
    untouched = [3, 6]
    assert torch.equal(result.recurrent[untouched], case.recurrent[untouched])


@pytest.mark.parametrize("library", NATIVE)
@pytest.mark.parametrize("case", [Case(45), Case(45, dtype=torch.bfloat16, per_row=True)], ids=str)
def test_the_bits_do_not_depend_on_chunks_company_or_threads(case: Case, library: str) -> None:
    with native_library(library):
        whole = case.clone()
        expected = whole.run(Part(range(45), final=0, snapshot=(1, 16)))
        try:
            for sizes, num_threads in (([1] * 45, 1), ([16, 29], 3), ([2, 3, 1, 33, 6], 2)):
                torch.set_num_threads(num_threads)
                parts, outs, first = case.clone(), [], 0
                for size in sizes:
                    rows = range(first, first + size)
                    other = Part(range(40), initial=6, final=5)
                    initial = 0 if first else -1
                    outs.append(parts.run(other, Part(rows, initial=initial, final=0))[40:])
                    first += size
                    if first == 16:
                        for tensor, snapshot in (
                            (parts.recurrent, whole.recurrent), (parts.conv, whole.conv)
                        ):  # fmt: skip
                            assert torch.equal(tensor[0], snapshot[1])
                assert torch.equal(torch.cat(outs), expected)
                assert torch.equal(parts.recurrent[0], whole.recurrent[0])
                assert torch.equal(parts.conv[0], whole.conv[0])
        finally:
            torch.set_num_threads(1)


@pytest.mark.parametrize("library", NATIVE)
@pytest.mark.parametrize("num_nodes", [9, 64])
def test_a_tree_and_its_accepted_path_give_the_bits_of_single_tokens(num_nodes: int, library: str) -> None:
    case = Case(num_nodes, dtype=torch.bfloat16, v_dim=32)
    generator = torch.Generator().manual_seed(num_nodes)
    parents = [-1, *(int(torch.randint(node, (1,), generator=generator)) for node in range(1, num_nodes))]
    with native_library(library):
        tree = case.clone()
        verified = tree.run(Part(range(num_nodes), initial=2, parents=parents))
        assert torch.equal(tree.recurrent, case.recurrent)
        assert torch.equal(tree.conv, case.conv)
        for last in range(0, num_nodes, 7):
            path = [last]
            while parents[path[0]] >= 0:
                path.insert(0, parents[path[0]])
            single = case.clone()
            outs = [single.run(Part([row], initial=2, final=2)) for row in path]
            assert torch.equal(torch.cat(outs), verified[path])
            accepted = case.clone()
            accepted.run(Part(path, initial=2, final=2))
            assert torch.equal(accepted.recurrent, single.recurrent)
            assert torch.equal(accepted.conv, single.conv)


@pytest.mark.parametrize("library", NATIVE)
def test_extreme_gates_stay_finite(library: str) -> None:
    case = Case(30)
    case.inputs = [x.clone() for x in case.inputs]
    for x in case.inputs[1:]:  # z, b, a
        x[::3], x[1::3] = 3e4, -3e4
    case.inputs[0][5] = 0
    exact = case.exact()
    with native_library(library):
        out = case.run(Part(range(30), final=0))
    expected = exact.run(Part(range(30), final=0))
    assert error(out, expected) <= 1e-4 * expected.abs().max().item()


@pytest.mark.parametrize("library", LIBRARIES)
def test_what_does_not_fit_is_refused_and_changes_nothing(library: str) -> None:
    case = Case(6)
    before = case.clone()
    with native_library(library):
        for message, part in {
            "initial_slots": Part(range(6), initial=NUM_SLOTS, final=0),
            "final_slots": Part(range(6), final=-2),
            "snapshot_slots": Part(range(6), final=0, snapshot=(NUM_SLOTS, 3)),
            r"snapshot_rows\[0\] is 7": Part(range(6), final=0, snapshot=(1, 7)),
            "is a tree": Part(range(6), final=0, parents=[-1, 0, 1, 2, 3, 4]),
            r"ancestor_bits\[2\]": Part(range(6), parents=[-1, 0, -1, 2, 3, 4]),
        }.items():
            with pytest.raises(ValueError, match=message):
                case.run(part)
        arguments = list(case.arguments(Part(range(6), final=0)))
        for message, index, value in (
            (r"z has shape \[6, 16\]", 1, torch.zeros(6, 16)),
            ("a has shape", 3, torch.zeros(6, 5)),
            ("qkv has strides", 0, torch.zeros(320, 6).t()),
            (r"conv has shape \[7, 3, 320\] and dtype torch.bfloat16", 5, case.conv.bfloat16()),
            ("320 channels", 6, torch.zeros(NUM_SLOTS, 4, 24, 48)),
        ):
            changed = [*arguments[:index], value, *arguments[index + 1 :]]
            with pytest.raises(ValueError, match=message):
                gated_delta(*changed)
    assert torch.equal(case.recurrent, before.recurrent)
    assert torch.equal(case.conv, before.conv)
