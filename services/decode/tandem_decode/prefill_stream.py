"""Watches one attempt at a handoff: the Prefill call, the engine behind it, and the KV frames.

call      heartbeats arrive           else the pod has stopped or cannot be reached
engine    layers are computed         else the pod hangs, despite its heartbeats
frames    sent frames arrive          else the KV plane is interrupted, despite the call
all here  first token and last block  in either order
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from dataclasses import dataclass

import grpc
from tandem_engine.transport.incoming import IncomingTransfer
from tandem_proto.v1 import prefill_pb2
from tandem_service.interceptors import REQUEST_ID_KEY

from tandem_decode.prefill_client import PrefillCall

#: How often the limits are checked.
_CHECK_S = 0.1


@dataclass(frozen=True)
class Limits:
    """Seconds after which an attempt has failed."""

    #: A prefill pod sends a heartbeat every 0.25 s.
    heartbeat_s: float = 1.0
    #: A layer of a prompt chunk takes well under a second on a slow CPU; the first layer after a start takes
    #: longer, as it may compile kernels and read weights from disk.
    engine_s: float = 10.0
    #: Time without a frame while some are in flight.
    frame_s: float = 0.9


class FailureKind(enum.Enum):
    """Causes of failed attempts, as named in metrics."""

    #: The call was lost after the pod had accepted it.
    CRASHED = "crashed"
    #: The pod could not be called.
    UNREACHABLE = "unreachable"
    #: The call is open, but no heartbeat comes.
    SILENT = "silent"
    #: Heartbeats come, but the engine computes nothing.
    ENGINE_HANGS = "engine hangs"
    #: The call goes on, but the frames that were sent do not arrive.
    NO_FRAMES = "no frames"
    #: The transfer ended with an error.
    TRANSFER = "transfer failed"
    #: The pod answered with an error status, or with a result that cannot be used.
    REFUSED = "refused"


class PrefillFailedError(Exception):
    """The attempt failed. `crashed`: the pod had accepted the call, and then died or its engine hung."""

    def __init__(self, cause: str, kind: FailureKind, *, crashed: bool = False) -> None:
        super().__init__(cause)
        self.kind = kind
        self.crashed = crashed


class PrefillStream:
    """Reads the call to its end: `await result()`, then `await read_to_end()`, or `cancel()`."""

    def __init__(self, call: PrefillCall, incoming: IncomingTransfer, limits: Limits = Limits()) -> None:
        self._call = call
        self._incoming = incoming
        self._limits = limits
        self._finished: prefill_pb2.PrefillFinished | None = None
        #: When the first token came, on the monotonic clock.
        self.token_ns = 0
        self._is_accepted = False
        self._error: PrefillFailedError | None = None
        now = time.monotonic()
        self._heard_at = self._layer_at = self._frame_at = now
        self._num_layers = 0
        self._sent_bytes = 0
        self._received_bytes = 0
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def on_last_block(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has closed
                loop.call_soon_threadsafe(self._changed.set)

        incoming.done.add_done_callback(on_last_block)
        self._reading = asyncio.create_task(self._read())

    async def result(self) -> prefill_pb2.PrefillFinished:
        """Waits until first token and all wanted blocks are here. Raises PrefillFailedError."""
        while True:
            self._changed.clear()
            if self._finished is not None and self._incoming.done.done():
                return self._finished
            self._check()
            # Not asyncio.wait_for: before Python 3.12 it swallows a cancellation that coincides with the
            # result.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CHECK_S):
                    await self._changed.wait()

    async def read_to_end(self) -> None:
        """After `result`: the pod ends the stream when its last frame is credited. Dropping the call earlier
        would cancel it."""
        await asyncio.wait({self._reading}, timeout=self._limits.heartbeat_s)
        self.cancel()

    def cancel(self) -> None:
        self._reading.cancel()
        self._call.cancel()

    def _check(self) -> None:
        """Raises PrefillFailedError."""
        done, limits, now = self._incoming.done, self._limits, time.monotonic()
        if done.done() and (error := done.exception()) is not None:
            raise PrefillFailedError(str(error), FailureKind.TRANSFER)
        if self._error is not None:
            raise self._error
        if not self._reading.done() and now - self._heard_at > limits.heartbeat_s:
            cause = f"the prefill pod sent nothing for {limits.heartbeat_s:g} s"
            raise PrefillFailedError(cause, FailureKind.SILENT)
        if self._finished is None and now - self._layer_at > limits.engine_s:
            cause = f"the prefill pod's engine computed no layer for {limits.engine_s:g} s; it hangs"
            raise PrefillFailedError(cause, FailureKind.ENGINE_HANGS, crashed=True)
        received_bytes = self._incoming.progress().received_bytes
        is_owed = self._finished is not None or self._sent_bytes > received_bytes
        if received_bytes != self._received_bytes or not is_owed or done.done():
            self._received_bytes, self._frame_at = received_bytes, now
        elif now - self._frame_at > limits.frame_s:
            cause = f"no KV frame arrived for {limits.frame_s:g} s, but some had been sent"
            raise PrefillFailedError(cause, FailureKind.NO_FRAMES)

    async def _read(self) -> None:
        try:
            async for response in self._call:
                self._is_accepted = True
                self._heard_at = time.monotonic()
                if response.HasField("finished"):
                    self._finished = response.finished
                    self.token_ns = time.monotonic_ns()
                    self._changed.set()
                else:
                    self._sent_bytes = response.progress.sent_bytes
                    if response.progress.computed_layers != self._num_layers:
                        self._num_layers, self._layer_at = response.progress.computed_layers, self._heard_at
            if self._finished is None:
                cause = "the prefill pod ended its stream without a first token"
                self._error = PrefillFailedError(cause, FailureKind.REFUSED)
        except grpc.aio.AioRpcError as error:
            # A pod sends the request id as soon as it accepts the call. A living pod's own failures have
            # other codes.
            crashed = error.code() is grpc.StatusCode.UNAVAILABLE and (
                self._is_accepted or REQUEST_ID_KEY in (await self._call.initial_metadata())
            )
            kind = FailureKind.REFUSED
            if error.code() is grpc.StatusCode.UNAVAILABLE:
                kind = FailureKind.CRASHED if crashed else FailureKind.UNREACHABLE
            self._error = PrefillFailedError(f"{error.code().name}: {error.details()}", kind, crashed=crashed)
        finally:
            self._changed.set()
