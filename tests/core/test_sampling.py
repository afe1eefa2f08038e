"""Sampling parameters are refused with the field, its value and its limit."""

from __future__ import annotations

import math
from typing import Any

import pytest
from tandem_core.errors import InvalidRequestError
from tandem_core.sampling import SamplingParams, check_token_ids

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("max_tokens", {"max_tokens": 0}, "at least 1"),
    ("max_tokens", {"max_tokens": 2**32}, r"below 2\^32"),
    ("min_tokens", {"max_tokens": 2, "min_tokens": 3}, r"max_tokens \(2\)"),
    ("temperature", {"temperature": 2.5}, r"is 2.5; it must be in \[0, 2\]"),
    ("temperature", {"temperature": math.nan}, r"\[0, 2\]"),
    ("top_k", {"top_k": -1}, "0 \\(all\\)"),
    ("top_k", {"top_k": 2**32}, r"below 2\^32"),
    ("top_p", {"top_p": 0.0}, r"\(0, 1\]"),
    ("min_p", {"min_p": 1.5}, r"\[0, 1\]"),
    ("repetition_penalty", {"repetition_penalty": 0.005}, r"\[0.01, 10\]"),
    ("presence_penalty", {"presence_penalty": 3.0}, r"\[-2, 2\]"),
    ("frequency_penalty", {"frequency_penalty": -3.0}, r"\[-2, 2\]"),
    ("logit_bias", {"logit_bias": {1: 101.0}}, r"\[-100, 100\]"),
    ("logit_bias", {"logit_bias": dict.fromkeys(range(1025), 1.0)}, "1025 entries; it must be at most 1024"),
    ("stop", {"stop": ("a",) * 17}, "at most 16"),
    ("stop", {"stop": ("",)}, "empty"),
    ("stop", {"stop": ("a" * 257,)}, "256 characters"),
    ("stop_token_ids", {"stop_token_ids": (1,) * 129}, "at most 128"),
    ("seed", {"seed": 2**64}, r"2\^64"),
    ("logprobs", {"logprobs": 21}, r"\[0, 20\]"),
    ("bad_words", {"bad_words": ((1,),) * 129}, "is 129 sequences; it must be at most 128"),
    ("bad_words", {"bad_words": ((1,), ())}, "1 to 32 ids"),
    ("bad_words", {"bad_words": ((1,) * 33,)}, "1 to 32 ids"),
    ("allowed_token_ids", {"allowed_token_ids": (1,) * 65_537}, "at most 65536 ids"),
    ("logits_processors", {"logits_processors": ("a",) * 9}, "at most 8 names"),
    ("logits_processors", {"logits_processors": ("a" * 65,)}, "1 to 64 characters"),
]


@pytest.mark.parametrize(("field", "given", "limit"), REFUSED)
def test_out_of_range(field: str, given: dict[str, Any], limit: str) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}: .*{limit}") as refused:
        SamplingParams(**given)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "given",
    [
        {"logit_bias": {9: 1.0}},
        {"stop_token_ids": (1, 9)},
        {"bad_words": ((1,), (9, 1))},
        {"allowed_token_ids": (9,)},
    ],
)
def test_token_ids_outside_the_vocabulary(given: dict[str, Any]) -> None:
    params = SamplingParams(**given)
    params.check_vocabulary(10)
    with pytest.raises(InvalidRequestError, match=rf"^{next(iter(given))}: token id 9 is outside"):
        params.check_vocabulary(9)


def test_negative_token_ids_are_outside_the_vocabulary() -> None:
    check_token_ids("prompt", [], 5)
    with pytest.raises(InvalidRequestError, match=r"^prompt: token id -1 is outside the vocabulary \[0, 5\)"):
        check_token_ids("prompt", [4, -1], 5)


def test_bad_words_that_may_forbid_every_token_are_refused() -> None:
    params = SamplingParams(bad_words=((0,), (0, 1), (1, 1), (2,)))
    params.check_vocabulary(4)
    with pytest.raises(InvalidRequestError, match=r"^bad_words: may forbid the whole vocabulary"):
        params.check_vocabulary(3)
