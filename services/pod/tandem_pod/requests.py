"""Reads the requests that decode and prefill pods get into the engine's terms."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

from tandem_core.contracts import DEFAULT_DUE_S
from tandem_core.errors import InvalidRequestError
from tandem_core.nice_thread import nice_threads
from tandem_core.slo import LONGEST_OBJECTIVE_S
from tandem_engine.request import Request
from tandem_proto.v1 import decode_pb2, prefill_pb2

MessageT = TypeVar("MessageT", decode_pb2.DecodeRequest, prefill_pb2.PrefillRequest)

#: Compile guides. More of them would take the pod's other threads their time.
_COMPILERS = nice_threads(2, "compile-guide")
#: Longest silence of a pod on a call.
HEARTBEAT_S = 0.25
#: Share of the time until the last token is due that steps may take.
_END_SHARE = 0.95


def read_request(
    read: Callable[[MessageT], Request], message: MessageT, max_model_len: int
) -> asyncio.Future[Request]:
    """Runs `read` in a thread if the request has a guide, which takes a while to compile. Raises
    InvalidRequestError, before it copies them, for more tokens than the context holds.

    Send heartbeats until it `is_read`: guides wait for a thread, and the caller of a silent pod considers it
    dead, also for other tenants.
    """
    num_tokens = len(message.prompt_token_ids) + len(message.output_token_ids)
    if num_tokens > max_model_len:
        raise InvalidRequestError(
            "prompt",
            f"has {num_tokens} tokens with its output, but the context holds {max_model_len}; send fewer",
        )
    if message.sampling.HasField("guide"):
        return asyncio.get_running_loop().run_in_executor(_COMPILERS, read, message)
    request = asyncio.get_running_loop().create_future()
    request.set_result(read(message))
    return request


async def is_read(request: asyncio.Future[Request]) -> bool:
    """False when a heartbeat is due first."""
    if not request.done():
        await asyncio.wait({request}, timeout=HEARTBEAT_S)
    return request.done()


def due_at(message: decode_pb2.DecodeRequest | prefill_pb2.PrefillRequest) -> float:
    """The deadline of the request's first token, in monotonic seconds."""
    return _at(message.due_seconds if message.HasField("due_seconds") else DEFAULT_DUE_S)


def end_due_at(message: decode_pb2.DecodeRequest) -> float:
    """When the request's last token should be computed, in monotonic seconds; inf: no objective.

    Steps are as long as their tightest objective allows, so a text that gains one token per step would end
    exactly at its deadline, and any delay would make it late. The margin prevents that.
    """
    return _at(_END_SHARE * message.end_seconds) if message.HasField("end_seconds") else math.inf


def _at(seconds: float) -> float:
    """In monotonic seconds. NaN has no place in an order."""
    return time.monotonic() + (
        min(max(seconds, -LONGEST_OBJECTIVE_S), LONGEST_OBJECTIVE_S) if seconds == seconds else 0.0
    )


def token_objective(message: decode_pb2.DecodeRequest) -> float:
    """In seconds per output token; 0: none."""
    seconds = message.token_seconds
    return min(seconds, LONGEST_OBJECTIVE_S) if seconds > 0 else 0.0
