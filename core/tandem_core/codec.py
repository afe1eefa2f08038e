"""Protobuf <-> the dataclasses of this package: the one translation, for gateway and pods alike."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Protocol

from tandem_proto.v1 import common_pb2

from tandem_core.sampling import FinishReason, SamplingParams, TokenLogprobs

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
