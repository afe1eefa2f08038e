"""The operators that move KV in the paged cache: store_kv, gather_blocks, scatter_blocks, move_slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_kernels import gather_blocks, move_slots, scatter_blocks, store_kv

NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE = 7, 3, 4, 5
NUM_SLOTS = NUM_BLOCKS * BLOCK_SIZE


def make_cache(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE, generator=generator).to(dtype)


def slot(cache: torch.Tensor, index: int) -> torch.Tensor:
    """K and V of one slot, [2, Hkv, D]."""
    return cache[index // BLOCK_SIZE, :, :, index % BLOCK_SIZE]


distinct_slots = st.lists(st.integers(0, NUM_SLOTS - 1), unique=True, max_size=NUM_SLOTS)


@settings(max_examples=50, deadline=None)
@given(slots=distinct_slots, dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_store_kv_writes_each_token_to_its_slot_and_nothing_else(
    slots: list[int], dtype: torch.dtype
) -> None:
    cache = make_cache(dtype)
    before = cache.clone()
    # Views of a fused QKV projection: the last dimension dense, the others strided.
    fused = torch.randn(len(slots), 4 * NUM_KV_HEADS * HEAD_SIZE).to(dtype)
    key = fused[:, : NUM_KV_HEADS * HEAD_SIZE].view(-1, NUM_KV_HEADS, HEAD_SIZE)
    value = fused[:, -NUM_KV_HEADS * HEAD_SIZE :].view(-1, NUM_KV_HEADS, HEAD_SIZE)

    store_kv(key, value, cache, torch.tensor(slots, dtype=torch.int64))

    for token, index in enumerate(slots):
        assert torch.equal(slot(cache, index), torch.stack((key[token], value[token])))
    for index in set(range(NUM_SLOTS)) - set(slots):
        assert torch.equal(slot(cache, index), slot(before, index))


def test_store_kv_casts_to_the_cache_dtype() -> None:
    cache = make_cache(torch.bfloat16)
    key, value = torch.randn(2, 1, NUM_KV_HEADS, HEAD_SIZE)
    store_kv(key, value, cache, torch.tensor([9]))
    assert torch.equal(slot(cache, 9), torch.cat((key, value)).bfloat16())


@settings(max_examples=50, deadline=None)
@given(src=distinct_slots, data=st.data())
def test_move_slots_reads_every_source_before_it_writes(src: list[int], data: st.DataObject) -> None:
    dst = data.draw(st.permutations(range(NUM_SLOTS)))[: len(src)]
    cache = make_cache()
    before = cache.clone()

    move_slots(cache, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64))

    moved = dict(zip(dst, src, strict=True))
    for index in range(NUM_SLOTS):
        assert torch.equal(slot(cache, index), slot(before, moved.get(index, index)))


@settings(max_examples=30, deadline=None)
@given(ids=st.lists(st.integers(0, NUM_BLOCKS - 1), max_size=10))
def test_gather_blocks_copies_in_the_order_asked(ids: list[int]) -> None:
    cache = make_cache()
    payload = gather_blocks(cache, torch.tensor(ids, dtype=torch.int64))
    assert payload.is_contiguous()
    assert payload.shape == (len(ids), *cache.shape[1:])
    assert all(torch.equal(payload[i], cache[block]) for i, block in enumerate(ids))
    payload.zero_()
    assert torch.equal(cache, make_cache()), "the payload is memory of its own"


@settings(max_examples=30, deadline=None)
@given(ids=st.permutations(range(NUM_BLOCKS)), count=st.integers(0, NUM_BLOCKS))
def test_scatter_is_the_inverse_of_gather(ids: list[int], count: int) -> None:
    cache, block_ids = make_cache(), torch.tensor(ids[:count], dtype=torch.int64)
    target = torch.zeros_like(cache)
    scatter_blocks(target, block_ids, gather_blocks(cache, block_ids))
    for block in range(NUM_BLOCKS):
        expected = cache[block] if block in ids[:count] else torch.zeros_like(cache[block])
        assert torch.equal(target[block], expected)


def test_quantized_caches_move_too() -> None:
    cache = torch.randint(-128, 128, (4, 2, 1, 4, 8), dtype=torch.int8)
    target = torch.zeros_like(cache)
    ids = torch.tensor([2, 0])
    scatter_blocks(target, ids, gather_blocks(cache, ids))
    move_slots(target, torch.tensor([8]), torch.tensor([15]))
    assert torch.equal(target[3, :, :, 3], cache[2, :, :, 0])


def test_errors_name_the_argument_and_what_is_wanted() -> None:
    cache = make_cache()
    tokens = torch.zeros(2, NUM_KV_HEADS, HEAD_SIZE)
    slots = torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"value has shape \[1, 3, 5\], wanted \[T, Hkv, D\] = \[2, 3, 5\]"):
        store_kv(tokens, tokens[:1], cache, slots)
    with pytest.raises(ValueError, match=r"kv_cache has shape \[7, 3, 4, 5\], wanted \[num_blocks, 2"):
        store_kv(tokens, tokens, cache[:, 0], slots)
    with pytest.raises(ValueError, match=r"kv_cache has strides .* contiguous"):
        store_kv(tokens, tokens, cache[:, :, :, :, :3], slots)
    with pytest.raises(ValueError, match=r"slot_mapping has shape \[2\] and dtype torch.float32"):
        store_kv(tokens, tokens, cache, slots.float())
    with pytest.raises(ValueError, match="src_slots has 2 slots and dst_slots 1"):
        move_slots(cache, slots, slots[:1])
    with pytest.raises(ValueError, match=r"payload has shape \[1, 2, 3, 4, 5\] .* wanted \[n, 2"):
        scatter_blocks(cache, slots, cache[:1])
    with pytest.raises(IndexError):
        store_kv(tokens, tokens, cache, torch.tensor([0, NUM_SLOTS]))
