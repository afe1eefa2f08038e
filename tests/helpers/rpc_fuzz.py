"""Calls every method of a gRPC service with messages that no honest caller would send.

A call shows a bug by its status, by taking longer than any may, or by what the service logs about it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterator, Mapping

import grpc
import grpc.aio
import structlog.testing
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

#: A bug of the service has one of these.
_BUGS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED)

_CALL_S, _ENDLESS_CALL_S = 20.0, 0.3
#: What grpc.aio says, as INTERNAL, of a stream of requests when the service has ended the call before all is
#: sent.
_SEND_FAILED = "Internal error from Core"
_TEXTS = (
    "",
    "x",
    "\0",
    "é" * 300,
    "../../etc/passwd",
    "127.0.0.1:1",
    "tcp://127.0.0.1:1",
    "{{ 1 / 0 }}",
    "\ud7ff\u202e",
)
_VALUES: Mapping[int, tuple[object, ...]] = {
    FieldDescriptor.CPPTYPE_INT32: (0, 1, -1, 2**31 - 1, -(2**31)),
    FieldDescriptor.CPPTYPE_INT64: (0, 1, -1, 2**63 - 1, -(2**63)),
    FieldDescriptor.CPPTYPE_UINT32: (0, 1, 95, 2**31, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 1, 2**63, 2**64 - 1),
    FieldDescriptor.CPPTYPE_DOUBLE: (0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.CPPTYPE_FLOAT: (0.0, -1.0, 1e38, float("nan"), float("inf"), float("-inf")),
    FieldDescriptor.CPPTYPE_BOOL: (False, True),
    FieldDescriptor.CPPTYPE_ENUM: (0, 1, 2, 77, -1),
}
_LENGTHS = (0, 1, 2, 100, 5000, 200_000)


def mutate(message: Message, rng: random.Random) -> None:
    """Changes one field, at any depth."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        entries = getattr(message, field.name)
        for _ in range(rng.choice((1, 2, 300))):
            entries[_value(key, rng)] = _value(value, rng)
    elif field.is_repeated:
        values = getattr(message, field.name)
        if field.message_type is not None:
            if values and rng.random() < 0.7:
                mutate(rng.choice(values), rng)
            else:
                for _ in range(rng.choice((1, 3, 300))):
                    mutate(values.add(), rng)
        elif values and rng.random() < 0.5:
            values[rng.randrange(len(values))] = _value(field, rng)
        else:
            del values[:]
            values.extend([_value(field, rng)] * rng.choice(_LENGTHS))
    elif field.message_type is not None:
        if rng.random() < 0.1:
            message.ClearField(field.name)
        else:
            mutate(getattr(message, field.name), rng)
    else:
        setattr(message, field.name, _value(field, rng))


def _value(field: FieldDescriptor, rng: random.Random) -> object:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return rng.choice((b"", b"\xff", bytes(16), rng.randbytes(300)))
    if field.type == FieldDescriptor.TYPE_STRING:
        return rng.choice(_TEXTS)
    return rng.choice(_VALUES[field.cpp_type])


def payloads(
    method: MethodDescriptor, honest: Message, number: int, rng: random.Random
) -> Iterator[list[bytes]]:
    """The messages of this many calls: the honest one first, then with changed fields or bytes."""
    yield [honest.SerializeToString()]
    for _ in range(number - 1):
        sent = []
        for _ in range(rng.choice((1, 1, 3)) if method.client_streaming else 1):
            message = GetMessageClass(method.input_type)()
            message.CopyFrom(honest)
            for _ in range(rng.choice((1, 1, 2, 4))):
                if message.DESCRIPTOR.fields:
                    mutate(message, rng)
            raw = bytearray(message.SerializeToString())
            if rng.random() < 0.2:
                for _ in range(rng.choice((1, 3))):
                    raw.insert(rng.randrange(len(raw) + 1), rng.randrange(256))
                del raw[rng.randrange(len(raw) + 1) :]
            sent.append(bytes(raw))
        yield sent


async def call_all(
    channel: grpc.aio.Channel,
    service: ServiceDescriptor,
    honest: Mapping[str, Message],
    number: int,
    seed: int,
    *,
    endless: Collection[str] = (),
) -> Counter[grpc.StatusCode]:
    """`number` calls of each method of a service that runs in this process.

    `honest`: a message of a method that it accepts, by the method's name; the default is an empty one.
    `endless`: methods whose streams the caller ends. Raises AssertionError when a call shows a bug.
    """
    codes: Counter[grpc.StatusCode] = Counter()
    for method in service.methods:
        base = honest.get(method.name, GetMessageClass(method.input_type)())
        rng = random.Random(f"{seed} {method.full_name}")
        path = f"/{service.full_name}/{method.name}"
        for sent in payloads(method, base, number, rng):
            with structlog.testing.capture_logs() as logs:
                if method.name in endless:
                    code, details = await _call(channel, path, method, sent, _ENDLESS_CALL_S)
                    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
                        code = grpc.StatusCode.OK
                else:
                    code, details = await _call(channel, path, method, sent, _CALL_S)
            shown = f"{method.full_name}: {code.name}: {details}: {[part[:1000] for part in sent]!r}"
            assert code not in _BUGS, shown
            assert not [entry for entry in logs if entry["log_level"] in ("error", "critical")], (shown, logs)
            codes[code] += 1
    return codes


async def _call(
    channel: grpc.aio.Channel, path: str, method: MethodDescriptor, sent: list[bytes], limit_s: float
) -> tuple[grpc.StatusCode, str]:
    async def requests() -> AsyncIterator[bytes]:
        for payload in sent:
            yield payload

    # On the wire a method that answers with one message is like one that answers with a stream.
    if method.client_streaming:
        call = channel.stream_stream(path)(requests(), timeout=limit_s)
    else:
        call = channel.unary_stream(path)(sent[0], timeout=limit_s)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        if method.client_streaming and error.details() == _SEND_FAILED:
            return grpc.StatusCode.CANCELLED, ""
        return error.code(), error.details() or ""
    return grpc.StatusCode.OK, ""
