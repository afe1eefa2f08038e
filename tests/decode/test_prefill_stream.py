"""When a decode pod gives up on a prefill pod. tests/pods tests the handoff between real pods."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

import grpc
import pytest
from tandem_core.errors import TransferError
from tandem_decode.prefill_stream import Limits, PrefillFailedError, PrefillStream
from tandem_engine.transport.base import TransferProgress
from tandem_proto.v1 import prefill_pb2
from tandem_service.interceptors import REQUEST_ID_KEY
from waiting import pause_async

FINISHED = prefill_pb2.PrefillResponse(finished=prefill_pb2.PrefillFinished(first_token_id=7))
NEVER = 3600.0
BLOCK_BYTES = 100


def heartbeat(computed_layers: int = 0, sent_bytes: int = 0) -> prefill_pb2.PrefillResponse:
    progress = prefill_pb2.PrefillProgress(computed_layers=computed_layers, sent_bytes=sent_bytes)
    return prefill_pb2.PrefillResponse(progress=progress)


class Call:
    """A Prefill call that gives what a generator yields."""

    def __init__(
        self, responses: Callable[[], AsyncIterator[prefill_pb2.PrefillResponse]], accepted: bool = True
    ) -> None:
        self._responses, self._accepted = responses, accepted
        self.is_cancelled = False

    def __aiter__(self) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        return self._responses()

    async def initial_metadata(self) -> grpc.aio.Metadata:
        return grpc.aio.Metadata(*(((REQUEST_ID_KEY, "r"),) if self._accepted else ()))

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Incoming:
    """A transfer's end of which `num_pairs` have come."""

    num_pairs: int = 0
    done: Future[None] = field(default_factory=Future)

    def progress(self) -> TransferProgress:
        num_bytes = self.num_pairs * BLOCK_BYTES
        return TransferProgress(num_bytes, 10 * BLOCK_BYTES, num_bytes, ())


def watch(call: Call, incoming: Incoming, **limits: float) -> PrefillStream:
    never = {"heartbeat_s": NEVER, "engine_s": NEVER, "frame_s": NEVER}
    return PrefillStream(call, incoming, Limits(**{**never, **limits}))


async def repeat(response: prefill_pb2.PrefillResponse) -> AsyncIterator[prefill_pb2.PrefillResponse]:
    while True:
        yield response
        await pause_async(0.01)


def failed_call(code: grpc.StatusCode, *, accepted: bool) -> Call:
    async def responses() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "no")
        yield FINISHED

    return Call(responses, accepted)


async def failure(stream: PrefillStream) -> PrefillFailedError:
    with pytest.raises(PrefillFailedError) as info:
        await stream.result()
    stream.cancel()
    return info.value


async def test_a_pod_whose_engine_computes_nothing_is_left_in_spite_of_its_heartbeats() -> None:
    error = await failure(watch(Call(lambda: repeat(heartbeat(3))), Incoming(), engine_s=0.05))
    assert "computed no layer for 0.05 s; it hangs" in str(error)
    assert error.crashed


async def test_a_request_that_waits_its_turn_at_a_slow_pod_does_not_leave_it() -> None:
    """The pod computes layers of other requests all the while."""

    async def busy() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        for computed_layers in range(30):
            yield heartbeat(computed_layers)
            await pause_async(0.05)
        yield FINISHED

    incoming = Incoming()
    incoming.done.set_result(None)
    assert await watch(Call(busy), incoming, engine_s=1.0).result() == FINISHED.finished


async def test_a_pod_without_heartbeats_is_left_and_has_not_crashed() -> None:
    async def silent() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield heartbeat()
        await asyncio.Event().wait()

    async def unreachable() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        await asyncio.Event().wait()
        yield FINISHED

    for responses in (silent, unreachable):
        error = await failure(watch(Call(responses), Incoming(), heartbeat_s=0.1))
        assert "sent nothing for 0.1 s" in str(error)
        assert not error.crashed


async def test_frames_that_were_sent_and_do_not_arrive_end_the_attempt_before_the_first_token() -> None:
    error = await failure(watch(Call(lambda: repeat(heartbeat(sent_bytes=101))), Incoming(1), frame_s=0.1))
    assert "no KV frame arrived for 0.1 s" in str(error)
    assert not error.crashed


async def test_frames_that_are_not_sent_yet_are_waited_for() -> None:
    async def computing() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        for _ in range(8):
            yield heartbeat(sent_bytes=100)
            await pause_async(0.05)
        incoming.done.set_result(None)
        yield FINISHED

    incoming = Incoming(1)
    assert await watch(Call(computing), incoming, frame_s=0.1).result() == FINISHED.finished


async def test_a_pod_that_dies_between_first_token_and_last_frame_is_noticed_at_once() -> None:
    async def dies() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield FINISHED
        code = grpc.StatusCode.UNAVAILABLE
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "reset")

    assert (await failure(watch(Call(dies), Incoming(1)))).crashed


async def test_first_token_and_last_block_may_come_in_either_order() -> None:
    async def token_then_wait() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield FINISHED
        await asyncio.Event().wait()

    incoming = Incoming()
    stream = watch(Call(token_then_wait), incoming)
    waiting = asyncio.create_task(stream.result())
    await pause_async(0.05)
    assert not waiting.done()
    await asyncio.to_thread(incoming.done.set_result, None)
    assert await waiting == FINISHED.finished
    stream.cancel()


async def test_the_call_is_read_to_its_end_after_the_result() -> None:
    async def ends_later() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield FINISHED
        await pause_async(0.05)
        has_ended.set()

    has_ended = asyncio.Event()
    incoming = Incoming()
    incoming.done.set_result(None)
    stream = watch(Call(ends_later), incoming)
    await stream.result()
    await stream.read_to_end()
    assert has_ended.is_set()


@pytest.mark.parametrize(
    ("code", "accepted", "crashed"),
    [
        (grpc.StatusCode.UNAVAILABLE, True, True),
        (grpc.StatusCode.UNAVAILABLE, False, False),
        (grpc.StatusCode.ABORTED, True, False),
        (grpc.StatusCode.CANCELLED, True, False),
    ],
)
async def test_only_a_connection_lost_after_the_call_was_accepted_is_a_crash(
    code: grpc.StatusCode, accepted: bool, crashed: bool
) -> None:
    assert (await failure(watch(failed_call(code, accepted=accepted), Incoming()))).crashed is crashed


async def test_a_failed_write_of_a_block_ends_the_attempt() -> None:
    incoming = Incoming()
    incoming.done.set_exception(TransferError("writing a received block failed"))
    error = await failure(watch(Call(lambda: repeat(heartbeat())), incoming))
    assert "writing a received block failed" in str(error)


async def test_a_stream_without_a_first_token_is_a_failure() -> None:
    async def short() -> AsyncIterator[prefill_pb2.PrefillResponse]:
        yield heartbeat(1)

    assert "without a first token" in str(await failure(watch(Call(short), Incoming())))
