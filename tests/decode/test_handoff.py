"""When a decode pod gives up on a prefill pod. tests/pods tests the handoff between real pods."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator

import pytest
from tandem_core.errors import TransferError
from tandem_decode.handoff import wait_for_first_token
from tandem_proto.v1 import prefill_pb2

FINISHED = prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished(first_token_id=7))
STALL_S = 0.05


def heartbeat(computed_layers: int) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(progress=prefill_pb2.PrefillProgress(computed_layers=computed_layers))


async def test_a_pod_whose_engine_computes_nothing_is_left_in_spite_of_its_heartbeats() -> None:
    async def hung() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        while True:
            yield heartbeat(3)

    with pytest.raises(TransferError, match=r"no layer for 0\.05 s; it hangs"):
        await wait_for_first_token(hung(), stall_timeout_s=STALL_S)


async def test_a_request_that_waits_its_turn_at_a_slow_pod_does_not_leave_it() -> None:
    """The pod computes layers of other requests all the while."""

    async def busy() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        end = time.monotonic() + 3 * STALL_S
        for computed_layers in itertools.count():
            if time.monotonic() > end:
                break
            yield heartbeat(computed_layers)
        yield FINISHED

    assert await wait_for_first_token(busy(), stall_timeout_s=STALL_S) == FINISHED.finished


async def test_a_pod_without_heartbeats_is_left() -> None:
    async def silent() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        await asyncio.Event().wait()
        yield FINISHED

    with pytest.raises(TimeoutError):
        await wait_for_first_token(silent(), heartbeat_timeout_s=0.05)


async def test_a_stream_without_a_first_token_is_a_failure() -> None:
    async def short() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield heartbeat(1)

    with pytest.raises(TransferError, match="without a first token"):
        await wait_for_first_token(short())
