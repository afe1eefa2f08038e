"""Attributes of a request's span: GenAI semantic conventions, names that vLLM and SGLang set, and own names.

They contain numbers, ids and names, but no text, token ids or stop strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tandem_proto.v1 import common_pb2
from tandem_service.tracing import Value

from tandem_gateway.call.choices import Running
from tandem_gateway.errors import OverloadedError
from tandem_gateway.request import NS_PER_S, TokenizedRequest

_REASONS: Mapping[int, str] = MappingProxyType(
    {
        common_pb2.FINISH_REASON_STOP: "stop",
        common_pb2.FINISH_REASON_LENGTH: "length",
        common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    }
)


def of_call(kind: str, model: str) -> dict[str, Value]:
    """Attributes of a call for an answer of `model`; `kind` as in AnswerRecord."""
    return {
        "gen_ai.operation.name": operation(kind),
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": model,
    }


def operation(kind: str) -> str:
    return "text_completion" if kind == "completion" else "chat"


def of_request(request: TokenizedRequest) -> dict[str, Value]:
    sampling = request.sampling
    return {
        "gen_ai.request.id": request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "tandem.tenant": request.tenant,
        "tandem.slo.class": request.slo.name,
    }


def of_choices(num_choices: int, num_prompt: int) -> dict[str, Value]:
    """Attributes of a call with these choices. `num_prompt`: tokens of all prompts."""
    return {
        "gen_ai.request.n": num_choices,
        "gen_ai.request.choice.count": num_choices,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.prompt_tokens": num_prompt,
    }


def of_answer(choices: Sequence[Running], model: str) -> dict[str, Value]:
    """Attributes of a call whose choices have all ended. Pods, and stages in seconds, are the first
    choice's."""
    ends = [choice.end for choice in choices if choice.end is not None]
    receipts = [end.receipt for end in ends]
    receipt, num_output = receipts[0], sum(receipt.output_tokens for receipt in receipts)
    # Only the first choice of each prompt counts, because the others find the prompt in the cache.
    of_prompt = {c.request.prompt_token_ids: r for c, r in zip(choices[::-1], receipts[::-1], strict=True)}
    num_cached = sum(receipt.cached_tokens for receipt in of_prompt.values())
    prefill_s, decode_s = receipt.prefill_ns / NS_PER_S, receipt.decode_ns / NS_PER_S
    attributes: dict[str, Value] = {
        "gen_ai.response.id": receipt.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [_REASONS.get(end.reason, "error") for end in ends],
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.cache_read.input_tokens": num_cached,
        "gen_ai.usage.cached_tokens": num_cached,
        "gen_ai.latency.time_in_queue": receipt.queue_ns / NS_PER_S,
        "gen_ai.latency.time_to_first_token": receipt.ttft_ns / NS_PER_S,
        "gen_ai.latency.e2e": max(receipt.e2e_ns for receipt in receipts) / NS_PER_S,
        "gen_ai.latency.time_in_model_prefill": prefill_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
        "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
        "gen_ai.latency.kv_cache_transfer_time": receipt.transfer_ns / NS_PER_S,
        "tandem.prefill.pod": receipt.prefill_pod,
        "tandem.prefill.retries": receipt.prefill_retries,
        "tandem.decode.pod": receipt.decode_pod,
        "tandem.decode.retries": receipt.decode_retries,
        "tandem.slo.met": all(receipt.slo_met for receipt in receipts),
    }
    missed = next((receipt for receipt in receipts if not receipt.slo_met), None)
    if missed is not None:
        attributes["tandem.slo.miss_reason"] = missed.slo_miss_reason
        attributes["tandem.slo.miss_cause"] = missed.slo_miss_cause
    return attributes


def of_incomplete(
    choices: Sequence[Running], error: Exception | None = None, *, is_in_time: bool = False
) -> dict[str, Value]:
    """Attributes of a call without a complete answer. `error` None: its client left, or its deadline passed.
    `is_in_time`: the client left before an objective was missed, so the SLO is neither met nor missed."""
    num_output = sum(choice.num_tokens for choice in choices)
    attributes: dict[str, Value] = {
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
    }
    if not is_in_time:
        attributes["tandem.slo.met"] = False
    if isinstance(error, OverloadedError):
        attributes["tandem.refusal.reason"] = error.reason.value
    return attributes
