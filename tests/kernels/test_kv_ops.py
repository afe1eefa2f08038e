"""The operators that move KV in the paged cache: store_kv, move_slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_kernels import move_slots, store_kv
from tandem_kernels.quantize import LARGEST, SMALLEST_SCALE

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


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtype", list(LARGEST), ids=str)
def test_store_kv_quantises_to_the_nearest(dtype: torch.dtype, per_token: bool) -> None:
    num_tokens = 6
    tokens = torch.randn(2, num_tokens, NUM_KV_HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(1))
    tokens[:, 2] = 0.0  # its largest element is 0
    slots = torch.tensor([27, 0, 9, 3, 14, 5])
    if per_token:
        scales = [torch.full((NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE), -1.0) for _ in range(2)]
    else:
        # The second head's are too small: what does not fit is cut off.
        scales = [
            torch.tensor([5.0, 0.5, 9.0]) / LARGEST[dtype],
            torch.tensor([7.0, 1.0, 4.0]) / LARGEST[dtype],
        ]
    cache = torch.zeros(NUM_BLOCKS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE).to(dtype)
    store_kv(tokens[0], tokens[1], cache, slots, k_scale=scales[0], v_scale=scales[1])

    every = torch.arange(-128, 128, dtype=torch.int8)
    representable = every[every != -128] if dtype == torch.int8 else every.view(dtype)
    representable = representable.double()[representable.double().isfinite()]
    for number, scale in enumerate(scales):
        for token, index in enumerate(slots.tolist()):
            block_id, offset = divmod(index, BLOCK_SIZE)
            own = scale[block_id, :, offset] if per_token else scale
            if per_token:
                wanted = tokens[number, token].abs().amax(1) / LARGEST[dtype]
                torch.testing.assert_close(own, wanted.clamp(min=SMALLEST_SCALE))
            scaled = tokens[number, token].double() / own.double()[:, None]
            nearest = (scaled[..., None] - representable).abs().amin(-1)
            stored = cache[block_id, number, :, offset].double()
            assert ((stored - scaled).abs() <= nearest * (1 + 1e-5) + 1e-9).all()
    if per_token:
        assert (scales[0] == -1.0).sum() == (NUM_SLOTS - num_tokens) * NUM_KV_HEADS


def test_scales_that_do_not_fit_are_named() -> None:
    tokens, slots = torch.zeros(2, NUM_KV_HEADS, HEAD_SIZE), torch.tensor([0, 1])
    quantized = make_cache().to(torch.int8)
    per_token = torch.zeros(NUM_BLOCKS, NUM_KV_HEADS, BLOCK_SIZE)
    for message, cache, k_scale, v_scale in (
        ("wanted int8 or float8 to go with scales", make_cache(), 1.0, 1.0),
        ("both be per token", quantized, per_token, 1.0),
        (r"v_scale has shape \[2\]", quantized, 1.0, torch.ones(2)),
        (r"k_scale has .* dtype torch.float64", quantized, per_token.double(), per_token),
    ):
        with pytest.raises(ValueError, match=message):
            store_kv(tokens, tokens, cache, slots, k_scale=k_scale, v_scale=v_scale)


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


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float64], ids=str
)
def test_caches_of_every_dtype_move(dtype: torch.dtype) -> None:
    bits = torch.randint(0, 256, (4, 2, 1, 4, 8 * dtype.itemsize), dtype=torch.uint8)
    cache = bits.view(dtype)
    wanted = bits.clone()
    wanted[3, :, :, 3] = bits[2, :, :, 0]
    move_slots(cache, torch.tensor([8]), torch.tensor([15]))
    assert torch.equal(cache.view(torch.uint8), wanted)


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
    with pytest.raises(IndexError):
        store_kv(tokens, tokens, cache, torch.tensor([0, NUM_SLOTS]))
