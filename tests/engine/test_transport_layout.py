"""Layouts: equal layouts agree, unequal ones refuse and say where they differ."""

import dataclasses

import pytest
from kv_groups import kv_group
from tandem_core.errors import InvariantError, LayoutMismatchError
from tandem_engine.transport.layout import KVLayout

LAYOUT = KVLayout(
    model_revision="5f0c",
    dtype="bfloat16",
    kv_quantization="none",
    groups=(kv_group(range(30), 3, 64),),
    block_size=64,
    spec="0123456789abcdef",
)


def test_a_block_holds_keys_and_values_of_every_head() -> None:
    assert LAYOUT.max_block_bytes == 2 * 3 * 64 * 64 * 2
    assert dataclasses.replace(LAYOUT, dtype="float32").max_block_bytes == 2 * LAYOUT.max_block_bytes


def test_equal_layouts_pass() -> None:
    other = dataclasses.replace(LAYOUT)
    LAYOUT.check(other.fingerprint, other.description)


@pytest.mark.parametrize(
    "change",
    [
        {"model_revision": "5f0d"},
        {"dtype": "float32"},
        {"kv_quantization": "per_tensor"},
        {"block_size": 32},
        {"spec": "fedcba9876543210"},
        {"block_layout": "KV,T,H,D"},
        {"wire_version": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_every_field_counts_and_the_error_names_it_on_both_sides(change: dict[str, str | int]) -> None:
    other = dataclasses.replace(LAYOUT, **change)  # type: ignore[arg-type]
    ((name, there),) = change.items()
    here = dataclasses.asdict(LAYOUT)[name]
    with pytest.raises(LayoutMismatchError) as caught:
        LAYOUT.check(other.fingerprint, other.description)
    message = str(caught.value)
    assert f"differ in {name} (here {here}, there {there})." in message
    assert LAYOUT.description in message and other.description in message
    assert LAYOUT.fingerprint in message and other.fingerprint in message


def test_a_description_that_cannot_be_read_is_still_shown() -> None:
    with pytest.raises(LayoutMismatchError, match="gibberish"):
        LAYOUT.check("00", "gibberish")


@pytest.mark.parametrize(
    "change", [{"dtype": "complex64"}, {"groups": ()}, {"block_size": 0}, {"spec": "a; b"}]
)
def test_a_layout_without_meaning_is_refused(change: dict[str, str | int]) -> None:
    with pytest.raises(InvariantError):
        dataclasses.replace(LAYOUT, **change)  # type: ignore[arg-type]
