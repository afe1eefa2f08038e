"""The GPU's step, against figures worked out by hand."""

from __future__ import annotations

import pytest
from drafting_research.cost_model import H200, LLAMA_8B, Accelerator, CostModel, ModelShape

#: 1 B/s and 1 operation/s; one layer of one head of size 1: a key and a value are 2 bytes.
TOY = ModelShape("toy", 100.0, 1.0, 1, 1, 1, 1, 1.0)
SLOW_MEMORY = Accelerator("slow memory", 1.0, 1e9)
SLOW_PRODUCTS = Accelerator("slow products", 1e9, 1.0)


def test_memory_counts_weights_once_and_each_sequences_keys_once() -> None:
    model = CostModel(3, 10.0, SLOW_MEMORY, TOY)
    assert model.step_seconds(3) == 100 + 3 * 10 * 2
    assert model.step_seconds(3 * 8) == model.step_seconds(3), "guesses read nothing more"


def test_products_count_every_row() -> None:
    model = CostModel(3, 10.0, SLOW_PRODUCTS, TOY)
    assert model.step_seconds(1) == 2 * 100 + 4 * 10
    assert model.step_seconds(6) == 6 * model.step_seconds(1)


def test_the_kv_of_an_8b_model() -> None:
    assert LLAMA_8B.kv_bytes_per_token == 131_072


def test_guesses_are_free_until_products_take_as_long_as_memory() -> None:
    model = CostModel(1, 3000.0)
    price = model.price(700)
    free = sum(seconds == price[0] for seconds in price)
    per_row = 2 * 7.50e9 + 4 * 32 * 32 * 128 * 3000
    # Rows that fit into the time of the weights and keys; the first is the sequence's own.
    assert free == int((15.0e9 + 3000 * 131_072) / 4.3e12 * 0.7 * 989e12 / per_row)
    assert price == sorted(price)
    assert price[-1] > price[0]


def test_what_binds_a_batch_of_128() -> None:
    """Its keys are most of the bytes, and seven guesses each are more products than that hides."""
    model = CostModel(128, 2800.0)
    plain, drafted = model.step_seconds(128), model.step_seconds(128 * 8)
    assert plain == pytest.approx((15.0e9 + 128 * 2800 * 131_072) / H200.bytes_per_s)
    assert drafted == pytest.approx(1024 * (15.0e9 + 4 * 32 * 32 * 128 * 2800) / H200.operations_per_s)
    assert drafted > plain


def test_speed_up_is_tokens_per_second_over_tokens_per_second() -> None:
    model = CostModel(2, 10.0, SLOW_MEMORY, TOY)
    assert model.speed_up(1.0, 0.0) == 1.0
    assert model.speed_up(2.5, 7.0) == 2.5
    # A step of 140 s, and 70 s of drafting for each of two sequences.
    assert model.speed_up(2.0, 7.0, drafting_s=70.0) == pytest.approx(1.0)
