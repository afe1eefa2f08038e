"""Every message becomes one of a few sizes."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st
from tandem_drafting.padding import LEAST_BYTES, num_padding_bytes
from tandem_proto.v1 import lookahead_pb2 as pb


def size(message: pb.SyncRequest) -> int:
    message.padding = bytes(num_padding_bytes(message.ByteSize()))
    return message.ByteSize()


@given(st.integers(0, 70_000))
@example(126)
@example(253)
@example(254)
@example(255)
@example(256)
def test_a_padded_message_is_a_power_of_two_and_at_most_two_sizes_up(num_bytes):
    message = pb.SyncRequest(hello=pb.SyncHello(pod_id="x" * num_bytes))
    before = message.ByteSize()
    padded = size(message)
    assert padded & (padded - 1) == 0
    assert max(LEAST_BYTES, before) <= padded <= max(LEAST_BYTES, 4 * before)


def test_what_a_token_is_does_not_show():
    spans = [[pb.Span(run="a" * 16, token_ids=[token] * 12)] for token in (1, 49_000, 2**31 - 1)]
    assert {size(pb.SyncRequest(spans=pb.SpanBatch(spans=batch))) for batch in spans} == {LEAST_BYTES}
