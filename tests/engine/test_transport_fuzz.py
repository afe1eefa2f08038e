"""Whatever arrives on the KV wire is a message or a MalformedError; a ticket is checked before it is used."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core.errors import InvalidRequestError
from tandem_engine.transport import codec
from tandem_engine.transport.base import TRANSFER_ID_BYTES
from tandem_proto.v1 import prefill_pb2 as pb

ids = st.binary(min_size=TRANSFER_ID_BYTES, max_size=TRANSFER_ID_BYTES)
numbers = st.integers(0, 2**32 - 1)
messages = st.one_of(
    st.builds(codec.Frame, ids, numbers, numbers, numbers, numbers, st.binary(max_size=16)),
    st.builds(codec.Credit, ids, numbers, st.integers(0, 2**63)),
    st.builds(codec.Reject, ids, numbers, st.text(max_size=50)),
)


@given(messages)
def test_a_message_survives_the_wire(message: codec.Message) -> None:
    assert codec.decode(codec.encode(message)) == message


def decodes_or_refuses(header: bytes) -> None:
    try:
        message = codec.decode(header)
    except codec.MalformedError:
        return
    assert len(message.transfer_id) == TRANSFER_ID_BYTES


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    header = bytearray(codec.encode(draw(messages)))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(header) - 1)) if header else 0
        match draw(st.sampled_from(["flip", "cut", "insert"])):
            case "flip" if header:
                header[position] ^= 1 << draw(st.integers(0, 7))
            case "cut":
                del header[position:]
            case _:
                header[position:position] = draw(st.binary(max_size=8))
    return bytes(header)


headers = st.binary(max_size=200) | damaged() | st.binary(min_size=codec.MAX_HEADER_BYTES + 1, max_size=2000)


@given(headers)
@settings(max_examples=500, deadline=None)
def test_any_header_is_decoded_or_refused(header: bytes) -> None:
    decodes_or_refuses(header)


@pytest.mark.wide
@given(headers)
@settings(max_examples=100_000, deadline=None)
def test_any_of_many_headers_is_decoded_or_refused(header: bytes) -> None:
    decodes_or_refuses(header)


@given(
    st.builds(
        pb.KvTicket,
        transfer_id=st.binary(max_size=40),
        epoch=numbers,
        endpoint=st.text(max_size=80),
        public_key=st.text(max_size=60),
        wanted_blocks=st.lists(st.builds(pb.KvBlocks, blocks=st.lists(numbers, max_size=10)), max_size=3),
        credit_bytes=st.integers(0, 2**63),
    )
)
def test_a_ticket_is_read_as_it_was_sent_or_refused(message: pb.KvTicket) -> None:
    try:
        ticket = codec.ticket_from_proto(message)
    except InvalidRequestError:
        return
    assert codec.ticket_to_proto(ticket) == message
