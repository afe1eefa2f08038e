"""The client outlives whatever goes wrong once: here a stray cancellation."""

import asyncio

import grpc.aio
from tandem_decode.lookahead_client import LookaheadClient
from tandem_drafting.mirror import GlobalMirror
from tandem_proto.v1 import lookahead_pb2 as pb
from waiting import until

NOWHERE = "127.0.0.1:1"
NAMESPACE = pb.Namespace(tenant="acme", model_revision="rev1", tokenizer_hash="tok1")


class StreamCancelledOnce(LookaheadClient):
    num_streams = 0

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        self.num_streams += 1
        if self.num_streams == 1:
            raise asyncio.CancelledError  # as the library does for a call that it cancelled itself
        await asyncio.Event().wait()


async def test_a_cancellation_meant_for_the_call_does_not_end_the_link_but_close_does():
    client = StreamCancelledOnce(NOWHERE, NAMESPACE, "pod", GlobalMirror())
    client.start()
    try:
        await until(lambda: client.num_streams == 2)
    finally:
        async with asyncio.timeout(5.0):
            await client.close()
