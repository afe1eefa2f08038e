"""What lies between a sublayer's matrix products: compiled, in torch, and against float64."""

import pytest
import torch
import torch.nn.functional as F
from native_libraries import NATIVE, native_library
from tandem_kernels import (
    NormWeights,
    activate,
    add_norm,
    norm_rows,
    rope_store,
    sigmoid_gate,
    split_cache,
    store_kv,
)

LIBRARIES = ["off", *NATIVE]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def close(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within two roundings of the result's dtype (and of float32 inside)."""
    allowed = 2 * torch.finfo(result.dtype).eps * exact.abs() + 1e-6
    return bool(((result.double() - exact).abs() <= allowed).all())


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact_norm(x: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    """The norm of x's last dimension in float64."""
    x = x.double()
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    if norm.weight is not None:
        x = x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def norm_of(
    kind: str, width: int, dtype: torch.dtype, *, weight: bool = True, bias: bool = False, seed: int = 2
) -> NormWeights:
    return NormWeights(
        kind,
        EPS,
        1 + random(width, dtype=dtype, seed=seed) / 4 if weight else None,
        random(width, dtype=dtype, seed=seed + 50) if bias else None,
    )


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "num_tokens, width, kind, weight, bias, scale",
    [
        (1, 576, "rms", True, False, 1.0),
        (70, 64, "layer", True, True, 0.22),
        (33, 48, "layer", True, False, 1.0),
        (33, 24, "rms", False, False, 2.5),
        (5, 32, "none", False, False, 0.5),
        (0, 64, "rms", True, False, 1.0),
    ],
)
def test_add_norm(
    num_tokens: int, width: int, kind: str, weight: bool, bias: bool, scale: float, dtype: torch.dtype,
    library: str,
) -> None:  # fmt: skip
    hidden = random(num_tokens, width, dtype=torch.float32) * 100
    before, delta = hidden.clone(), random(num_tokens, width, dtype=dtype, seed=1)
    norm = None if kind == "none" else norm_of(kind, width, dtype, weight=weight, bias=bias)
    with native_library(library):
        normed = add_norm(hidden, delta, norm, dtype, scale=scale)
        total = hidden.clone()
        assert close(total, before.double() + scale * delta.double())
        assert normed.dtype == dtype and (normed is not hidden)
        exact = total.double() if norm is None else exact_norm(total, norm)
        assert ((normed.double() - exact).abs() <= 2 * torch.finfo(dtype).eps * exact.abs() + 2e-6).all()
        assert torch.equal(add_norm(hidden, None, norm, dtype), normed)
        assert torch.equal(hidden, total)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_norm_rows(kind: str, dtype: torch.dtype, library: str) -> None:
    for num_tokens, width, weight, bias in ((7, 96, True, True), (3, 64, False, False), (2, 24, True, False)):
        x = random(num_tokens, width, dtype=dtype) * 3
        norm = norm_of(kind, width, torch.float32, weight=weight, bias=bias)
        with native_library(library):
            for out_dtype in (None, torch.float32):
                normed = norm_rows(x, norm, out_dtype)
                assert normed.dtype == (out_dtype or dtype)
                exact = exact_norm(x, norm)
                allowed = 2 * torch.finfo(normed.dtype).eps * exact.abs() + 2e-6
                assert ((normed.double() - exact).abs() <= allowed).all()


def exact_activation(x: torch.Tensor, act: str, gated: bool, limit: float | None) -> torch.Tensor:
    x = x.double()
    gate, up = x.chunk(2, 1) if gated else (x, torch.ones((), dtype=torch.float64))
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


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", ["silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped"])
@pytest.mark.parametrize("num_tokens, width, gated", [(1, 1536, True), (70, 48, False), (5, 24, True)])
def test_activate(
    num_tokens: int, width: int, gated: bool, act: str, dtype: torch.dtype, library: str
) -> None:
    limit, act = (3.0, "silu") if act == "clamped" else (None, act)
    gated = gated or limit is not None
    x = random(num_tokens, width * (2 if gated else 1), dtype=dtype) * 6
    x[0, :6] = torch.tensor([-200.0, 30.0, 0.0, -100.0, -9.0, 9.0])
    with native_library(library):
        result = activate(x, act, gated, limit)
        wide = activate(x, act, gated, limit, torch.float32).to(dtype)
        assert torch.allclose(wide, result, rtol=0, atol=1e-30)  # bfloat16's instruction drops subnormals
        x[0, 7] = torch.nan
        assert activate(x, act, gated, limit)[0, 7].isnan()
    x[0, 7] = 0
    exact = exact_activation(x, act, gated, limit)
    assert result.dtype == dtype
    result[0, 7] = exact[0, 7]
    up = x.double().chunk(2, 1)[1].abs() + 1 if gated else 1
    assert ((result.double() - exact).abs() <= 3 * torch.finfo(dtype).eps * exact.abs() + 3e-6 * up).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("per_head", [False, True])
def test_sigmoid_gate(per_head: bool, dtype: torch.dtype, library: str) -> None:
    x = random(9, 3, 32, dtype=dtype)
    gate = random(9, 3 if per_head else 96, dtype=dtype, seed=1) * 4
    exact = x.double() * torch.sigmoid(gate.double()).view(9, 3, -1)
    with native_library(library):
        assert close(sigmoid_gate(x, gate), exact)
    assert close(x, exact)


#: Head sizes of keys and values, rotated dimensions (0: no rotation), norms of q and k, whether they are
#: whole and follow the rotation, and the norm of v.
ROPE_CASES = {
    "plain": (64, 64, 64, None, False, False, None),
    "normed": (80, 80, 80, "rms", False, False, None),
    "odd": (24, 24, 24, "rms", False, False, None),
    "partial": (64, 64, 24, "layer", False, False, "rms"),
    "after": (48, 32, 32, "rms", False, True, "rms"),
    "whole": (32, 64, 16, "rms", True, False, None),
    "no rope": (32, 32, 0, "rms", True, True, None),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ROPE_CASES)
def test_rope_store(case: str, dtype: torch.dtype, library: str) -> None:
    k_dim, v_dim, rope_dims, kind, whole, after, v_kind = ROPE_CASES[case]
    num_tokens, num_heads, num_kv_heads, block_size = 37, 5, 2, 8
    qkv = random(num_tokens, (num_heads + num_kv_heads) * k_dim + num_kv_heads * v_dim, dtype=dtype)
    positions = torch.arange(num_tokens) * 3
    angles = torch.outer(torch.arange(128.0), torch.rand(rope_dims // 2))
    rotations = torch.polar(torch.full_like(angles, 1.2), angles) if rope_dims else None
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]

    def norm(kind: str | None, width: int, seed: int) -> NormWeights | None:
        return None if kind is None else norm_of(kind, width, dtype, weight=seed != 6, seed=seed)

    q_norm = norm(kind, k_dim * (num_heads if whole else 1), 4)
    k_norm = norm(kind, k_dim * (num_kv_heads if whole else 1), 5)
    v_norm = norm(v_kind, v_dim, 6)

    def normed(heads: torch.Tensor, norm: NormWeights | None) -> torch.Tensor:
        if norm is None:
            return heads
        return exact_norm(heads.flatten(1), norm).view(heads.shape) if whole else exact_norm(heads, norm)

    def finished(heads: torch.Tensor, norm: NormWeights | None) -> torch.Tensor:
        heads = heads.double() if after else normed(heads.double(), norm)
        if rotations is not None:
            pairs = torch.view_as_complex(heads[..., :rope_dims].unflatten(2, (-1, 2)).contiguous())
            rotated = torch.view_as_real(pairs * rotations[positions].unsqueeze(1)).flatten(2)
            heads = torch.cat([rotated, heads[..., rope_dims:]], 2)
        return normed(heads, norm) if after else heads

    query, key, value = qkv.split([num_heads * k_dim, num_kv_heads * k_dim, num_kv_heads * v_dim], 1)
    query = finished(query.unflatten(1, (num_heads, k_dim)), q_norm)
    key = finished(key.unflatten(1, (num_kv_heads, k_dim)), k_norm)
    value = value.unflatten(1, (num_kv_heads, v_dim)).clone()
    if v_norm is not None:
        value = exact_norm(value, v_norm)
    if k_dim == v_dim:
        cache = torch.full((6, 2, num_kv_heads, block_size, k_dim), 7.0).to(dtype)
        expected = cache.double()
        parts = list(zip(cache.unbind(1), expected.unbind(1), strict=True))
    else:
        blocks = torch.full((6, num_kv_heads * block_size * (k_dim + v_dim)), 7.0).to(dtype)
        shape = num_kv_heads, block_size, k_dim, v_dim
        cache, expected = split_cache(blocks, *shape), split_cache(blocks.double(), *shape)
        parts = list(zip(cache, expected, strict=True))
    store_kv(key, value.double(), expected, slots)

    with native_library(library):
        result = rope_store(
            qkv, positions, rotations, cache, slots, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm,
            norm_whole=whole, norm_after_rope=after,
        )  # fmt: skip
    for got, wanted in ((result, query), *parts):
        # Rotation mixes two elements, so the error is relative to the larger one.
        allowed = 4 * torch.finfo(dtype).eps * wanted.abs().amax(-1, keepdim=True) + 2e-6
        assert ((got.double() - wanted).abs() <= allowed).all()
    if v_norm is None:
        assert torch.equal(parts[1][0].double(), parts[1][1])


@pytest.mark.parametrize("library", LIBRARIES)
def test_rope_store_refuses_what_does_not_fit(library: str) -> None:
    rotations, cache = torch.ones(10, 32, dtype=torch.complex64), torch.zeros(2, 2, 1, 4, 64)
    positions = torch.arange(3)
    with native_library(library):
        for message, changed in {
            "wanted a dense": {"qkv": torch.zeros(3, 2 * 64)},
            "one per token": {"positions": positions[:2]},
            "rotations has shape": {"rotations": torch.ones(10, 33, dtype=torch.complex64)},
        }.items():
            given = {"qkv": torch.zeros(3, 4 * 64), "positions": positions, "rotations": rotations, **changed}
            with pytest.raises(ValueError, match=message):
                rope_store(given["qkv"], given["positions"], given["rotations"], cache, torch.arange(3))
        for positions, slots in (
            (torch.tensor([0, 1, 10]), torch.arange(3)),
            (torch.arange(3), torch.tensor([0, 1, 8])),
        ):
            with pytest.raises(IndexError):
                rope_store(torch.zeros(3, 4 * 64), positions, rotations, cache, slots)
    assert (cache == 0).all() or library == "off"


def test_what_does_not_fit_is_named() -> None:
    norm = NormWeights("rms", EPS, torch.zeros(8))
    for message, wrong in {
        r"delta has shape \[2, 8\]": lambda: add_norm(
            torch.zeros(3, 8), torch.zeros(2, 8), norm, torch.float32
        ),
        r"hidden has dtype torch.bfloat16, wanted float32": lambda: add_norm(
            torch.zeros(3, 8).bfloat16(), None, norm, torch.bfloat16
        ),
        r"norm has a weight of shape \[8\], wanted \[16\]": lambda: norm_rows(torch.zeros(3, 16), norm),
        r"norm has kind 'batch', wanted one of": lambda: NormWeights("batch", EPS),
        r"x has shape \[3, 7\]": lambda: activate(torch.zeros(3, 7), "silu", True),
        r"act is 'elu', wanted one of": lambda: activate(torch.zeros(3, 8), "elu", False),
        r"limit is 2.0 and gated False": lambda: activate(torch.zeros(3, 8), "silu", False, 2.0),
        r"gate has shape \[3, 9\]": lambda: sigmoid_gate(torch.zeros(3, 2, 4), torch.zeros(3, 9)),
        r"q_norm has a weight of shape \[8\], wanted \[64\]": lambda: rope_store(
            torch.zeros(3, 4 * 64), torch.arange(3), None, torch.zeros(2, 2, 1, 4, 64), torch.arange(3),
            q_norm=norm,
        ),
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=message):
            wrong()
