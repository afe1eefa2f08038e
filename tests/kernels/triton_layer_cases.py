"""The layer's operators in Triton against float64; run by test_triton_layer_ops in a process of its own.

Under TRITON_INTERPRET=1 the cases run on the CPU, without it on the GPU. The rule: an error of at most twice
that of the operator's torch twin in the same dtype, plus one rounding.
"""

import os
from math import log2
from random import Random

import pytest
import torch
import torch.nn.functional as F
from native_libraries import native_library
from tandem_kernels import add_rms_norm, move_slots, rope_store, silu_mul
from tandem_kernels.gpu import elementwise as gpu_elementwise
from tandem_kernels.gpu import move_slots as gpu_move_slots
from tandem_kernels.gpu import rope_store as gpu_rope
from tandem_kernels.quantize import LARGEST, SMALLEST_SCALE

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FLOAT8 = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2}
EPS = 1e-5

if DEVICE == "cpu":
    # Triton 3.6's interpreter loses the carry when it rounds to float8, and truncates its smallest numbers.
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_as_gpus_do(array, from_dtype, to_dtype, rounding_mode):
        if to_dtype.name in FLOAT8:
            assert array.dtype == "float32"
            return torch.from_numpy(array).to(FLOAT8[to_dtype.name]).view(torch.uint8).numpy()
        return convert(array, from_dtype, to_dtype, rounding_mode)

    interpreter._convert_float = convert_as_gpus_do


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(result: torch.Tensor, twin: torch.Tensor, exact: torch.Tensor, rounding: float = 0.0) -> None:
    """rounding: what one rounding of the result may be off, where a dtype's eps does not say it."""
    assert result.dtype == twin.dtype
    exact = exact.to(twin.device)
    error, allowed = ((r.cpu().double() - exact).abs().max().item() for r in (result, twin))
    floor = max(rounding, torch.finfo(twin.dtype).eps / 2 * exact.abs().max().item())
    assert error <= 2 * allowed + floor, f"error {error:.3g}, torch {allowed:.3g}, floor {floor:.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, width", [(1, 576), (7, 64), (3, 24), (2, 5120), (0, 64)])
