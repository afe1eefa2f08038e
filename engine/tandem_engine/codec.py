"""Protobuf <-> the engine's dataclasses, for the pods around the engine.

Both pods speak of sampling, log probabilities and books in the same messages, and no service imports
another; so this one codec lives beside the dataclasses it translates.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol

from tandem_proto.v1 import common_pb2, prefill_pb2

from tandem_engine.loop import EngineLoop
from tandem_engine.request import FinishReason, SamplingParams, TokenLogprobs
from tandem_engine.transport.base import Ticket

_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: common_pb2.FINISH_REASON_CANCELLED,
}


class TokenBytes(Protocol):
    """The part of the tokenizer that log probabilities need."""

    def token_bytes(self, token_id: int) -> bytes: ...


def sampling_from_proto(message: common_pb2.SamplingParams, *, default_max_tokens: int) -> SamplingParams:
    """Raises InvalidRequestError naming the field that is out of range."""
    return SamplingParams(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else default_max_tokens,
        min_tokens=message.min_tokens,
        temperature=message.temperature if message.HasField("temperature") else 1.0,
        top_k=message.top_k,
        top_p=message.top_p if message.HasField("top_p") else 1.0,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=MappingProxyType(dict(message.logit_bias)),
        stop=tuple(message.stop),
        stop_token_ids=tuple(message.stop_token_ids),
        seed=message.seed,
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        ignore_eos=message.ignore_eos,
    )


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    return _FINISH_REASONS[reason]


def logprobs_to_proto(
    logprobs: Sequence[TokenLogprobs], tokens: TokenBytes
) -> list[common_pb2.PositionLogprobs]:
    def candidate(token_id: int, logprob: float) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(
            token_id=token_id, logprob=logprob, token_bytes=tokens.token_bytes(token_id)
        )

    return [
        common_pb2.PositionLogprobs(
            chosen=candidate(p.token_id, p.logprob), top=[candidate(*entry) for entry in p.top]
        )
        for p in logprobs
    ]


def logprobs_from_proto(message: common_pb2.PositionLogprobs) -> TokenLogprobs:
    return TokenLogprobs(
        token_id=message.chosen.token_id,
        logprob=message.chosen.logprob,
        top=tuple((entry.token_id, entry.logprob) for entry in message.top),
    )


def ticket_to_proto(ticket: Ticket) -> prefill_pb2.KvTicket:
    return prefill_pb2.KvTicket(
        transfer_id=ticket.transfer_id,
        epoch=ticket.epoch,
        endpoint=ticket.endpoint,
        public_key=ticket.public_key,
        layout_fingerprint=ticket.layout_fingerprint,
        layout_description=ticket.layout_description,
        wanted_blocks=ticket.wanted_blocks,
        credit_bytes=ticket.credit_bytes,
    )


def ticket_from_proto(message: prefill_pb2.KvTicket) -> Ticket:
    return Ticket(
        transfer_id=message.transfer_id,
        epoch=message.epoch,
        endpoint=message.endpoint,
        public_key=message.public_key,
        layout_fingerprint=message.layout_fingerprint,
        layout_description=message.layout_description,
        wanted_blocks=tuple(message.wanted_blocks),
        credit_bytes=message.credit_bytes,
    )


def books_to_proto(loop: EngineLoop) -> common_pb2.Books:
    """The books as they are now; call it on the engine's thread. Runs the audit when nothing is running."""
    scheduler = loop.engine.scheduler
    blocks = loop.engine.blocks.books()
    requests = scheduler.books()
    return common_pb2.Books(
        blocks_total=blocks.total,
        blocks_free=blocks.free - blocks.cached,
        blocks_cached=blocks.cached,
        blocks_used=blocks.used,
        requests_waiting=requests.waiting + requests.waiting_for_kv,
        requests_running=requests.running,
        violations=[] if scheduler.has_work() else scheduler.check(),
    )
