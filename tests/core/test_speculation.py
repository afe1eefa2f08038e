"""The names of speculation modes, as flags, settings and requests give them."""

from __future__ import annotations

import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.speculation import SpeculationMode


def test_a_name_is_a_mode_and_no_name_is_none() -> None:
    assert SpeculationMode.parse("chain") is SpeculationMode.CHAIN
    assert SpeculationMode.parse("") is None


@pytest.mark.parametrize("name", ["Off", "fast", "CHAIN"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(
        InvalidRequestError, match=f"'{name}' is unknown; use one of off, local, chain, global"
    ):
        SpeculationMode.parse(name)
