"""What a request knows of its objectives."""

import math

import pytest
from tandem_core.sampling import SamplingParams
from tandem_engine.request import Request


@pytest.mark.parametrize(
    ("token_s", "ends_by", "num_expected", "num_tokens", "expected"),
    [
        (0.0, math.inf, 50, 10, math.inf),
        (0.2, math.inf, 50, 10, 0.2),
        (0.0, 104.0, 50, 10, 0.1),
        (0.05, 104.0, 50, 10, 0.05),
        (0.2, 104.0, 50, 10, 0.1),
        # As many as it may.
        (0.0, 109.0, 0, 10, 0.1),
        # Longer than expected: a quarter more, but not more than it may.
        (0.0, 102.0, 50, 80, 0.1),
        (0.0, 101.0, 50, 95, 0.2),
        (0.0, 99.0, 50, 40, -0.1),
    ],
)
def test_seconds_per_token_that_keep_its_objectives(token_s, ends_by, num_expected, num_tokens, expected):
    request = Request(
        "r", [1, 2], SamplingParams(max_tokens=100),
        token_s=token_s, ends_by=ends_by, num_expected=num_expected,
    )  # fmt: skip
    request.output_token_ids = list(range(num_tokens))
    assert request.token_limit_s(100.0) == pytest.approx(expected)
