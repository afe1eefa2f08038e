"""The interleaved cache: the same numbers in another order, also after moves."""

import pytest
import torch
from attention_cases import attend
from hypothesis import given, settings
from hypothesis import strategies as st
from native_libraries import COMPILED, native_library
from tandem_kernels import (
    deinterleave,
    interleave,
    move_slots,
    move_slots_in_layers,
    native,
    runs_interleaved,
)

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE = 3, 2, 64, 32
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE
DTYPES = [torch.float32, torch.bfloat16]


def caches(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    shape = (NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(2)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_interleaving_puts_each_element_where_the_products_read_it(dtype: torch.dtype) -> None:
    per = 4 // dtype.itemsize
    (cache, _) = caches(dtype)
    lying = interleave(cache)
    keys = lying[1, 0, 1].reshape(HEAD_SIZE // per, BLOCK_SIZE, per)
    values = lying[1, 1, 1].reshape(BLOCK_SIZE // per, HEAD_SIZE, per)
    for token, dim in ((0, 0), (1, 0), (0, 1), (37, 21), (63, 31)):
        assert keys[dim // per, token, dim % per] == cache[1, 0, 1, token, dim]
        assert values[token // per, dim, token % per] == cache[1, 1, 1, token, dim]
    assert torch.equal(deinterleave(lying), cache)


@settings(max_examples=30, deadline=None)
@given(
    src=st.lists(st.integers(0, NUM_SLOTS - 1), max_size=9),
    data=st.data(),
    dtype=st.sampled_from([*DTYPES, torch.float16]),
    interleaved=st.booleans(),
    library=st.sampled_from(["off", "best"]),
)
def test_slots_move_in_all_layers_as_if_at_once(
    src: list[int], data: st.DataObject, dtype: torch.dtype, interleaved: bool, library: str
) -> None:
    if library == "best" and native.LIBRARY is None:
        library = "off"
    if library == "off" or dtype == torch.float16:
        interleaved = False
    dst = data.draw(st.permutations(range(NUM_SLOTS)))[: len(src)]
    expected = caches(dtype)
    moves = torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)
    for cache in expected:
        move_slots(cache, *moves)
    ours = [interleave(c) if interleaved else c for c in caches(dtype)]
    with native_library(native.instruction_set() or "off" if library == "best" else "off"):
        move_slots_in_layers(ours, *moves, interleaved=interleaved)
    for cache, wanted in zip(ours, expected, strict=True):
        assert torch.equal(deinterleave(cache) if interleaved else cache, wanted)


def test_moves_that_do_not_fit_are_said_and_change_nothing() -> None:
    ours = caches(torch.float32)
    inside, outside = torch.tensor([3, 5]), torch.tensor([4, NUM_SLOTS])
    with pytest.raises(IndexError):
        move_slots_in_layers(ours, inside, outside)
    with pytest.raises(ValueError, match="wanted as many"):
        move_slots_in_layers(ours, inside, outside[:1])
    with pytest.raises(ValueError, match=r"layers of one model|cannot be moved"):
        move_slots_in_layers([ours[0], ours[1].bfloat16()], inside, inside, interleaved=True)
    with native_library("off"), pytest.raises(ValueError, match="cannot be moved, for want of compiled"):
        move_slots_in_layers(ours, inside, inside, interleaved=True)
    assert all(map(torch.equal, ours, caches(torch.float32)))


def test_only_whole_tiles_of_the_products_dtype_are_read_interleaved() -> None:
    assert not runs_interleaved(torch.float32, 64, 48)
    assert not runs_interleaved(torch.float16, 64, 64)
    assert runs_interleaved(torch.float32, 64, 128) == (native.LIBRARY is not None)
    assert runs_interleaved(torch.bfloat16, 64, 64) == (native.LIBRARY is not None)
    assert not runs_interleaved(torch.bfloat16, 80, 64)
    with native_library("off"):
        assert not runs_interleaved(torch.float32, 64, 64)


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 150], ids="{} rows".format)
@pytest.mark.parametrize("library", COMPILED)
def test_attention_reads_the_same_bits_from_either(
    library: str, dtype: torch.dtype, rows: int, num_threads: int
) -> None:
    """From one row, whose product fetches what comes next by itself, to more than fill several products.

    What lies beyond the sequence is NaN.
    """
    head_size, block_size, context = 64, 64, 700
    num_blocks = -(-(context + rows) // block_size)
    cache = torch.randn(num_blocks + 1, 2, 2, block_size, head_size).to(dtype)
    query = torch.randn(rows, 6, head_size).to(dtype)
    block_table = torch.randperm(num_blocks).int()[None]
    cache[block_table[0, -1], :, :, (context + rows - 1) % block_size + 1 :] = torch.nan
    cache[num_blocks] = torch.nan
    metadata = block_table, torch.tensor([context + rows]).int(), torch.tensor([0, rows]).int()
    # A tree of two branches; more rows than a tree may have are a chunk.
    bits = torch.tensor([sum(1 << j for j in range(i % 2, i + 1, 2)) | 1 for i in range(min(rows, 62))])
    bits = bits if rows == len(bits) else None
    threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with native_library(library):
            plain = attend(query, cache, *metadata, bits, scale=0.125)
            lying = attend(query, interleave(cache), *metadata, bits, scale=0.125, interleaved=True)
    finally:
        torch.set_num_threads(threads)
    assert plain.isfinite().all()
    assert torch.equal(plain, lying)


@pytest.mark.parametrize("library", COMPILED)
def test_an_interleaved_prompt_gives_the_same_bits_however_it_is_cut(library: str) -> None:
    """From one row to several blocks of AMX's tiles, some of them not full; on one to three threads."""
    length, dtype = 520, torch.bfloat16
    num_blocks = -(-length // 64)
    cache = interleave(torch.randn(num_blocks, 2, 1, 64, 32).to(dtype))
    query = torch.randn(length, 3, 32).to(dtype)
    block_table = torch.randperm(num_blocks).int()[None]

    def rows(first: int, end: int) -> torch.Tensor:
        metadata = block_table, torch.tensor([end]).int(), torch.tensor([0, end - first]).int()
        return attend(query[first:end], cache, *metadata, scale=0.2, interleaved=True)

    threads = torch.get_num_threads()
    try:
        with native_library(library):
            whole = rows(0, length)
            for num_threads, size in ((1, 7), (2, 100), (3, 250), (2, 512)):
                torch.set_num_threads(num_threads)
                for first in range(0, length, size):
                    end = min(first + size, length)
                    assert torch.equal(rows(first, end), whole[first:end])
            for first in (0, 63, 64, 300, 511, 519):
                assert torch.equal(rows(first, first + 1), whole[first : first + 1])
    finally:
        torch.set_num_threads(threads)


def test_what_cannot_be_read_interleaved_is_refused() -> None:
    query = torch.randn(1, 2, 64)
    metadata = torch.zeros(1, 1).int(), torch.tensor([1]).int(), torch.tensor([0, 1]).int()
    for cache in (torch.zeros(1, 2, 1, 32, 64), torch.zeros(1, 2, 1, 64, 64).to(torch.int8)):
        with pytest.raises(ValueError, match="cannot be read interleaved"):
            attend(query, cache, *metadata, scale=1.0, interleaved=True)
    with pytest.raises(ValueError, match='only "cpu"'):
        attend(query, torch.zeros(1, 2, 1, 64, 64), *metadata, scale=1.0, interleaved=True, backend="torch")
