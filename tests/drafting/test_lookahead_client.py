"""The lookahead client without a service: it never blocks, never raises, and counts what it drops."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import grpc.aio
import pytest
from grpc_servers import serving
from tandem_drafting.lookahead_client import LookaheadClient, joined
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_proto.v1 import lookahead_pb2 as pb
from tandem_proto.v1 import lookahead_pb2_grpc
from waiting import run_ready_tasks, until

NOWHERE = "127.0.0.1:1"
NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")


def test_consecutive_pieces_of_a_sequence_become_one_span():
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


async def test_full_queues_drop_and_count():
    mirror = GlobalMirror()
    client = LookaheadClient(NOWHERE, NAMESPACE, "pod", mirror, max_queued_spans=3)
    for number in range(5):
        client.push(f"r{number}", 0, [1, 2])
    assert client.dropped == 2  # before the client even runs
    client.start()
    try:
        await run_ready_tasks()  # the client takes what is queued, and cannot send it
        client.push("r9", 0, [1, 2])
        await until(lambda: client.dropped == 3)  # one more than may wait for the service
        assert (mirror.num_tokens, client.connected) == (0, False)
    finally:
        await client.close()


class StreamCancelledOnce(LookaheadClient):
    num_streams = 0

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        self.num_streams += 1
        if self.num_streams == 1:
            raise asyncio.CancelledError  # as the library does for a call that it cancelled itself
        await asyncio.Event().wait()


async def test_a_cancelled_call_does_not_end_the_client_but_close_does():
    client = StreamCancelledOnce(NOWHERE, NAMESPACE, "pod", GlobalMirror())
    client.start()
    try:
        await until(lambda: client.num_streams == 2)
    finally:
        async with asyncio.timeout(5.0):
            await client.close()


class SlowService(lookahead_pb2_grpc.LookaheadServiceServicer):
    """Welcomes a stream when it is told to."""

    def __init__(self) -> None:
        self.opened, self.welcome = threading.Event(), threading.Event()

    def Sync(self, request_iterator, context) -> Iterator[pb.SyncResponse]:  # noqa: N802
        self.opened.set()
        self.welcome.wait(20)
        yield pb.SyncResponse(welcome=pb.SyncWelcome(wants_prompts=True))
        for _ in request_iterator:  # ends with the stream
            pass


@pytest.mark.timeout(30)
async def test_a_stream_is_connected_once_the_service_has_welcomed_it():
    service = SlowService()
    with serving(service, lookahead_pb2_grpc.add_LookaheadServiceServicer_to_server) as target:
        client = LookaheadClient(target, NAMESPACE, "pod", GlobalMirror())
        client.start()
        try:
            await until(service.opened.is_set)
            assert (client.connected, client.wants_prompts) == (False, False)
            service.welcome.set()
            await until(lambda: client.connected and client.wants_prompts)
        finally:
            await client.close()
