"""The kernels for 64-bit ARM, cross-compiled and run under qemu-user, pass the tests of the other kernels.

qemu computes as the processors do, but says nothing about their speed.
"""

import pytest
import test_decoder_layers
import test_draw_tokens
import test_layer_ops
import test_packed_linear
import test_quantized_linear
import test_turbo_attention
import torch
from attention_cases import Options, Sequence, Shape, attend, make_case
from native_libraries import ARM_PROCESSORS, NATIVE, can_run_arm, native_library
from tandem_kernels import PackedWeight, Packing, pack_quantized, pack_weight, packed_linear

pytestmark = [
    pytest.mark.wide,
    pytest.mark.skipif("neon_dotprod" in NATIVE, reason="this processor runs all kernels' tests itself"),
    pytest.mark.skipif(not can_run_arm(), reason="needs aarch64-linux-gnu-g++ and qemu-aarch64"),
    pytest.mark.parametrize("library", ARM_PROCESSORS),
]
FLOATS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("num_columns, depth", [(96, 64), (32, 30), (160, 576), (105, 96)])
@pytest.mark.parametrize("num_rows", [1, 7, 13, 31])
def test_packed_floats(num_rows: int, num_columns: int, depth: int, dtype: torch.dtype, library: str) -> None:
    test_packed_linear.test_it_is_as_exact_as_torch(num_rows, num_columns, depth, dtype, library)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_row_gives_the_same_bits_alone_and_in_any_company(dtype: torch.dtype, library: str) -> None:
    random = test_packed_linear.random
    x, packed = random(40, 96, dtype=dtype), pack_weight(random(64, 96, dtype=dtype, seed=1))
    with native_library(library):
        together = packed_linear(x, packed)
        for first, end in ((0, 1), (5, 12), (10, 27)):
            assert torch.equal(packed_linear(x[first:end], packed), together[first:end])


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 40])
def test_quantized_products_have_the_bits_of_x86(
    num_rows: int, packing: Packing, dtype: torch.dtype, library: str
) -> None:
    if not NATIVE:
        pytest.skip("no compiled kernels on this machine")
    x = test_quantized_linear.random(num_rows, 768, dtype=dtype)
    x[:, 40] *= 100
    weight = test_quantized_linear.random_weight(105, 768, packing)
    packed = PackedWeight((pack_quantized(weight),), 105)
    bias = torch.linspace(-1, 1, 105) if num_rows % 2 else None
    with native_library("avx2"):
        expected = packed_linear(x, packed, bias)
    with native_library(library):
        assert torch.equal(packed_linear(x, packed, bias), expected)


@pytest.mark.parametrize("packing", Packing)
def test_quantized_products(packing: Packing, library: str) -> None:
    test_quantized_linear.test_products_are_those_of_the_rounded_numbers(
        5, packing, 96, 256, torch.float32, library
    )
    test_quantized_linear.test_sums_of_the_largest_products_are_exact(packing, library)


def test_zeros_tiny_numbers_and_outliers(library: str) -> None:
    test_quantized_linear.test_zeros_tiny_numbers_and_outliers(library)


@pytest.mark.parametrize("dtype", test_layer_ops.DTYPES, ids=str)
def test_layer_operators(dtype: torch.dtype, library: str) -> None:
    for kind in ("rms", "layer"):
        test_layer_ops.test_add_norm(33, 48, kind, True, True, 0.5, dtype, library)
        test_layer_ops.test_norm_rows(kind, dtype, library)
    for act in ("silu", "gelu", "gelu_tanh", "relu2", "clamped"):
        test_layer_ops.test_activate(70, 48, act != "relu2", act, dtype, library)
    test_layer_ops.test_sigmoid_gate(True, dtype, library)
    for case in test_layer_ops.ROPE_CASES:
        test_layer_ops.test_rope_store(case, dtype, library)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", test_turbo_attention.OPTIONS, ids=str)
def test_attention(options: Options, dtype: torch.dtype, library: str) -> None:
    test_turbo_attention.test_a_mix_of_trees_decodes_and_chunks(library, options, dtype)


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attention_over_quantized_caches(dtype: torch.dtype, cache_dtype: torch.dtype, library: str) -> None:
    test_turbo_attention.test_quantized_caches(library, Options(token_scales=True), dtype, cache_dtype)


@pytest.mark.parametrize("head_size", [80, 128])
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_head_sizes(dtype: torch.dtype, head_size: int, library: str) -> None:
    test_turbo_attention.test_head_sizes_and_groupings(library, dtype, head_size, 2, 5)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attentions_bits_depend_on_neither_drafts_nor_threads(dtype: torch.dtype, library: str) -> None:
    context = 530  # more than a split
    case = make_case([Sequence(context, 9, tree=True)], Shape(1, 2), dtype=dtype)
    alone = torch.cat([*test_turbo_attention.along_paths(case, context, None, library)])
    try:
        for num_threads in (1, 3):
            torch.set_num_threads(num_threads)
            assert torch.equal(case.run(library), alone)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_attentions_bits_do_not_depend_on_chunks(dtype: torch.dtype, library: str) -> None:
    case = make_case([Sequence(0, 90)], Shape(1, 2), dtype=dtype)
    whole = case.run(library)
    for first, end in ((0, 1), (1, 65), (65, 90)):
        lengths = torch.tensor([end], dtype=torch.int32), torch.tensor([0, end - first], dtype=torch.int32)
        part = attend(
            case.query[first:end], case.kv_cache, case.block_table, *lengths, scale=64**-0.5, backend=library
        )
        assert torch.equal(part, whole[first:end])


def test_one_call_for_all_sublayers(library: str) -> None:
    """Also interleaved caches: of float32 everywhere, of bfloat16 where the processor multiplies it."""
    test_decoder_layers.test_one_call_gives_the_bits_of_many(library=library)


@pytest.mark.parametrize("kind", test_draw_tokens.KINDS)
def test_draws(kind: str, library: str) -> None:
    test_draw_tokens.test_the_compiled_kernel_draws_the_references_tokens(kind, 1000, library)
