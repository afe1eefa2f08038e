"""What lies between a layer's matrix products: compiled, in torch, and against float64."""

import pytest
import torch
import torch.nn.functional as F
from native_libraries import COMPILED, native_library
from tandem_kernels import add_rms_norm, rope_store, silu_mul, store_kv

LIBRARIES = ["off", *COMPILED]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5


def close(result: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within two roundings of the result's dtype (and of float32 inside)."""
    allowed = 2 * torch.finfo(result.dtype).eps * exact.abs() + 1e-6
    return bool(((result.double() - exact).abs() <= allowed).all())


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, width", [(1, 576), (70, 64), (33, 24), (0, 64)])
def test_add_rms_norm(num_tokens: int, width: int, dtype: torch.dtype, library: str) -> None:
    hidden = random(num_tokens, width, dtype=torch.float32) * 100
    delta = random(num_tokens, width, dtype=dtype, seed=1)
    weight = random(width, dtype=dtype, seed=2)
    total = (hidden + delta).double()  # float32 plus what float32 holds exactly
    exact = total / (total.square().mean(1, keepdim=True) + EPS).sqrt() * weight.double()
    with native_library(library):
        normed = add_rms_norm(hidden, delta, weight, EPS)
        assert torch.equal(hidden.double(), total)
        assert close(normed, exact)
        assert torch.equal(add_rms_norm(hidden, None, weight, EPS), normed)
        assert torch.equal(hidden.double(), total)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_tokens, width", [(1, 1536), (70, 48), (5, 24)])
def test_silu_mul(num_tokens: int, width: int, dtype: torch.dtype, library: str) -> None:
    gate_up = random(num_tokens, 2 * width, dtype=dtype) * 6
    gate_up[0, :4] = torch.tensor([-300.0, 300.0, 0.0, -100.0])
    gate, up = gate_up.double().chunk(2, 1)
    exact = (F.silu(gate) if dtype == torch.float32 else F.silu(gate).to(dtype).double()) * up
    with native_library(library):
        result = silu_mul(gate_up)
    assert result.dtype == dtype
    assert ((result.double() - exact).abs() <= 3 * torch.finfo(dtype).eps * exact.abs() + 1e-5).all()


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_norm", [False, True])
@pytest.mark.parametrize("head_size", [64, 80, 24])
def test_rope_store(head_size: int, with_norm: bool, dtype: torch.dtype, library: str) -> None:
    num_tokens, num_heads, num_kv_heads, block_size = 37, 5, 2, 8
    qkv = random(num_tokens, num_heads + 2 * num_kv_heads, head_size, dtype=dtype)
    positions = torch.arange(num_tokens) * 3
    angles = torch.outer(torch.arange(128.0), torch.rand(head_size // 2))
    rotations = torch.polar(torch.full_like(angles, 1.2), angles)
    slots = torch.randperm(6 * block_size, generator=torch.Generator().manual_seed(3))[:num_tokens]
    norms = [1 + random(head_size, dtype=dtype, seed=s) / 4 if with_norm else None for s in (4, 5)]

    def rotated(heads: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        heads = heads.double()
        if norm is not None:
            heads = heads / (heads.square().mean(2, keepdim=True) + EPS).sqrt() * norm.double()
        pairs = torch.view_as_complex(heads.unflatten(2, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * rotations[positions].unsqueeze(1)).flatten(2)

    query = rotated(qkv[:, :num_heads], norms[0])
    key = rotated(qkv[:, num_heads : num_heads + num_kv_heads], norms[1])
    value = qkv[:, num_heads + num_kv_heads :].clone()
    cache = torch.full((6, 2, num_kv_heads, block_size, head_size), 7.0).to(dtype)
    expected = cache.double()
    store_kv(key, value.double(), expected, slots)

    with native_library(library):
        result = rope_store(
            qkv, positions, rotations, cache, slots, q_norm=norms[0], k_norm=norms[1], eps=EPS
        )
    for got, wanted in ((result, query), (cache, expected)):
        # Rotation mixes two elements, so the error is relative to the larger one.
        allowed = 3 * torch.finfo(dtype).eps * wanted.abs().amax(-1, keepdim=True) + 1e-6
        assert ((got.double() - wanted).abs() <= allowed).all()
    assert torch.equal(cache[:, 1].double(), expected[:, 1])


@pytest.mark.parametrize("library", LIBRARIES)
def test_rope_store_refuses_what_does_not_fit(library: str) -> None:
    rotations, cache = torch.ones(10, 32, dtype=torch.complex64), torch.zeros(2, 2, 1, 4, 64)
    positions = torch.arange(3)
    with native_library(library):
        for message, changed in {
            "wanted a dense": {"qkv": torch.zeros(3, 2, 64)},
            "one per token": {"positions": positions[:2]},
            "rotations has shape": {"rotations": rotations[:, :8]},
        }.items():
            given = {"qkv": torch.zeros(3, 4, 64), "positions": positions, "rotations": rotations, **changed}
            with pytest.raises(ValueError, match=message):
                rope_store(given["qkv"], given["positions"], given["rotations"], cache, torch.arange(3))
        for positions, slots in (
            (torch.tensor([0, 1, 10]), torch.arange(3)),
            (torch.arange(3), torch.tensor([0, 1, 8])),
        ):
            with pytest.raises(IndexError):
                rope_store(torch.zeros(3, 4, 64), positions, rotations, cache, slots)
    assert (cache == 0).all() or library == "off"


def test_shapes_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"delta \[2, 8\].* wanted \[T, H\]"):
        add_rms_norm(torch.zeros(3, 8), torch.zeros(2, 8), torch.zeros(8), EPS)
    with pytest.raises(ValueError, match=r"hidden has dtype torch.bfloat16, wanted float32"):
        add_rms_norm(torch.zeros(3, 8).bfloat16(), None, torch.zeros(8).bfloat16(), EPS)
    with pytest.raises(ValueError, match=r"gate_up has shape \[3, 7\]"):
        silu_mul(torch.zeros(3, 7))
