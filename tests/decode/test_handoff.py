"""A handoff's blocks belong to the writer as well, until its transfer has ended."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest
from tandem_core.errors import InvariantError
from tandem_core.sampling import SamplingParams
from tandem_decode.handoff import Attempts, Handoff
from tandem_decode.prefill_client import PrefillClient
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.loop import EngineLoop
from tandem_engine.request import Request
from tandem_engine.transport.incoming import IncomingTransfer
from tandem_engine.transport.zeromq import ReceiverOptions, ZmqReceiver
from tandem_proto.v1 import decode_pb2
from tandem_service.channels import open_channel
from toy_models import VOCABULARY, prompt_of


async def test_blocks_of_a_request_that_ends_first_are_not_free_until_the_transfer_has_ended(
    tiny_model: Path,
) -> None:
    parts = assemble(EngineConfig(model=tiny_model, dtype="float32", threads=1, block_size=16, num_blocks=32))
    loop = EngineLoop(parts.engine)
    request = Request("r", prompt_of(100), SamplingParams(max_tokens=4))
    used_then: list[Future[int]] = []

    def end_request() -> int:
        loop.forget("r")
        return parts.engine.blocks.usage().used

    class Receiver(ZmqReceiver):
        def open(self, blocks: list[dict[int, int]]) -> IncomingTransfer:
            # From here on a frame may be written.
            used_then.append(loop.call(end_request))
            return super().open(blocks)

    receiver = Receiver(parts.layout, parts.pool, ReceiverOptions())
    client = PrefillClient(open_channel)
    handoff = Handoff(loop, receiver, client, client, vocab_size=VOCABULARY)
    loop.start()
    try:
        with pytest.raises(InvariantError, match="no reservation to adopt"):
            await handoff.run(request, decode_pb2.DecodeRequest(), Attempts())
        assert used_then[0].result() == 7, "of 100 tokens"
        assert (await loop.call_async(parts.engine.blocks.usage)).used == 0
    finally:
        loop.close()
        receiver.close()
        await client.close()
