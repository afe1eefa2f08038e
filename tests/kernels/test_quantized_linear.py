"""Weights of 8, 6 and 4 bits: what they hold, how they are packed, and their products."""

import pytest
import torch
from native_libraries import COMPILED, native_library
from tandem_kernels import (
    PackedWeight,
    Packing,
    QuantizedWeight,
    dequantize_packed,
    join_rows,
    pack_quantized,
    pack_weight,
    packed_linear,
    quantize_weight,
    quantized_shape,
    unpack_quantized,
)

LIBRARIES = ["off", *COMPILED]
INT8, INT4, Q4_K, Q6_K, INT4_ZEROS, LUT4 = Packing
DTYPES = [torch.float32, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_weight(num_columns: int, depth: int, packing: Packing, seed: int = 1) -> QuantizedWeight:
    """depth is a multiple of the packing's."""
    if packing in (INT8, INT4):
        return quantize_weight(random(num_columns, depth, seed=seed), packing)
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << packing.bits, (num_columns, depth), generator=generator, dtype=torch.uint8)
    if not packing.has_factors:
        scales = (random(num_columns, depth // packing.depth, seed=seed).abs() / 10).half()
        if packing is LUT4:
            table = torch.randint(1, 256, (16,), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
            return QuantizedWeight(packing, codes, scales, scales * -128, table=table)
        zeros = torch.randint(0, 17, scales.shape, generator=generator)
        return QuantizedWeight(packing, codes, scales, -zeros.half())
    scales = (random(num_columns, depth // 256, seed=seed) / 100).half()
    # Those of Q4_K have 6 bits, without a sign.
    least, end, zero = (0, 64, 7.5) if packing is Q4_K else (-128, 128, 32)
    shape = (num_columns, depth // 32, 2)
    factors = torch.randint(least, end, shape, generator=generator, dtype=torch.int8)
    return QuantizedWeight(packing, codes, scales, (scales * -zero).half(), factors)


def packed_of(weight: QuantizedWeight) -> PackedWeight:
    return PackedWeight((pack_quantized(weight),), weight.codes.shape[0], table=weight.table)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """x as the product sees it: 8 bits in groups of 32, float64."""
    groups = x.double().view(x.shape[0], -1, 32)
    scales = groups.abs().amax(2, keepdim=True) / 127
    return (torch.where(scales == 0, 0.0, groups / scales).round() * scales).flatten(1)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "packing, num_columns, depth",
    [
        *((packing, *shape) for packing in (INT8, INT4) for shape in ((96, 64), (32, 32), (160, 576))),
        *((packing, *shape) for packing in (Q4_K, Q6_K) for shape in ((96, 256), (40, 768))),
        *((packing, *shape) for packing in (INT4_ZEROS, LUT4) for shape in ((96, 128), (40, 640))),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 7, 31, 300])
def test_products_are_those_of_the_rounded_numbers(
    num_rows: int, packing: Packing, num_columns: int, depth: int, dtype: torch.dtype, library: str
) -> None:
    x = random(num_rows, depth, dtype=dtype)
    weight = random_weight(num_columns, depth, packing)
    bias = random(num_columns, dtype=dtype, seed=2) if num_rows % 2 else None
    exact = rounded(x) @ weight.dequantize().double().T + (0 if bias is None else bias.double())
    with native_library(library):
        packed = packed_of(weight)
        result = packed_linear(x, packed, bias)
        in_float = packed_linear(x, packed, bias, out_dtype=torch.float32)
    assert result.dtype == dtype and in_float.dtype == torch.float32
    size = exact.abs().max()
    # A quotient that lies on a rounding boundary may fall to the other side, by one step of one activation.
    step = x.double().abs().max() / 127 * weight.dequantize().abs().max()
    assert (in_float.double() - exact).abs().max() <= 1e-5 * size + step
    assert (in_float.double() - exact).abs().median() <= 1e-5 * size
    assert torch.equal(in_float.to(dtype), result)


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize(
    "packing, depth",
    [(INT8, 576), (INT4, 576), (Q4_K, 512), (Q6_K, 512), (INT4_ZEROS, 640), (LUT4, 576)],
)
def test_a_row_gives_the_same_bits_alone_and_in_any_company(
    packing: Packing, depth: int, library: str
) -> None:
    x, weight = random(1300, depth), random_weight(192, depth, packing)
    with native_library(library):
        packed = packed_of(weight)
        together = packed_linear(x, packed)
        for first, end in ((0, 1), (5, 12), (100, 117), (40, 70), (200, 1300)):
            assert torch.equal(packed_linear(x[first:end].contiguous(), packed), together[first:end])


@pytest.mark.parametrize("packing", Packing)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 6, 8, 9, 17, 31])
def test_all_instruction_sets_give_the_same_bits(num_rows: int, packing: Packing) -> None:
    """Sums of codes are exact, and what follows is the same arithmetic: rows may take any of them."""
    x = random(num_rows, 768, seed=num_rows)
    x[:, 40] *= 100
    packed = packed_of(random_weight(75, 768, packing))
    results = []
    for library in COMPILED:
        with native_library(library):
            results.append(packed_linear(x, packed))
    for library, result in zip(COMPILED, results, strict=True):
        assert torch.equal(result, results[0]), f"{library} and {COMPILED[0]} differ"


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("packing", Packing)
def test_threads_that_share_few_columns_change_no_bit(packing: Packing, library: str) -> None:
    """With more threads than panels the rows are divided too."""
    x, packed = random(150, 256), packed_of(random_weight(32, 256, packing))
    results = []
    with native_library(library):
        for num_threads in (1, 4):
            torch.set_num_threads(num_threads)
            try:
                results.append(packed_linear(x, packed))
            finally:
                torch.set_num_threads(1)
    assert torch.equal(*results)


@pytest.mark.parametrize("library", COMPILED)
def test_the_largest_codes_do_not_overflow(library: str) -> None:
    x, weight = torch.full((2, 64), 3.0), torch.full((32, 64), -2.0)
    x[1] = -3.0
    for packing in (INT8, INT4):
        with native_library(library):
            result = packed_linear(x, pack_quantized(quantize_weight(weight, packing)))
        torch.testing.assert_close(result, x @ weight.T, rtol=2e-3, atol=0)


@pytest.mark.parametrize("library", COMPILED)
@pytest.mark.parametrize("packing", Packing)
def test_sums_of_the_largest_products_are_exact(packing: Packing, library: str) -> None:
    codes = torch.full((32, 256), (1 << packing.bits) - 1, dtype=torch.uint8)
    ones = torch.ones(32, 256 // packing.depth).half()
    zero = 0 if packing.has_minimums else packing.zero
    factors = torch.ones(32, 8, 2, dtype=torch.int8) if packing.has_factors else None
    table = torch.arange(240, 256, dtype=torch.uint8) if packing is LUT4 else None
    weight = QuantizedWeight(packing, codes, ones, ones * -zero, factors, table)
    x = torch.cat([torch.full((1, 256), 127.0), torch.full((1, 256), -127.0)])
    with native_library(library):
        result = packed_linear(x, packed_of(weight))
    assert torch.equal(result, x @ weight.dequantize().T)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("packing", Packing)
def test_inputs_can_have_an_order_of_their_own(packing: Packing, dtype: torch.dtype, library: str) -> None:
    """A weight with permuted columns and their order gives the bits of permuted activations."""
    x, weight = random(5, 512, dtype=dtype), random_weight(75, 512, packing)
    order = torch.randperm(512, generator=torch.Generator().manual_seed(4))
    ordered = PackedWeight((pack_quantized(weight),), 75, order.int(), weight.table)
    with native_library(library):
        result = packed_linear(x, ordered)
        assert torch.equal(result, packed_linear(x[:, order].contiguous(), packed_of(weight)))
    assert torch.equal(dequantize_packed(ordered)[:, order], weight.dequantize())


@pytest.mark.parametrize("library", LIBRARIES)
def test_zeros_tiny_numbers_and_outliers(library: str) -> None:
    """An outlier costs precision in its own 32 neighbours alone."""
    x, weight = random(3, 96), quantize_weight(random(32, 96, seed=1), INT8)
    x[0] = 0
    x[1] *= 1e-38
    x[2, 40] = 1e4
    with native_library(library):
        result = packed_linear(x, pack_quantized(weight)).double()
    assert torch.equal(result[0], torch.zeros(32, dtype=torch.double))
    assert result[1].abs().max() < 1e-36
    others = torch.cat([torch.arange(32), torch.arange(64, 96)])
    values = weight.dequantize().double()
    quiet = x.clone()
    quiet[2, others] = 0
    with native_library(library):
        loud_part = packed_linear(quiet, pack_quantized(weight)).double()[2]
    exact = x[2, others].double() @ values[:, others].T
    assert (result[2] - loud_part - exact).abs().max() < 0.3  # one scale per row: about 8


@pytest.mark.parametrize(
    "packing, depth",
    [(INT8, 160), (INT4, 160), (Q4_K, 768), (Q6_K, 768), (INT4_ZEROS, 384), (LUT4, 160)],
)
def test_packing_loses_nothing(packing: Packing, depth: int) -> None:
    weight = random_weight(96, depth, packing)
    packed = pack_quantized(weight)
    assert tuple(packed.shape) == quantized_shape(96, depth, packing)
    again = unpack_quantized(packed, weight.table)
    assert again.packing is packing
    for name in ("codes", "scales", "minimums"):
        assert torch.equal(getattr(again, name), getattr(weight, name)), name
    assert again.factors is weight.factors or torch.equal(again.factors, weight.factors)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", [INT8, INT4])
def test_quantizing_rounds_to_the_nearest_code(packing: Packing) -> None:
    weight = random(64, 320)
    quantized = quantize_weight(weight, packing)
    error = (quantized.dequantize() - weight).view(64, -1, 32).abs()
    if packing is INT8:
        assert (error <= 0.51 * quantized.scales.float().unsqueeze(2) + 1e-3).all()
    # Cutting off outliers is allowed where it lessens the squared error against the full range.
    groups = weight.view(64, -1, 32)
    step = (groups.amax(2) - groups.amin(2)) / ((1 << packing.bits) - 1)
    assert error.square().mean() <= (step.square() / 12).mean() * (4.1 if packing is INT8 else 1.05)


def test_numbers_on_a_grid_of_16_are_kept() -> None:
    scales, minimums = (random(32, 2).abs() + 0.1).half(), random(32, 2, seed=1).half()
    codes = torch.randint(0, 16, (32, 64), generator=torch.Generator().manual_seed(3), dtype=torch.uint8)
    codes.view(32, 2, 32)[:, :, 0], codes.view(32, 2, 32)[:, :, 1] = 0, 15
    values = QuantizedWeight(INT4, codes, scales, minimums).dequantize()
    torch.testing.assert_close(quantize_weight(values, INT4).dequantize(), values, atol=3e-3, rtol=0)


@pytest.mark.parametrize("packing", Packing)
def test_rows_can_be_joined_and_reordered(packing: Packing) -> None:
    first, second = (random_weight(n, 256, packing, seed=n) for n in (3, 5))
    order = torch.tensor([7, 0, 4])
    both = torch.cat([first.dequantize(), second.dequantize()])
    assert torch.equal(join_rows([first, second]).rows(order).dequantize(), both[order])


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "kinds",
    [
        (INT4, INT8),
        (INT4, INT4, INT8),
        (INT8, INT4, None),
        (None, INT4),
        (INT4,),
        (INT8,),
        (Q4_K, Q6_K),
        (INT8, INT4_ZEROS),
    ],
)
@pytest.mark.parametrize("num_rows", [1, 5, 30])
def test_pieces_and_a_last_panel_that_is_not_full(
    num_rows: int, kinds: tuple[Packing | None, ...], dtype: torch.dtype, library: str
) -> None:
    """Each column has the bits that it has in a weight of its own piece; None: not quantized."""
    if library == "off" and None in kinds:
        pytest.skip("only compiled kernels take packed floats")
    x = random(num_rows, 256).to(dtype)
    sizes = [32 * (n + 1) for n in range(len(kinds))]
    sizes[-1] -= 9
    parts, expected, bias = [], [], random(sum(sizes), seed=9)
    with native_library(library):
        for n, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
            parts.append(
                pack_quantized(random_weight(size, 256, kind, seed=n))
                if kind
                else pack_weight(random(size, 256, seed=n).to(dtype))
            )
            own = bias[sum(sizes[:n]) : sum(sizes[: n + 1])]
            expected.append(packed_linear(x, PackedWeight((parts[-1],), size), own))
        result = packed_linear(x, PackedWeight(tuple(parts), sum(sizes)), bias)
    assert result.shape == (num_rows, sum(sizes))
    if library == "off":
        torch.testing.assert_close(result, torch.cat(expected, dim=1))
    else:
        assert torch.equal(result, torch.cat(expected, dim=1))


def test_pieces_that_do_not_fit_are_refused() -> None:
    four, eight = (pack_quantized(quantize_weight(torch.ones(32, 64), packing)) for packing in (INT4, INT8))
    for parts, columns in (((four, eight), 65), ((four, eight), 32), ((four, eight[:, :1]), 64)):
        with pytest.raises(ValueError, match="wanted one depth"):
            PackedWeight(parts, columns)


def test_what_cannot_be_quantized_is_said() -> None:
    assert quantized_shape(64, 48, INT8) is None and quantized_shape(64, 160, Q4_K) is None
    with pytest.raises(ValueError, match="multiple of 32, and INT4 or INT8"):
        quantize_weight(torch.ones(32, 40), INT4)
    with pytest.raises(ValueError, match=r"for Q6_K, wanted .* INT4 or INT8"):
        quantize_weight(torch.ones(32, 256), Q6_K)
    with pytest.raises(ValueError, match=r"scales are \[4, 1\] of torch.float32"):
        QuantizedWeight(
            INT8, torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1), torch.ones(4, 1).half()
        )
    codes, ones = torch.zeros(4, 256, dtype=torch.uint8), torch.ones(4, 1).half()
    with pytest.raises(ValueError, match=r"factors have shape None, wanted \(4, 8, 2\) int8 for Q4_K"):
        QuantizedWeight(Q4_K, codes, ones, ones)
    for packing, table, found in ((LUT4, None, "lacks its"), (INT8, torch.arange(16), "has no")):
        scales = torch.ones(4, 8).half()
        with pytest.raises(ValueError, match=rf"{packing.name} {found} table"):
            QuantizedWeight(packing, codes, scales, scales, table=table)
    panels = pack_quantized(random_weight(32, 64, LUT4))
    with pytest.raises(ValueError, match="parts in LUT4 lack their table"):
        PackedWeight((panels,), 32)
    for order, wrong in ((torch.arange(65), "wanted"), (torch.zeros(64).int(), "no permutation")):
        with pytest.raises(ValueError, match=f"order is .*{wrong}"):
            PackedWeight((panels,), 32, order, torch.arange(16, dtype=torch.uint8))
    packed = pack_quantized(quantize_weight(torch.ones(32, 64), INT4))
    for x in (torch.ones(2, 32), torch.ones(2, 64).half(), torch.ones(64, 2).T):
        with pytest.raises(ValueError, match=r"wanted a dense \[T, 64\] of torch.float32 or torch.bfloat16"):
            packed_linear(x, packed)
