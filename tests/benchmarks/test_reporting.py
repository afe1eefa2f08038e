"""What a results page says of the hardware."""

from __future__ import annotations

import pytest
from reporting import describe_features


@pytest.mark.parametrize(
    ("flags", "features"),
    [
        ({"avx2", "fma"}, "avx2"),
        ({"avx2", "avx512f", "amx_tile", "amx_int8", "amx_bf16"}, "avx2, avx512f, amx"),
        ({"avx2", "amx_tile", "amx_int8"}, "avx2"),
        (set(), "no known vector instructions"),
    ],
)
def test_features_are_named_where_all_their_flags_are_there(flags: set[str], features: str) -> None:
    assert describe_features(flags) == features
