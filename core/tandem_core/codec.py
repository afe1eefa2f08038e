"""Protobuf <-> the types of this package, for gateway and pods.

SamplingParams is translated by the names of its fields, so that a new one needs nothing here. Its fields are
numbers, strings, lists, maps, lists of TokenIds, a Guide, and a BeamSearch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from tandem_proto.v1 import common_pb2

from tandem_core.beams import BeamParams, EarlyStopping
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide, GuideKind
from tandem_core.sampling import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    FinishReason,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
)
from tandem_core.slo import SloTarget
from tandem_core.step_cost import StepCost

_NS_PER_S = 1_000_000_000
_SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(SamplingParams))


class TokenBytes(Protocol):
    """The part of the tokenizer that log probabilities need."""

    def token_bytes(self, token_id: int) -> bytes: ...


def given_sampling(message: common_pb2.SamplingParams) -> dict[str, Any]:
    """The fields that the message sets, by name: arguments of SamplingParams. Raises InvalidRequestError for
    a field with more entries than any field may have, since converting them takes long."""
    fields = message.ListFields()
    for descriptor, value in fields:
        limit = MAX_ALLOWED_TOKEN_IDS if descriptor.message_type is None else MAX_LOGIT_BIAS
        if isinstance(value, Sequence | Mapping) and not isinstance(value, str) and len(value) > limit:
            raise InvalidRequestError(descriptor.name, f"has {len(value)} entries; send at most {limit}")
    return {descriptor.name: _from_wire(value) for descriptor, value in fields}


def sampling_to_proto(params: SamplingParams) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{name: _to_wire(getattr(params, name)) for name in _SAMPLING_FIELDS})


def _from_wire(value: Any) -> Any:
    if isinstance(value, common_pb2.TokenIds):
        return tuple(value.ids)
    if isinstance(value, common_pb2.Guide):
        return guide_from_proto(value)
    if isinstance(value, common_pb2.BeamSearch):
        return beams_from_proto(value)
    if isinstance(value, Mapping):
        return MappingProxyType(dict(value))
    if isinstance(value, Sequence) and not isinstance(value, str):
        items = tuple(value)
        is_plain = all(type(item) is int for item in items)  # ids; the checks above take 20 ms for 50,000
        return items if is_plain else tuple(map(_from_wire, items))
    return value


def _to_wire(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value  # first, since the checks below are slow for these
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Guide):
        return common_pb2.Guide(**{value.kind.value: value.source})
    if isinstance(value, BeamParams):
        return common_pb2.BeamSearch(
            width=value.width,
            length_penalty=value.length_penalty,
            early_stopping=common_pb2.EarlyStopping.Value(f"EARLY_STOPPING_{value.early_stopping.name}"),
        )
    if isinstance(value, tuple):
        return [common_pb2.TokenIds(ids=item) if isinstance(item, tuple) else item for item in value]
    return value


def guide_from_proto(message: common_pb2.Guide) -> Guide:
    """Raises InvalidRequestError when it is empty or too long."""
    name = message.WhichOneof("source")
    if name is None:
        raise InvalidRequestError("guide", "has no source; set json_schema, regex or lark")
    return Guide(GuideKind(name), getattr(message, name))


def beams_from_proto(message: common_pb2.BeamSearch) -> BeamParams:
    """Raises InvalidRequestError naming a field that is out of range."""
    names = {0: "HEURISTIC"} | {
        value: name.removeprefix("EARLY_STOPPING_")
        for name, value in common_pb2.EarlyStopping.items()
        if value
    }
    if message.early_stopping not in names:
        raise InvalidRequestError("early_stopping", f"is {message.early_stopping}; it must be 0 to 3")
    return BeamParams(
        message.width,
        message.length_penalty if message.HasField("length_penalty") else 1.0,
        EarlyStopping[names[message.early_stopping]],
    )


def slo_to_proto(slo: SloTarget) -> common_pb2.SloTarget:
    return common_pb2.SloTarget(
        name=slo.name,
        ttft_ns=round(slo.ttft_s * _NS_PER_S),
        tpot_ns=round(slo.tpot_s * _NS_PER_S),
        e2e_ns=round(slo.e2e_s * _NS_PER_S),
        strict=slo.is_strict,
        ttft_slowdown=slo.ttft_slowdown,
        tpot_slowdown=slo.tpot_slowdown,
        e2e_slowdown=slo.e2e_slowdown,
    )


def slo_from_proto(message: common_pb2.SloTarget) -> SloTarget:
    return SloTarget(
        name=message.name,
        ttft_s=message.ttft_ns / _NS_PER_S,
        tpot_s=message.tpot_ns / _NS_PER_S,
        e2e_s=message.e2e_ns / _NS_PER_S,
        is_strict=message.strict,
        ttft_slowdown=message.ttft_slowdown,
        tpot_slowdown=message.tpot_slowdown,
        e2e_slowdown=message.e2e_slowdown,
    )


def step_cost_to_proto(cost: StepCost) -> common_pb2.StepCost:
    return common_pb2.StepCost(
        per_step=cost.per_step, per_token=cost.per_token, per_pair=cost.per_pair, unloaded=cost.unloaded
    )


def step_cost_from_proto(message: common_pb2.StepCost) -> StepCost:
    return StepCost(message.per_step, message.per_token, message.per_pair, message.unloaded or 1.0)


def tokens_per_step_from_proto(message: common_pb2.PodStatus) -> tuple[float, ...]:
    """Tokens per step by batch size, see tokens_gained. Earlier versions of pods report only the mean."""
    return tuple(message.tokens_per_step_by_batch) or (message.tokens_per_step or 1.0,)


def finish_reason_to_proto(reason: FinishReason) -> common_pb2.FinishReason.ValueType:
    return common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}")


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


def prompt_logprobs_to_proto(logprobs: PromptLogprobs | None) -> common_pb2.PromptLogprobs | None:
    if logprobs is None:
        return None
    return common_pb2.PromptLogprobs(
        logprobs=logprobs.logprobs,
        ranks=logprobs.ranks,
        top_token_ids=logprobs.top_token_ids,
        top_logprobs=logprobs.top_logprobs,
    )
