"""What a guide may be, and how it travels."""

from __future__ import annotations

import pytest
from tandem_core import codec
from tandem_core.errors import InvalidRequestError
from tandem_core.guide import MAX_CHOICES, MAX_GUIDE_BYTES, Guide, GuideKind
from tandem_core.sampling import SamplingParams
from tandem_proto.v1 import common_pb2


@pytest.mark.parametrize("kind", GuideKind)
def test_a_guide_travels_as_the_field_of_its_kind(kind: GuideKind) -> None:
    params = SamplingParams(guide=Guide(kind, "é{}"))
    message = codec.sampling_to_proto(params)
    assert message.guide.WhichOneof("source") == kind.value
    assert SamplingParams(**codec.given_sampling(message)) == params


def test_without_a_guide_no_message_is_sent() -> None:
    assert not codec.sampling_to_proto(SamplingParams()).HasField("guide")


def test_an_empty_message_is_refused() -> None:
    message = common_pb2.SamplingParams(guide=common_pb2.Guide())
    with pytest.raises(InvalidRequestError, match="guide: has no source; set json_schema, regex or lark"):
        codec.given_sampling(message)


@pytest.mark.parametrize("source", ["", "é" * (MAX_GUIDE_BYTES // 2 + 1)])
def test_its_length_in_bytes_is_bounded(source: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"it must have 1 to {MAX_GUIDE_BYTES}"):
        Guide(GuideKind.REGEX, source)


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="half of a surrogate pair"):
        Guide(GuideKind.REGEX, "\ud83d")


def test_choices_are_bounded_and_not_empty() -> None:
    for choices in ([], ["x"] * (MAX_CHOICES + 1)):
        with pytest.raises(InvalidRequestError, match=f"must have 1 to {MAX_CHOICES} of them"):
            Guide.of_choices(choices)
    with pytest.raises(InvalidRequestError, match="empty choice"):
        Guide.of_choices(["a", ""])


@pytest.mark.parametrize("field", [{"ignore_eos": True}, {"min_tokens": 3}])
def test_a_guide_decides_alone_where_the_text_ends(field: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError, match=f"{next(iter(field))}.*with a guide"):
        SamplingParams(guide=Guide(GuideKind.REGEX, "a"), **field)
