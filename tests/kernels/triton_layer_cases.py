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
from tandem_kernels import (
    NormWeights,
    activate,
    add_norm,
    move_slots,
    norm_rows,
    rope_store,
    split_cache,
)
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


def exact_norm(x: torch.Tensor, norm: NormWeights | None) -> torch.Tensor:
    x = x.double()
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    if norm.weight is not None:
        x = x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def norm_of(kind: str, width: int, dtype: torch.dtype, *, weight=True, bias=False, seed=2) -> NormWeights:
    return NormWeights(
        kind, EPS, 1 + random(width, dtype=dtype, seed=seed) / 4 if weight else None,
        random(width, dtype=dtype, seed=seed + 50) if bias else None,
    )  # fmt: skip


def moved(norm: NormWeights | None) -> NormWeights | None:
    if norm is None:
        return None
    weight, bias = (None if t is None else t.to(DEVICE) for t in (norm.weight, norm.bias))
    return NormWeights(norm.kind, norm.eps, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "num_tokens, width, kind, weight, bias, scale",
    [
        (1, 576, "rms", True, False, 1.0),
        (7, 64, "layer", True, True, 0.22),
        (3, 24, "rms", False, False, 1.0),
        (2, 5120, "layer", True, False, 2.5),
        (2, 48, "none", False, False, 0.5),
        (0, 64, "rms", True, False, 1.0),
    ],
)
def test_add_norm(
    num_tokens: int, width: int, kind: str, weight: bool, bias: bool, scale: float, dtype: torch.dtype
) -> None:
    hidden, delta = random(num_tokens, width) * 100, random(num_tokens, width, dtype=dtype, seed=1)
    norm = None if kind == "none" else norm_of(kind, width, dtype, weight=weight, bias=bias)
    stream, twin_stream = hidden.clone().to(DEVICE), hidden.clone()
    result = gpu_elementwise.add_norm(stream, delta.to(DEVICE), moved(norm), dtype, scale=scale)
    total = stream.clone()
    assert torch.equal(gpu_elementwise.add_norm(stream, None, moved(norm), dtype), result)
    assert torch.equal(stream, total)
    with native_library("off"):
        twin = add_norm(twin_stream, delta, norm, dtype, scale=scale)
    if num_tokens:
        check(total, twin_stream, hidden.double() + scale * delta.double())
        check(result, twin, exact_norm(total.cpu(), norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_rows(dtype: torch.dtype) -> None:
    x, norm = random(5, 96, dtype=dtype) * 3, norm_of("layer", 96, torch.float32, bias=True)
    for out_dtype in (dtype, torch.float32):
        result = gpu_elementwise.norm_rows(x.to(DEVICE), moved(norm), out_dtype)
        with native_library("off"):
            check(result, norm_rows(x, norm, out_dtype), exact_norm(x, norm))
    part = random(5, 200, dtype=dtype).to(DEVICE)
    before = part.clone()
    gpu_elementwise.norm_rows_in_place(part[:, 50:146], moved(norm))
    with native_library("off"):
        twin = norm_rows(before[:, 50:146].cpu().contiguous(), norm)
    check(part[:, 50:146], twin, exact_norm(before[:, 50:146].cpu(), norm))
    assert torch.equal(part[:, :50], before[:, :50]) and torch.equal(part[:, 146:], before[:, 146:])


def exact_activation(x: torch.Tensor, act: str, gated: bool, limit: float | None) -> torch.Tensor:
    gate, up = x.chunk(2, 1) if gated else (x, torch.ones(()))
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    functions = {
        "silu": F.silu,
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu": F.relu,
        "relu2": lambda x: F.relu(x).square(),
    }
    return functions[act](gate) * up


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, width", [(1, 1536), (9, 48), (3, 2500), (0, 8)])
@pytest.mark.parametrize(
    "act, gated, limit",
    [("silu", True, None), ("gelu", False, None), ("gelu_tanh", True, None), ("relu", False, None),
     ("relu2", False, None), ("silu", True, 3.0)],
    ids=str,
)  # fmt: skip
def test_activate(
    act: str, gated: bool, limit: float | None, num_tokens: int, width: int, dtype: torch.dtype
) -> None:
    x = random(num_tokens, width * (2 if gated else 1), dtype=dtype) * 6
    x[:1, :4] = torch.tensor([-200.0, 30.0, 0.0, -100.0])
    result = gpu_elementwise.activate(x.to(DEVICE), act, gated, limit, dtype)
    assert result.shape == (num_tokens, width)
    with native_library("off"):
        twin = activate(x, act, gated, limit)
    if num_tokens:
        check(result, twin, exact_activation(x.double(), act, gated, limit))


def strided_cache(shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> torch.Tensor:
    """A layer of a pool that keeps heads outermost and all layers of a block together."""
    num_blocks, _, num_kv_heads, block_size, head_size = shape
    pool = torch.full((num_kv_heads, num_blocks, 3, 2, block_size, head_size), fill).to(dtype)
    return pool[:, :, 1].permute(1, 2, 0, 3, 4)


class RopeCase:
    """17 tokens, 5 query and 2 K/V heads, scattered over 6 blocks of 16. `norms` names those of q, k and v,
    and "whole" and "after"; rope_dims 0: no rotation."""

    def __init__(
        self, k_dim: int, dtype: torch.dtype, cache_dtype: torch.dtype, norms: tuple[str, ...] = (),
        v_dim: int | None = None, rope_dims: int | None = None, kind: str = "rms",
    ) -> None:  # fmt: skip
        self.num_tokens, self.num_heads, self.num_kv_heads, self.block_size = 17, 5, 2, 16
        self.k_dim, self.v_dim = k_dim, v_dim or k_dim
        self.rope_dims = k_dim if rope_dims is None else rope_dims
        self.sizes = [5 * k_dim, 2 * k_dim, 2 * self.v_dim]
        self.qkv = random(self.num_tokens, sum(self.sizes), dtype=dtype)
        self.positions = torch.arange(self.num_tokens) * 3
        angles = torch.outer(torch.arange(128.0), torch.rand(self.rope_dims // 2))
        self.rotations = torch.polar(torch.full_like(angles, 1.2), angles) if self.rope_dims else None
        self.slots = torch.randperm(6 * 16, generator=torch.Generator().manual_seed(3))[: self.num_tokens]
        self.whole, self.after = "whole" in norms, "after" in norms
        widths = {
            "q": k_dim * (5 if self.whole else 1),
            "k": k_dim * (2 if self.whole else 1),
            "v": self.v_dim,
        }
        self.norms = {
            n: norm_of(kind, width, dtype, weight=n != "v", bias=kind == "layer", seed=seed)
            if n in norms
            else None
            for seed, (n, width) in enumerate(widths.items(), 4)
        }
        self.cache_shape = (6, 2, self.num_kv_heads, self.block_size, k_dim)
        self.cache_dtype = cache_dtype

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values in float64."""

        def normed(heads: torch.Tensor, name: str) -> torch.Tensor:
            if self.whole and name != "v":
                return exact_norm(heads.flatten(1), self.norms[name]).view(heads.shape)
            return exact_norm(heads, self.norms[name])

        def finished(heads: torch.Tensor, name: str) -> torch.Tensor:
            heads = heads if self.after else normed(heads, name)
            if self.rotations is not None:
                pairs = torch.view_as_complex(heads[..., : self.rope_dims].unflatten(2, (-1, 2)).contiguous())
                rotated = torch.view_as_real(pairs * self.rotations[self.positions].unsqueeze(1)).flatten(2)
                heads = torch.cat([rotated, heads[..., self.rope_dims :]], 2)
            return normed(heads, name) if self.after else heads

        query, key, value = (
            part.unflatten(1, (heads, -1))
            for part, heads in zip(self.qkv.double().split(self.sizes, 1), (5, 2, 2), strict=True)
        )
        return finished(query, "q"), finished(key, "k"), normed(value, "v")

    def run(self, operator, device: str, cache, **scales: object) -> torch.Tensor:
        norms = {f"{n}_norm": moved(norm) if device == DEVICE else norm for n, norm in self.norms.items()}
        return operator(
            self.qkv.clone().to(device), self.positions.to(device),
            None if self.rotations is None else self.rotations.to(device), cache,
            self.slots.to(device), norm_whole=self.whole, norm_after_rope=self.after, **norms, **scales,
        )  # fmt: skip

    def stored(self, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [T, Hkv, D] float64 at the tokens' slots."""
        at = cache.cpu().double()[self.slots // 16, :, :, self.slots % 16]
        return at[:, 0], at[:, 1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "head_size, norms, rope_dims",
    [(64, (), 64), (80, ("q", "k"), 80), (256, ("k",), 256), (64, ("q", "k", "v", "after"), 24),
     (32, ("q", "k", "v", "whole"), 0)],
    ids=str,
)  # fmt: skip
def test_rope_store(head_size: int, norms: tuple[str, ...], rope_dims: int, dtype: torch.dtype) -> None:
    case = RopeCase(
        head_size, dtype, dtype, norms, rope_dims=rope_dims, kind="layer" if rope_dims == 24 else "rms"
    )
    cache = strided_cache(case.cache_shape, dtype, 7.0).to(DEVICE)
    result = case.run(gpu_rope.rope_store, DEVICE, cache)
    twin_cache = torch.full(case.cache_shape, 7.0).to(dtype)
    with native_library("off"):
        twin = case.run(rope_store, "cpu", twin_cache)
    query, key, value = case.exact()
    check(result, twin, query)
    keys, values = case.stored(cache)
    check(keys.to(dtype), case.stored(twin_cache)[0].to(dtype), key)
    if "v" in norms:
        check(values.to(dtype), case.stored(twin_cache)[1].to(dtype), value)
    else:
        assert torch.equal(values, value)
    others = torch.ones(6 * 16, dtype=torch.bool)
    others[case.slots] = False
    assert (cache.cpu().permute(0, 3, 1, 2, 4).flatten(0, 1)[others] == 7.0).all()


def test_rope_store_with_values_narrower_than_keys() -> None:
    case = RopeCase(48, torch.float32, torch.float32, ("q", "k"), v_dim=32, rope_dims=16)
    blocks = torch.zeros(6, 2 * 16 * (48 + 32))
    keys, values = split_cache(blocks.to(DEVICE), 2, 16, 48, 32)
    result = case.run(gpu_rope.rope_store, DEVICE, (keys, values))
    twin_keys, twin_values = split_cache(blocks, 2, 16, 48, 32)
    with native_library("off"):
        twin = case.run(rope_store, "cpu", (twin_keys, twin_values))
    query, key, _ = case.exact()
    check(result, twin, query)
    at = case.slots // 16, slice(None), case.slots % 16
    check(keys.cpu()[at], twin_keys[at], key)
    assert torch.equal(values.cpu(), twin_values)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_rope_store_quantises(dtype: torch.dtype, cache_dtype: torch.dtype, per_token: bool) -> None:
    case = RopeCase(80, dtype, cache_dtype, ("k",))
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
    case = RopeCase(64, torch.float32, torch.float32)
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


def test_what_kernels_do_not_take_is_named() -> None:
    with pytest.raises(ValueError, match="x has strides"):
        gpu_elementwise.activate(torch.zeros(4, 8, device=DEVICE).t(), "silu", True, None, torch.float32)
    with pytest.raises(ValueError, match="at most 32768"):
        gpu_elementwise.add_norm(torch.zeros(1, 40000, device=DEVICE), None, None, torch.float32)
    case = RopeCase(64, torch.float32, torch.float32, ("q", "k", "whole", "after"))
    with pytest.raises(ValueError, match="norm_whole and norm_after_rope are both set"):
        case.run(gpu_rope.rope_store, DEVICE, torch.zeros(case.cache_shape, device=DEVICE))
