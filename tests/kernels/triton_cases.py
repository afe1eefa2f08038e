"""The Triton backend against float64; run by test_triton_kernel in a process of its own.

TRITON_INTERPRET must be set before Triton is imported, and then holds for the whole process. Under it the
cases run on the CPU, without it on the GPU. The interpreter's bfloat16 products are wrong, so it gets none.
"""

import os

import pytest
import torch
from attention_cases import Case, Options, Sequence, Shape, assert_as_good_as_torch, make_case

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])

MIX = [
    Sequence(37, 8, tree=True),
    Sequence(30, 1),
    Sequence(0, 70),
    Sequence(16, 64, tree=True),
    Sequence(15, 1, tree=True),
    Sequence(0, 3, tree=True),
]


def check(case: Case) -> None:
    assert_as_good_as_torch(case, "triton", DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(window=7),
        Options(softcap=5.0, sinks=True),
        Options(window=33, softcap=2.0, sinks=True, scales=True),
    ],
    ids=str,
)
def test_a_mix_of_trees_decodes_and_chunks(options: Options, dtype: torch.dtype) -> None:
    check(make_case(MIX, Shape(2, 3, 16), options, dtype))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(1, 1, 64, 64),
        Shape(1, 8, 80, 32),
        Shape(4, 1, 96, 16),
        Shape(1, 5, 128, 48),
        Shape(1, 2, 256, 128),
    ],
    ids=str,
)
def test_head_sizes_groupings_and_block_sizes(shape: Shape) -> None:
    check(
        make_case([Sequence(50, 6, tree=True), Sequence(7, 20), Sequence(130, 1)], shape, dtype=torch.float16)
    )


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e5m2, torch.float8_e4m3fn], ids=str)
def test_quantized_caches(cache_dtype: torch.dtype) -> None:
    options = Options(scales=True)
    check(make_case(MIX[:3], Shape(2, 2, 32), options, torch.float16, cache_dtype))


def test_plain_decode_of_many_sequences() -> None:
    check(make_case([Sequence(7 * i, 1) for i in range(9)], Shape(1, 4, 32)))


def test_a_second_run_gives_the_same_bits() -> None:
    case = make_case(MIX, Shape(1, 2, 16), Options(sinks=True)).to(DEVICE)
    assert torch.equal(case.run("triton"), case.run("triton"))


def test_errors_say_what_the_kernel_does_not_cover() -> None:
    for message, shape, dtype in (
        ("query has dtype float64", Shape(), torch.float64),
        ("query has head size 512, wanted at most 256", Shape(1, 1, 512), torch.float32),
        ("kv_cache has block size 24, wanted a multiple of 16", Shape(block_size=24), torch.float32),
    ):
        with pytest.raises(ValueError, match=message):
            make_case([Sequence(3, 2)], shape, dtype=dtype).to(DEVICE).run("triton")
