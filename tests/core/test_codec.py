"""What crosses the wire keeps every field; a field added on one side only is found here."""

from __future__ import annotations

import dataclasses
from types import MappingProxyType

import pytest
from tandem_core import codec
from tandem_core.beams import BeamParams, EarlyStopping
from tandem_core.guide import Guide, GuideKind
from tandem_core.sampling import FinishReason, SamplingParams, TokenLogprobs
from tandem_core.slo import DEFAULT_SLO_CLASSES
from tandem_proto.v1 import common_pb2

EVERYTHING = SamplingParams(
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
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(6, 7),
    logits_processors=("digits",),
    skip_special_tokens=False,
    include_stop_str_in_output=True,
    detokenize=False,
    prompt_logprobs=5,
)
#: Excludes two of the fields above.
GUIDED = SamplingParams(guide=Guide(GuideKind.REGEX, "[a-z]+"))
SEARCHED = SamplingParams(beam_search=BeamParams(3, 0.5, EarlyStopping.NEVER))


def test_the_fields_of_the_class_are_those_of_the_message() -> None:
    ours = [field.name for field in dataclasses.fields(SamplingParams)]
    assert set(ours) == {field.name for field in common_pb2.SamplingParams.DESCRIPTOR.fields}


def test_the_examples_set_every_field() -> None:
    plain = SamplingParams()
    for field in dataclasses.fields(SamplingParams):
        example = {"guide": GUIDED, "beam_search": SEARCHED}.get(field.name, EVERYTHING)
        assert getattr(example, field.name) != getattr(plain, field.name), field.name


@pytest.mark.parametrize("params", [EVERYTHING, GUIDED, SEARCHED])
def test_sampling_parameters_travel_whole(params: SamplingParams) -> None:
    wire = common_pb2.SamplingParams.FromString(codec.sampling_to_proto(params).SerializeToString())
    assert SamplingParams(**codec.given_sampling(wire)) == params


def test_what_the_caller_left_open_stays_open() -> None:
    assert codec.given_sampling(common_pb2.SamplingParams()) == {}
    assert codec.given_sampling(common_pb2.SamplingParams(temperature=0.0)) == {"temperature": 0.0}
    assert not codec.sampling_to_proto(SamplingParams()).HasField("logprobs")


@pytest.mark.parametrize("reason", FinishReason)
def test_finish_reasons_have_the_wires_names(reason: FinishReason) -> None:
    wire = codec.finish_reason_to_proto(reason)
    assert common_pb2.FinishReason.Name(wire) == f"FINISH_REASON_{reason.name}"


def test_objectives_are_nanoseconds_on_the_wire() -> None:
    wire = codec.slo_to_proto(DEFAULT_SLO_CLASSES["chat"])
    assert wire == common_pb2.SloTarget(name="chat", ttft_ns=10**9, tpot_ns=150_000_000)


def test_log_probabilities_travel_with_their_bytes() -> None:
    class Tokens:
        def token_bytes(self, token_id: int) -> bytes:
            return bytes([token_id])

    position = TokenLogprobs(5, -0.5, ((5, -0.5), (7, -1.5)))
    (wire,) = codec.logprobs_to_proto([position], Tokens())
    assert (wire.chosen.token_bytes, [token.token_bytes for token in wire.top]) == (b"\5", [b"\5", b"\7"])
    assert codec.logprobs_from_proto(wire) == position
