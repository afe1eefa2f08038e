"""What a request's span says: GenAI semantic conventions, the names that vLLM and SGLang set, and ours.

Numbers, ids and names only: no text, no token ids, no stop strings.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tandem_proto.v1 import common_pb2, decode_pb2
from tandem_service.tracing import Value

from tandem_gateway.request import NS_PER_S, TokenizedRequest

_REASONS: Mapping[int, str] = MappingProxyType(
    {
        common_pb2.FINISH_REASON_STOP: "stop",
        common_pb2.FINISH_REASON_LENGTH: "length",
        common_pb2.FINISH_REASON_CANCELLED: "cancelled",
    }
)


def of_call(kind: str, model: str) -> dict[str, Value]:
    """Of a call for an answer of `model`; `kind` as in AnswerRecord."""
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
    """`num_prompt`: tokens of all prompts."""
    return {
        "gen_ai.request.n": num_choices,
        "gen_ai.request.choice.count": num_choices,
        "gen_ai.usage.input_tokens": num_prompt,
        "gen_ai.usage.prompt_tokens": num_prompt,
    }


def of_answer(ends: Sequence[decode_pb2.DecodeFinished], model: str) -> dict[str, Value]:
    """`ends`: of all choices; pods and times, in seconds, are those of the first."""
    receipt = ends[0].receipt
    num_output = sum(end.receipt.output_tokens for end in ends)
    prefill_s, decode_s = receipt.prefill_ns / NS_PER_S, receipt.decode_ns / NS_PER_S
    attributes: dict[str, Value] = {
        "gen_ai.response.id": receipt.request_id,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": [_REASONS.get(end.reason, "error") for end in ends],
        "gen_ai.usage.output_tokens": num_output,
        "gen_ai.usage.completion_tokens": num_output,
        "gen_ai.usage.cache_read.input_tokens": receipt.cached_tokens,
        "gen_ai.usage.cached_tokens": receipt.cached_tokens,
        "gen_ai.latency.time_in_queue": receipt.queue_ns / NS_PER_S,
        "gen_ai.latency.time_to_first_token": receipt.ttft_ns / NS_PER_S,
        "gen_ai.latency.e2e": receipt.e2e_ns / NS_PER_S,
        "gen_ai.latency.time_in_model_prefill": prefill_s,
        "gen_ai.latency.time_in_model_decode": decode_s,
        "gen_ai.latency.time_in_model_inference": prefill_s + decode_s,
        "gen_ai.latency.kv_cache_transfer_time": receipt.transfer_ns / NS_PER_S,
        "tandem.prefill.pod": receipt.prefill_pod,
        "tandem.prefill.retries": receipt.prefill_retries,
        "tandem.decode.pod": receipt.decode_pod,
        "tandem.decode.retries": receipt.decode_retries,
        "tandem.slo.met": receipt.slo_met,
    }
    if receipt.slo_miss_reason:
        attributes["tandem.slo.miss_reason"] = receipt.slo_miss_reason
    return attributes