def test_add_rms_norm(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    hidden, delta = random(num_tokens, width) * 100, random(num_tokens, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    total = (hidden + delta).double()
    exact = total / (total.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    stream = hidden.to(DEVICE)
    result = gpu_elementwise.add_rms_norm(stream, delta.to(DEVICE), weight.to(DEVICE), EPS)
    assert torch.equal(stream.cpu().double(), total)
    assert torch.equal(gpu_elementwise.add_rms_norm(stream, None, weight.to(DEVICE), EPS), result)
    assert torch.equal(stream.cpu().double(), total)
    with native_library("off"):
        twin = add_rms_norm(hidden, delta, weight, EPS)
    if num_tokens:
        check(result, twin, exact)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, width", [(1, 1536), (9, 48), (3, 2500), (0, 8)])
def test_silu_mul(num_tokens: int, width: int, dtype: torch.dtype) -> None:
    gate_up = random(num_tokens, 2 * width, dtype=dtype) * 6
    gate_up[:1, :4] = torch.tensor([-300.0, 300.0, 0.0, -100.0])
    gate, up = gate_up.double().chunk(2, 1)
    result = gpu_elementwise.silu_mul(gate_up.to(DEVICE))
    assert result.shape == (num_tokens, width)
    with native_library("off"):
        twin = silu_mul(gate_up)
    if num_tokens:
        check(result, twin, F.silu(gate) * up)


def strided_cache(shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> torch.Tensor:
    """A layer of a pool that keeps heads outermost and all layers of a block together."""
    num_blocks, _, num_kv_heads, block_size, head_size = shape
    pool = torch.full((num_kv_heads, num_blocks, 3, 2, block_size, head_size), fill).to(dtype)
    return pool[:, :, 1].permute(1, 2, 0, 3, 4)


class RopeCase:
    """17 tokens, 5 query and 2 K/V heads, scattered over 6 blocks of 16."""

    def __init__(self, head_size: int, dtype: torch.dtype, cache_dtype: torch.dtype, norms: str) -> None:
        self.num_tokens, self.num_heads, self.num_kv_heads, self.block_size = 17, 5, 2, 16
        self.qkv = random(self.num_tokens, 9, head_size, dtype=dtype)
        self.positions = torch.arange(self.num_tokens) * 3
        angles = torch.outer(torch.arange(128.0), torch.rand(head_size // 2))
        self.rotations = torch.polar(torch.full_like(angles, 1.2), angles)
        self.slots = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(3))[: self.num_tokens]
        self.norms = {
            f"{n}_norm": 1 + random(head_size, dtype=dtype, seed=s) / 4 if n in norms else None
            for n, s in (("q", 4), ("k", 5))
        }
        self.cache_shape = (6, 2, self.num_kv_heads, self.block_size, head_size)
        self.cache_dtype = cache_dtype

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values in float64."""

        def rotated(heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
            if norm is not None:
                heads = heads / (heads.square().mean(2, keepdim=True) + EPS).sqrt() * norm.double()
            pairs = torch.view_as_complex(heads.unflatten(2, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * self.rotations[self.positions].unsqueeze(1)).flatten(2)

        query, key, value = self.qkv.double().split([5, 2, 2], 1)
        return rotated(query, self.norms["q_norm"]), rotated(key, self.norms["k_norm"]), value

    def run(self, operator, device: str, cache: torch.Tensor, **scales: object) -> torch.Tensor:
        moved = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in self.norms.items()}
        return operator(
            self.qkv.clone().to(device), self.positions.to(device), self.rotations.to(device), cache,
            self.slots.to(device), eps=EPS, **moved, **scales,
        )  # fmt: skip

    def stored(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, Hkv, D] float64 at the tokens' slots."""
        at = cache.cpu().double()[self.slots // 16, :, :, self.slots % 16]
        return at[:, 0], at[:, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_size, norms", [(64, ""), (80, "qk"), (256, "k")])
def test_rope_store(head_size: int, dtype: torch.dtype, norms: str) -> None:
    case = RopeCase(head_size, dtype, dtype, norms)
    cache = strided_cache(case.cache_shape, dtype, 7.0).to(DEVICE)
    result = case.run(gpu_rope.rope_store, DEVICE, cache)
    twin_cache = torch.full(case.cache_shape, 7.0).to(dtype)
    with native_library("off"):
        twin = case.run(rope_store, "cpu", twin_cache)
    query, key, value = case.exact()
    check(result, twin, query)
    keys, values = case.stored(cache)
    check(keys.to(dtype), case.stored(twin_cache)[0].to(dtype), key)
    assert torch.equal(values, value)
    others = torch.ones(6 * 16, dtype=torch.bool)
    others[case.slots] = False
    assert (cache.cpu().permute(0, 3, 1, 2, 4).flatten(0, 1)[others] == 7.0).all()


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rope_store_quantises(dtype: torch.dtype, cache_dtype: torch.dtype, per_token: bool) -> None:
    case = RopeCase(80, dtype, cache_dtype, "k")
    case.qkv[3] = 0  # a token whose largest element is 0
    largest = LARGEST[cache_dtype]
    if per_token:
        shape = (6, case.num_kv_heads, 16)
        scales = {n: torch.full(shape, -1.0) for n in ("k_scale", "v_scale")}
    else:
        # The second head's scale is too small: what does not fit is cut off.
        scales = {
            "k_scale": torch.tensor([6.0, 1.0]) / largest,
            "v_scale": torch.tensor([5.0, 0.7]) / largest,
        }
    ours, theirs = ({n: s.clone() for n, s in scales.items()} for _ in range(2))
    ours = {n: s.to(DEVICE) for n, s in ours.items()}
    cache = strided_cache(case.cache_shape, cache_dtype, 0.0).to(DEVICE)
    result = case.run(gpu_rope.rope_store, DEVICE, cache, **ours)
    twin_cache = torch.zeros(case.cache_shape).to(cache_dtype)
    with native_library("off"):
        twin = case.run(rope_store, "cpu", twin_cache, **theirs)
    exact = case.exact()
    check(result, twin, exact[0])

    # Between neighbours, where they lie furthest apart.
    step = 1.0 if cache_dtype == torch.int8 else 2.0 ** int(log2(largest)) * torch.finfo(cache_dtype).eps
    for name, number, wanted in (("k_scale", 0, exact[1]), ("v_scale", 1, exact[2])):
        if per_token:
            block_ids, offsets = case.slots // 16, case.slots % 16
            scale, twin_scale = (s[name].cpu()[block_ids, :, offsets][:, :, None] for s in (ours, theirs))
            ideal = (wanted.abs().amax(2, keepdim=True) / largest).clamp(min=SMALLEST_SCALE)
            check(scale, twin_scale, ideal)
            unused = torch.ones(6 * 16, dtype=torch.bool)
            unused[case.slots] = False
            assert (ours[name].cpu().permute(0, 2, 1).flatten(0, 1)[unused] == -1.0).all()
        else:
            scale = twin_scale = scales[name][None, :, None]
        got, twin_got = case.stored(cache)[number] * scale, case.stored(twin_cache)[number] * twin_scale
        clipped = torch.minimum(torch.maximum(wanted, -largest * scale), largest * scale)
        # Either may round a number in the middle its own way: half a step at the largest scale.
        check(got.float(), twin_got.float(), clipped, rounding=0.01 * step * scale.max().item())
        assert (got - clipped).abs().max() <= 0.51 * step * scale.max(), "off by more than a rounding"


def test_a_token_without_a_slot_is_stored_nowhere() -> None:
    case = RopeCase(64, torch.float32, torch.float32, "")
    case.slots[5], case.slots[6] = -1, 6 * 16
    cache = torch.full(case.cache_shape, 7.0, device=DEVICE)
    before = cache.clone()
    case.run(gpu_rope.rope_store, DEVICE, cache)
    kept = [i for i in range(case.num_tokens) if i not in (5, 6)]
    changed = (cache != before).any(4).any(2).any(1).cpu().flatten().nonzero()[:, 0]
    assert changed.tolist() == sorted(case.slots[kept].tolist())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "dtype, num_kv_heads, head_size",
    [(torch.bfloat16, 2, 64), (torch.float32, 3, 80), (torch.int8, 1, 16), (torch.float8_e5m2, 1, 40)],
    ids=str,
)
def test_accepted_paths_move_in_all_layers(
    dtype: torch.dtype, num_kv_heads: int, head_size: int, seed: int
) -> None:
    """Random paths of several sequences, whose sources are destinations of later moves."""
    block_size = 16
    source = Random(seed)
    shape = (3, 20, 2, num_kv_heads, block_size, head_size * dtype.itemsize)
    memory = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    caches = memory.view(dtype).to(DEVICE)
    src, dst = [], []
    blocks = iter(source.sample(range(20), 20))
    for _ in range(source.choice([1, 2, 4])):
        own = [next(blocks) for _ in range(5)]
        slots = [block * block_size + offset for block in own for offset in range(block_size)]
        start = source.randrange(block_size)
        num_nodes = source.choice([3, 8, 20, 63])
        path = sorted(source.sample(range(1, num_nodes), source.randint(1, num_nodes - 1)))
        moves = [(node, k) for k, node in enumerate(path, start=1) if node != k]
        src += [slots[start + node] for node, _ in moves]
        dst += [slots[start + k] for _, k in moves]
    expected = caches.clone()
    pair = torch.tensor([src, dst], dtype=torch.int64, device=DEVICE)
    for cache in expected:
        move_slots(cache, *pair)
    gpu_move_slots.move_slots(caches, *pair)
    assert torch.equal(caches.view(torch.uint8), expected.view(torch.uint8))


def test_moves_from_or_to_slots_outside_are_left_out() -> None:
    caches = random(2, 3, 2, 1, 16, 16).to(DEVICE)
    around = caches.clone()
    expected = caches.clone()
    for cache in expected:
        move_slots(cache, torch.tensor([5], device=DEVICE), torch.tensor([4], device=DEVICE))
    slots = torch.tensor([[5, -1, 48, 7], [4, 3, 2, 48]], device=DEVICE)
    gpu_move_slots.move_slots(around, *slots)
    assert torch.equal(around, expected)


def test_strides_that_kernels_do_not_take_are_named() -> None:
    with pytest.raises(ValueError, match="gate_up has strides"):
        gpu_elementwise.silu_mul(torch.zeros(4, 8, device=DEVICE).t())
    with pytest.raises(ValueError, match="at most 32768"):
        gpu_elementwise.add_rms_norm(
            torch.zeros(1, 40000, device=DEVICE), None, torch.zeros(40000, device=DEVICE), EPS
        )
