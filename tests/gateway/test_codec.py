"""What crosses the wire keeps every field; a field added on one side only is found here."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
from tandem_gateway import codec
from tandem_gateway.openai_render import receipt_json
from tandem_gateway.request import Receipt, Sampling, SamplingOptions, SloTarget
from tandem_proto.v1 import common_pb2

#: Set by the gateway; what a pod says there does not count.
GATEWAYS_OWN = {"slo", "slo_met", "slo_miss_reason"}


def names(message: type) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}


def fields(kind: type) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def a_receipt() -> Receipt:
    """No two of its numbers are equal."""
    numbers = {f.name: i + 1 for i, f in enumerate(dataclasses.fields(Receipt)) if f.type == "int"}
    return Receipt(
        **numbers,
        request_id="r",
        prefill_pod="p",
        decode_pod="d",
        accepted_by_source=MappingProxyType({"prompt": 3, "output": 2}),
        hit_steps_by_source=MappingProxyType({"prompt": 1, "output": 2}),
        drafted_by_source=MappingProxyType({"prompt": 5, "output": 4}),
        slo=SloTarget("chat", 1.0, 0.15, 5.0),
        slo_met=True,
        slo_miss_reason="none",
    )


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Receipt, common_pb2.Receipt),
        (Sampling, common_pb2.SamplingParams),
        (SamplingOptions, common_pb2.SamplingParams),
    ],
)
def test_the_gateways_fields_are_the_messages_fields(kind: type, message: type) -> None:
    assert fields(kind) == names(message)


def test_a_receipt_travels_whole() -> None:
    receipt = a_receipt()
    message = codec.receipt_to_proto(receipt)
    assert {field.name for field, _ in message.ListFields()} == names(common_pb2.Receipt)
    assert (message.slo.name, message.slo.ttft_ns, message.slo.tpot_ns) == ("chat", 10**9, 150_000_000)
    back = codec.receipt_from_proto(message)
    for name in fields(Receipt) - GATEWAYS_OWN:
        assert getattr(back, name) == getattr(receipt, name), name
    for name in GATEWAYS_OWN:
        assert getattr(back, name) == getattr(Receipt(), name), name


def test_a_receipt_in_json_has_the_messages_names_and_values() -> None:
    shown, message = receipt_json(a_receipt()), codec.receipt_to_proto(a_receipt())
    assert list(shown) == [field.name for field in dataclasses.fields(Receipt)]
    for name in names(common_pb2.Receipt) - {"slo", *a_receipt().by_source()}:
        assert shown[name] == getattr(message, name), name
    assert shown["accepted_by_source"] == {"prompt": 3, "output": 2}
    assert shown["hit_steps_by_source"] == {"prompt": 1, "output": 2}
    assert shown["drafted_by_source"] == {"prompt": 5, "output": 4}
    assert shown["slo"] == {"name": "chat", "ttft_ns": 10**9, "tpot_ns": 150_000_000, "e2e_ns": 5 * 10**9}


def test_sampling_parameters_travel_whole() -> None:
    options = SamplingOptions(
        max_tokens=7,
        min_tokens=2,
        temperature=0.5,
        top_k=40,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.125,
        frequency_penalty=-0.5,
        logit_bias=MappingProxyType({3: 1.5}),
        stop=("a", "b"),
        stop_token_ids=(4, 5),
        seed=2**63,
        logprobs=0,
        ignore_eos=True,
    )
    sampling = options.resolve(prompt_field="prompt", num_prompt_tokens=1, max_model_len=64, vocab_size=64)
    assert codec.options_from_proto(codec.sampling_to_proto(sampling)) == options


def test_what_the_caller_left_open_stays_open() -> None:
    assert codec.options_from_proto(common_pb2.SamplingParams()) == SamplingOptions()
    resolved = SamplingOptions().resolve(
        prompt_field="prompt", num_prompt_tokens=1, max_model_len=64, vocab_size=64
    )
    assert not codec.sampling_to_proto(resolved).HasField("logprobs")
