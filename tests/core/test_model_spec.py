"""Specs: their cache groups, and hashes that tell any two of them apart."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tandem_core.model.spec import (
    Activation,
    Attention,
    Branch,
    CacheKind,
    GatedDelta,
    Head,
    Mlp,
    ModelSpec,
    Norm,
    NormKind,
    Rope,
    Sublayer,
)

NORM = Norm(NormKind.RMS, 1e-6)
FULL = Attention(4, 2, 16, 16, 0.25, Rope(16), biases=frozenset({"q", "k", "v", "o"}))
WINDOW = replace(FULL, window=8)
DELTA = GatedDelta(2, 4, 16, 32, 4, NORM)
MLP = Mlp(64, Activation.SILU)


def spec(*mixers: Attention | GatedDelta | Mlp) -> ModelSpec:
    sublayers = tuple(Sublayer((Branch(mixer, NORM),)) for mixer in mixers)
    return ModelSpec(256, 64, 128, sublayers, NORM, Head(tied=True))


def test_layers_with_equal_caches_share_a_group() -> None:
    groups = spec(WINDOW, MLP, WINDOW, MLP, FULL, MLP, DELTA, MLP, WINDOW, MLP).cache_groups()
    assert [(g.kind, g.layers, g.window) for g in groups] == [
        (CacheKind.WINDOW, (0, 1, 4), 8),
        (CacheKind.FULL, (2,), None),
        (CacheKind.STATE, (3,), None),
    ]
    assert [part.shape for part in groups[0].parts] == [(2, 16), (2, 16)]


def test_a_state_holds_the_taps_before_the_next_token_and_one_matrix_per_value_head() -> None:
    (group,) = spec(DELTA).cache_groups()
    assert {part.name: (part.shape, part.dtype) for part in group.parts} == {
        "conv": ((3, 2 * 2 * 16 + 4 * 32), "kv"),
        "recurrent": ((4, 16, 32), "float32"),
    }


def test_mixers_of_parallel_branches_are_cached_in_order() -> None:
    both = Sublayer((Branch(FULL, NORM), Branch(MLP, NORM)))
    parallel = replace(spec(WINDOW), sublayers=(both, Sublayer((Branch(WINDOW),))))
    assert parallel.cached == (FULL, WINDOW)


@pytest.mark.parametrize(
    "changed",
    [
        replace(spec(FULL, MLP), embed_scale=8.0),
        replace(spec(FULL, MLP), head=Head(tied=False)),
        spec(MLP, FULL),
        spec(FULL, replace(MLP, inner=65)),
        spec(replace(FULL, biases=frozenset({"q"})), MLP),
        spec(replace(FULL, rope=None), MLP),
        spec(replace(FULL, rope=Rope(8)), MLP),
        spec(replace(FULL, rope=Rope(16, "table", table=(1.0, 2.0))), MLP),
    ],
)
def test_another_spec_has_another_hash(changed: ModelSpec) -> None:
    assert changed.hash != spec(FULL, MLP).hash


def test_every_process_computes_the_same_hash() -> None:
    path = [str(Path(__file__).parent), *sys.path]
    program = f"import sys; sys.path = {path!r}; from test_model_spec import *; print(spec(FULL, MLP).hash)"
    hashes = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2", "3")
    }
    assert hashes == {spec(FULL, MLP).hash}
