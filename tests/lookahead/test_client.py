"""The decode pod's client on its own: it never blocks, never raises, and loses nothing quietly."""

from __future__ import annotations

import asyncio

from tandem_decode.lookahead_client import LookaheadClient, joined
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb

NOWHERE = "127.0.0.1:1"
NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")


def test_consecutive_pieces_of_a_request_travel_as_one():
    pieces = [
        AcceptedSpan("a", 0, (1, 2)),
        AcceptedSpan("b", 5, (9,)),
        AcceptedSpan("a", 2, (3,)),
        AcceptedSpan("b", 7, (8,)),  # b's sixth token is missing
    ]
    assert joined(pieces) == [
        AcceptedSpan("a", 0, (1, 2, 3)),
        AcceptedSpan("b", 5, (9,)),
        AcceptedSpan("b", 7, (8,)),
    ]


async def test_without_a_service_nothing_is_drafted_from_other_requests(fleet):
    mirror = GlobalMirror()
    client = LookaheadClient(NOWHERE, NAMESPACE, "pod", mirror)
    client.start()
    try:
        client.push("r1", 0, [1, 2, 3])
        await asyncio.sleep(0.2)
        assert (mirror.num_tokens, client.connected, client.dropped) == (0, False, 0)
    finally:
        await client.close()


async def test_full_queues_drop_and_count(fleet):
    client = LookaheadClient(NOWHERE, NAMESPACE, "pod", GlobalMirror(), max_queued_spans=3)
    for number in range(5):
        client.push(f"r{number}", 0, [1, 2])
    assert client.dropped == 2  # before the client even runs
    client.start()
    try:
        await asyncio.sleep(0.2)
        client.push("r9", 0, [1, 2])
        await fleet.until(lambda: client.dropped == 3)  # one more than may wait for the service
    finally:
        await client.close()
