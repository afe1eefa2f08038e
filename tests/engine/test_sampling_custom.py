"""Functions that a pod was started with change logits for the requests that name them, and harm no others."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from free_drafts import FreeDrafts
from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine.llm import LLM
from tandem_engine.sampling.custom import LogitsProcessors, Row
from toy_models import SIZES, prompt_of

MODULE = "tandem_test_processors"


def only_even(prompt: Sequence[int], output: Sequence[int], row: Row) -> Row:
    row[1::2] = -np.inf
    return row


def no_repeat(prompt: Sequence[int], output: Sequence[int], row: Row) -> Row:
    """Depends on the text so far."""
    row[list(output[-4:])] = -np.inf
    return row


def fails_at_five(prompt: Sequence[int], output: Sequence[int], row: Row) -> Row:
    if len(output) == 5:
        raise ValueError("five")
    return row


def forbids_all(prompt: Sequence[int], output: Sequence[int], row: Row) -> Row:
    return np.full_like(row, -np.inf)


def shortens(prompt: Sequence[int], output: Sequence[int], row: Row) -> Row:
    return row[:3]


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType(MODULE)
    for function in (only_even, no_repeat, fails_at_five, forbids_all, shortens):
        setattr(module, function.__name__, function)
    module.not_a_function = 5
    monkeypatch.setitem(sys.modules, MODULE, module)


@pytest.fixture
def llms(tiny_model: Path) -> Iterator[tuple[LLM, LLM]]:
    """Without and with drafts."""
    names = ("only_even", "no_repeat", "fails_at_five", "forbids_all", "shortens")
    entries = tuple(f"{MODULE}:{name}" for name in names)
    drafter = Drafter(None, DraftPolicy())
    drafter.step_cost = FreeDrafts()
    yield (
        LLM(tiny_model, logits_processors=entries, **SIZES),
        LLM(tiny_model, drafter=drafter, logits_processors=entries, **SIZES),
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_chosen_tokens_follow_the_processors_with_and_without_drafts(llms, temperature: float) -> None:
    sampling = SamplingParams(
        temperature=temperature, seed=3, max_tokens=40, ignore_eos=True,
        logits_processors=("only_even", "no_repeat"),
    )  # fmt: skip
    plain, drafted = (llm.generate([prompt_of(50)], sampling)[0] for llm in llms)
    assert plain.token_ids == drafted.token_ids
    assert all(token % 2 == 0 for token in plain.token_ids)
    assert all(len(set(plain.token_ids[i : i + 5])) == 5 for i in range(36))
    assert drafted.stats.decode_steps <= plain.stats.decode_steps


@pytest.mark.parametrize("name", ["fails_at_five", "forbids_all", "shortens"])
def test_one_that_fails_ends_its_request_alone(llms, name: str) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    bad = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logits_processors=(name,))
    for llm in llms:
        expected = llm.generate([prompt_of(30)], plain)[0].token_ids
        other = llm.stream(prompt_of(30), plain)
        next(other)
        with pytest.raises(InvalidRequestError, match=f"^logits_processors: '{name}'"):
            llm.generate([prompt_of(40)], bad)
        list(other)
        assert llm.generate([prompt_of(30)], plain)[0].token_ids == expected
        llm.engine.check()
        assert llm.engine.snapshot().violations == ()
        assert not llm.engine.has_work()


def test_an_unknown_name_is_refused_with_those_that_there_are(llms) -> None:
    with pytest.raises(InvalidRequestError, match=r"'digits' is not registered.*fails_at_five, forbids_all"):
        llms[0].generate([prompt_of(9)], SamplingParams(logits_processors=("digits",)))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        (["no colon"], "expected NAME=MODULE:FUNCTION"),
        (["no_such_module:f"], "cannot be imported .*ModuleNotFoundError"),
        ([f"{MODULE}:missing"], "cannot be imported .*AttributeError"),
        ([f"{MODULE}:not_a_function"], "is not a function"),
        ([f"a={MODULE}:only_even", f"a={MODULE}:no_repeat"], "name a is given twice"),
        ([f"n{i}={MODULE}:only_even" for i in range(65)], "limit of 64"),
    ],
)
def test_a_pod_does_not_start_with_one_that_it_cannot_use(entries: list[str], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=f"^--logits-processors.*{reason}"):
        LogitsProcessors.load(entries)
