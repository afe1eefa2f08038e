"""Protobuf <-> the gateway's dataclasses; the only module that touches both sides' fields."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType
from typing import Any

from tandem_core.model.chat_template import Message
from tandem_proto.v1 import common_pb2, decode_pb2, gateway_pb2

from tandem_gateway.request import (
    NS_PER_S,
    Chunk,
    End,
    Event,
    FinishReason,
    Job,
    PodLoad,
    PositionLogprobs,
    Receipt,
    Sampling,
    SamplingOptions,
    SloTarget,
    TokenLogprob,
)

_REASON_FROM_PROTO = MappingProxyType(
    {
        common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
        common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
        common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    }
)
_REASON_TO_PROTO = MappingProxyType({ours: wire for wire, ours in _REASON_FROM_PROTO.items()})


class WireError(Exception):
    """A pod sent something that the protocol does not allow."""


def messages_from_proto(request: gateway_pb2.ChatRequest) -> tuple[Message, ...]:
    return tuple(Message(message.role, message.content) for message in request.messages)


def options_from_proto(params: common_pb2.SamplingParams) -> SamplingOptions:
    def given(name: str) -> bool:
        return bool(params.HasField(name))  # type: ignore[arg-type]  # the stub lists the names

    return SamplingOptions(
        max_tokens=params.max_tokens if given("max_tokens") else None,
        min_tokens=params.min_tokens,
        temperature=params.temperature if given("temperature") else None,
        top_k=params.top_k,
        top_p=params.top_p if given("top_p") else None,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty if given("repetition_penalty") else None,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=MappingProxyType(dict(params.logit_bias)),
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        seed=params.seed if given("seed") else None,
        logprobs=params.logprobs if given("logprobs") else None,
        ignore_eos=params.ignore_eos,
    )


def sampling_to_proto(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**_fields(sampling) | {"logit_bias": dict(sampling.logit_bias)})


def slo_to_proto(slo: SloTarget) -> common_pb2.SloTarget:
    return common_pb2.SloTarget(
        name=slo.name,
        ttft_ns=round(slo.ttft_s * NS_PER_S),
        tpot_ns=round(slo.tpot_s * NS_PER_S),
        e2e_ns=round(slo.e2e_s * NS_PER_S),
    )


def job_to_proto(job: Job, prefill_targets: tuple[str, ...]) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(
        request_id=job.request_id,
        tenant=job.tenant,
        prompt_token_ids=job.prompt_token_ids,
        sampling=sampling_to_proto(job.sampling),
        prefill_targets=prefill_targets,
        speculation=job.speculation,
    )


def event_from_proto(response: decode_pb2.DecodeResponse) -> Event:
    """Raises WireError for a message with nothing in it or an unknown finish reason."""
    which = response.WhichOneof("event")
    if which == "chunk":
        chunk = response.chunk
        return Chunk(
            text=chunk.text,
            token_ids=tuple(chunk.token_ids),
            logprobs=tuple(_position_from_proto(position) for position in chunk.logprobs),
        )
    if which == "finished":
        finished = response.finished
        if finished.reason not in _REASON_FROM_PROTO:
            raise WireError(f"unknown finish reason {finished.reason}")
        return End(
            reason=_REASON_FROM_PROTO[finished.reason],
            stop_reason=finished.stop_reason,
            receipt=receipt_from_proto(finished.receipt),
        )
    raise WireError("a response without an event")


def load_from_proto(status: common_pb2.PodStatus) -> PodLoad:
    usage = status.usage
    return PodLoad(
        # Cached blocks are evicted when a request needs them.
        free_blocks=usage.blocks_free + usage.blocks_cached,
        total_blocks=usage.blocks_total,
        block_size=status.block_size,
        num_requests=usage.requests_waiting + usage.requests_running,
    )


def chunk_to_proto(chunk: Chunk) -> gateway_pb2.GeneratedChunk:
    return gateway_pb2.GeneratedChunk(
        text=chunk.text,
        token_ids=chunk.token_ids,
        logprobs=[_position_to_proto(position) for position in chunk.logprobs],
    )


def end_to_proto(end: End) -> gateway_pb2.GeneratedEnd:
    return gateway_pb2.GeneratedEnd(
        reason=_REASON_TO_PROTO[end.reason],
        stop_reason=end.stop_reason,
        receipt=receipt_to_proto(end.receipt),
    )


def receipt_from_proto(receipt: common_pb2.Receipt) -> Receipt:
    """What a pod reports; the gateway fills in its own fields (ttft, e2e, slo) afterwards."""
    names = {field.name for field in dataclasses.fields(Receipt)} - {"slo", "slo_met", "slo_miss_reason"}
    ours: dict[str, Any] = {name: getattr(receipt, name) for name in names}
    for name in Receipt().by_source():
        ours[name] = MappingProxyType(dict(ours[name]))
    return Receipt(**ours)


def receipt_to_proto(receipt: Receipt) -> common_pb2.Receipt:
    return common_pb2.Receipt(**_fields(receipt) | receipt.by_source() | {"slo": slo_to_proto(receipt.slo)})


def _fields(ours: Sampling | Receipt) -> dict[str, Any]:
    """Its fields by name: those of the message of the same name in common.proto."""
    return {field.name: getattr(ours, field.name) for field in dataclasses.fields(ours)}


def _position_from_proto(position: common_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        chosen=_token_from_proto(position.chosen), top=tuple(_token_from_proto(t) for t in position.top)
    )


def _position_to_proto(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=_token_to_proto(position.chosen), top=[_token_to_proto(token) for token in position.top]
    )


def _token_from_proto(token: common_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token.token_id, token.logprob, token.token_bytes)


def _token_to_proto(token: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=token.token_id, logprob=token.logprob, token_bytes=token.token_bytes
    )
