"""draw_tokens on CPUs: greedy, filters and the race, against their definitions in float64."""

import math

import pytest
import torch
from draw_cases import KINDS, draw_case, draw_logits
from native_libraries import NATIVE, native_library
from tandem_kernels import draw_tokens
from tandem_kernels.draw_tokens import draw_reference, uniforms


def constant(num_rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """The same parameters for all rows, and keys 0, 1, 2, ..."""
    return (
        torch.arange(num_rows),
        torch.full((num_rows,), temperature),
        torch.full((num_rows,), top_k),
        torch.full((num_rows,), top_p, dtype=torch.float64),
        torch.full((num_rows,), math.log(min_p) if min_p else -math.inf),
    )


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, -1.0, 3.0, 0.0]])
    assert draw_tokens(logits, *constant(2, 0.0)).tolist() == [1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_unfiltered_rows_run_the_race(kind: str) -> None:
    logits = draw_logits(kind, 500, 40, torch.Generator().manual_seed(1))
    drawn = draw_tokens(logits, *constant(40, 0.8))
    times = -torch.log1p(-uniforms(torch.arange(40), 500)) / torch.exp(logits.double() / 0.8)
    assert drawn.tolist() == times.argmin(1).tolist()


@pytest.mark.parametrize(
    "options, kept",
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 3}, {0, 1, 2, 3}),  # with what equals the third
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.8}, {0, 1, 2}),  # of equals the lower id
        ({"min_p": 0.3}, {0, 1}),
        ({"top_k": 2, "top_p": 0.6}, {0}),  # of what top-k left
    ],
    ids=str,
)
def test_filters_keep_what_they_say(options: dict[str, float], kept: set[int]) -> None:
    """Probabilities .5, .25, .1, .1, .05: over many keys exactly the kept tokens are drawn."""
    logits = torch.tensor([0.5, 0.25, 0.1, 0.1, 0.05]).log().repeat(400, 1)
    assert set(draw_tokens(logits, *constant(400, 1.0, **options)).tolist()) == kept


def test_draws_follow_the_softmax() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -1.0, -math.inf])
    counts = torch.bincount(draw_tokens(row.repeat(20_000, 1), *constant(20_000, 1.0)), minlength=5)
    expected = row.softmax(0)[:4] * 20_000
    assert counts[4] == 0
    # P(chi-square with 3 degrees of freedom > 16.27) = 0.001, with fixed keys
    assert float(((counts[:4] - expected) ** 2 / expected).sum()) < 16.27


def test_a_row_does_not_depend_on_the_others() -> None:
    case = draw_case("normal", 300, 24)
    together = draw_tokens(*case).tolist()
    assert [draw_tokens(*(t[i : i + 1] for t in case)).item() for i in range(24)] == together


def test_rows_that_are_no_numbers_give_no_token() -> None:
    logits = torch.zeros(3, 8)
    logits[0, 3], logits[1, 3], logits[2] = math.nan, math.inf, -math.inf
    for temperature in (0.0, 1.0):
        case = (logits, *constant(3, temperature))
        assert draw_tokens(*case).tolist() == draw_reference(*case).tolist() == [-1, -1, -1]


def test_arguments_that_do_not_fit_are_named() -> None:
    logits = torch.zeros(3, 8)
    with pytest.raises(ValueError, match=r"keys has shape \[2\]"):
        draw_tokens(logits, *constant(2, 1.0))
    with pytest.raises(ValueError, match=r"logits has shape .* wanted a dense"):
        draw_tokens(logits.t(), *constant(8, 1.0))


@pytest.mark.parametrize("library", NATIVE)
@pytest.mark.parametrize("vocab_size", [7, 1000, 20_000])
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_kernel_draws_the_references_tokens(kind: str, vocab_size: int, library: str) -> None:
    case = draw_case(kind, vocab_size, 40 if vocab_size < 10_000 else 16)
    with native_library(library):
        assert draw_tokens(*case).tolist() == draw_reference(*case).tolist()


#: Distributions of [rows, tokens] standard normal numbers.
NUCLEI = {
    "equal": torch.zeros_like,
    "two values": torch.sign,
    "nearly equal": lambda noise: noise * 1e-6,
    "flat": lambda noise: noise * 0.3,
    "steep": lambda noise: noise * 3,
    "tied": lambda noise: (noise * 4).round() / 2,
    "huge": lambda noise: noise * 1e37,
    "one of two": lambda noise: noise.where(noise > 0, -math.inf),
    "a peak above equals": lambda noise: torch.cat([noise[:, :1] * 0 + 9, noise[:, 1:] * 1e-5], 1),
}


@pytest.mark.parametrize("library", NATIVE)
@pytest.mark.parametrize("distribution", NUCLEI)
def test_a_nucleus_of_any_size_is_the_references(distribution: str, library: str) -> None:
    """Alone, after top-k and before min-p; more tokens than are sorted at once."""
    shares = torch.tensor([1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 1e-9, 1 - 2**-53], dtype=torch.float64)
    logits = NUCLEI[distribution](torch.randn(56, 3000, generator=torch.Generator().manual_seed(2)))
    keys, temperature, top_k, _, log_min_p = constant(56, 1.0)
    temperature[28:], top_k[14:28], log_min_p[7:14] = 0.2, 1500, -1.0
    case = (logits, keys, temperature, top_k, shares.repeat(8), log_min_p)
    with native_library(library):
        assert draw_tokens(*case).tolist() == draw_reference(*case).tolist()


@pytest.mark.parametrize("library", NATIVE)
@pytest.mark.parametrize("size", [1, 5, 63, 64, 65, 200])
def test_greedy_is_torchs_argmax(size: int, library: str) -> None:
    """Also of ties, NaN and infinities anywhere; -1 where that is no finite logit."""
    values = torch.tensor([-math.inf, -1.0, -0.0, 0.0, 1.0, math.inf, math.nan])
    generator = torch.Generator().manual_seed(size)
    few = [values[torch.randint(0, n, (300, size), generator=generator)] for n in range(1, 8)]
    one_nan = torch.randn(300, size, generator=generator)
    one_nan[torch.arange(300), torch.randint(0, size, (300,), generator=generator)] = math.nan
    for logits in (*few, one_nan, torch.randn(300, size, generator=generator)):
        with native_library(library):
            token_ids = logits.argmax(1, keepdim=True)
            expected = token_ids.where(logits.gather(1, token_ids).isfinite(), -1)[:, 0].tolist()
            assert draw_tokens(logits, *constant(300, 0.0)).tolist() == expected
