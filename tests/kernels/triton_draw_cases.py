"""draw_tokens in Triton draws what its torch twin draws; run by test_triton_layer_ops in its own process.

Under TRITON_INTERPRET=1 the cases run on the CPU, without it on the GPU.
"""

import os

import pytest
import torch
from draw_cases import KINDS, draw_case
from tandem_kernels.draw_tokens import draw_tokens
from tandem_kernels.gpu import draw_tokens as gpu

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


@pytest.mark.parametrize(
    "kind, vocab_size, num_rows",
    [*((kind, 700, 8) for kind in KINDS), ("normal", 1, 8), ("normal", 9001, 8), ("levels", 9001, 8)],
)
def test_the_same_tokens(kind: str, vocab_size: int, num_rows: int) -> None:
    case = draw_case(kind, vocab_size, num_rows if DEVICE == "cpu" else 40 * num_rows)
    expected = draw_tokens(*case)
    result = gpu.draw_tokens(*(tensor.to(DEVICE) for tensor in case))
    assert result.tolist() == expected.tolist()


def test_more_rows_than_one_launch_takes() -> None:
    logits, keys, temperature, _, _, log_min_p = draw_case("normal", 9, num_rows=gpu.ROWS_PER_LAUNCH + 3)
    unfiltered = (torch.zeros_like(keys), torch.ones(len(keys), dtype=torch.float64), log_min_p)
    case = (logits, keys, temperature, *unfiltered)
    expected = draw_tokens(*case).tolist()
    assert len(set(expected)) > 3
    assert gpu.draw_tokens(*(tensor.to(DEVICE) for tensor in case)).tolist() == expected


def test_rows_that_are_no_numbers_give_no_token() -> None:
    case = draw_case("normal", 5000, num_rows=5)
    logits, temperature = case[0], case[2]
    logits[0, 4999] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    for value in (0.0, 1.0):
        temperature[:] = value
        result = gpu.draw_tokens(*(tensor.to(DEVICE) for tensor in case))
        assert result.tolist()[:3] == draw_tokens(*case).tolist()[:3] == [-1, -1, -1]
        assert min(result.tolist()[3:]) >= 0
