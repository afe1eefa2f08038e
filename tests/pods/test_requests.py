"""What the messages of a request say to a pod."""

import math
import time

import pytest
from tandem_pod.requests import due_at, end_due_at, token_objective
from tandem_proto.v1 import decode_pb2, prefill_pb2


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(None, 60), (1.5, 1.5), (-3.0, -3.0), (math.nan, 0), (math.inf, 86_400), (-math.inf, -86_400)],
)
def test_a_deadline_is_always_a_number(sent, seconds):
    fields = {} if sent is None else {"due_seconds": sent}
    for message in (decode_pb2.DecodeRequest(**fields), prefill_pb2.PrefillRequest(**fields)):
        assert due_at(message) - time.monotonic() == pytest.approx(seconds, abs=0.5)


@pytest.mark.parametrize(
    ("sent", "seconds"),
    [(None, math.inf), (1.5, 1.5), (100.0, 95.0), (-3.0, -3.0), (math.nan, 0), (math.inf, 86_400)],
)
def test_the_deadline_of_the_last_token_is_a_number_or_never(sent, seconds):
    message = decode_pb2.DecodeRequest() if sent is None else decode_pb2.DecodeRequest(end_seconds=sent)
    assert end_due_at(message) - time.monotonic() == pytest.approx(seconds, abs=0.5)


@pytest.mark.parametrize(
    ("sent", "seconds"), [(0.0, 0), (0.15, 0.15), (-1.0, 0), (math.nan, 0), (math.inf, 86_400)]
)
def test_an_objective_per_token_is_always_a_number(sent, seconds):
    message = decode_pb2.DecodeRequest(token_seconds=sent)
    assert token_objective(message) == pytest.approx(seconds)
