"""Messages of the KV wire, to and from protobuf: the only place in the engine that knows the .proto.

A frame travels as [header, payload]; credits and rejects as [header] alone. The digest covers the payload and
its block range: the same bytes sent for another transfer, epoch, layer or range do not verify.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TypeAlias

import xxhash
from google.protobuf.message import DecodeError
from tandem_core.errors import TransferError
from tandem_proto.v1 import prefill_pb2 as pb

from tandem_engine.transport.base import TRANSFER_ID_BYTES, Ticket

#: Well-formed headers are far shorter; a longer one is not parsed.
MAX_HEADER_BYTES = 1024

_BLOCK_RANGE = struct.Struct("<16sIIII")


@dataclass(frozen=True)
class Frame:
    """Header of one layer of a run of blocks."""

    transfer_id: bytes
    epoch: int
    #: Counted over the model; it tells the group.
    layer: int
    #: Logical index of the first block.
    first_block: int
    num_blocks: int
    #: See `digest`.
    digest: bytes


@dataclass(frozen=True)
class Credit:
    """`num_bytes` of payload were received: as many may be sent again."""

    transfer_id: bytes
    epoch: int
    num_bytes: int


@dataclass(frozen=True)
class Reject:
    """The receiver takes no more of this epoch of the transfer."""

    transfer_id: bytes
    epoch: int
    reason: str


Message: TypeAlias = Frame | Credit | Reject


class MalformedError(TransferError):
    """The bytes are not a message of the KV wire."""


def digest(
    transfer_id: bytes, epoch: int, layer: int, first_block: int, num_blocks: int, payload: memoryview
) -> bytes:
    """xxh3-128 (16 bytes) over the block range, as little-endian uint32 after the id, and the payload."""
    hasher = xxhash.xxh3_128(_BLOCK_RANGE.pack(transfer_id, epoch, layer, first_block, num_blocks))
    hasher.update(payload)
    return hasher.digest()


def encode(message: Message) -> bytes:
    """The message's header part."""
    wire = pb.KvMessage()
    match message:
        case Frame():
            wire.frame.transfer_id = message.transfer_id
            wire.frame.epoch = message.epoch
            wire.frame.layer = message.layer
            wire.frame.first_block = message.first_block
            wire.frame.num_blocks = message.num_blocks
            wire.frame.digest = message.digest
        case Credit():
            wire.credit.transfer_id = message.transfer_id
            wire.credit.epoch = message.epoch
            wire.credit.bytes = message.num_bytes
        case Reject():
            wire.reject.transfer_id = message.transfer_id
            wire.reject.epoch = message.epoch
            wire.reject.reason = message.reason
    return wire.SerializeToString()


def decode(header: bytes) -> Message:
    """The message of a header part; raises MalformedError."""
    if len(header) > MAX_HEADER_BYTES:
        raise MalformedError(f"a header of {len(header)} bytes")
    wire = pb.KvMessage()
    try:
        wire.ParseFromString(header)
    except DecodeError as error:
        raise MalformedError("not a KvMessage") from error
    message: Message
    match wire.WhichOneof("body"):
        case "frame":
            frame = wire.frame
            message = Frame(
                frame.transfer_id, frame.epoch, frame.layer, frame.first_block, frame.num_blocks, frame.digest
            )
        case "credit":
            message = Credit(wire.credit.transfer_id, wire.credit.epoch, wire.credit.bytes)
        case "reject":
            message = Reject(wire.reject.transfer_id, wire.reject.epoch, wire.reject.reason)
        case _:
            raise MalformedError("an empty KvMessage")
    if len(message.transfer_id) != TRANSFER_ID_BYTES:
        raise MalformedError(f"a transfer id of {len(message.transfer_id)} bytes")
    return message


def ticket_to_proto(ticket: Ticket) -> pb.KvTicket:
    fields = vars(ticket) | {"wanted_blocks": [pb.KvBlocks(blocks=own) for own in ticket.wanted_blocks]}
    return pb.KvTicket(**fields)


def ticket_from_proto(message: pb.KvTicket) -> Ticket:
    return Ticket(
        transfer_id=message.transfer_id,
        epoch=message.epoch,
        endpoint=message.endpoint,
        public_key=message.public_key,
        layout_fingerprint=message.layout_fingerprint,
        layout_description=message.layout_description,
        wanted_blocks=tuple(tuple(own.blocks) for own in message.wanted_blocks),
        credit_bytes=message.credit_bytes,
        client_secret_key=message.client_secret_key,
    )
