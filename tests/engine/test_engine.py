"""A request that fails in a step ends alone: the others' tokens, and the engine, stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tandem_core.beams import BeamParams
from tandem_core.errors import LogitsError
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_engine.engine import StepOutput
from tandem_engine.llm import LLM
from tandem_engine.request import Request
from tandem_engine.runner import ModelRunner, StepLogits
from toy_models import SIZES, prompt_of

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 1.0, "seed": 5}
BEAMS = {"beam_search": BeamParams(3)}
WAYS = {
    "greedy": GREEDY,
    "sampled": SAMPLED,
    "penalised": GREEDY | {"frequency_penalty": 0.5},
    "beams": BEAMS,
}


def request(name: str, length: int, how: dict) -> Request:
    return Request(name, prompt_of(length), SamplingParams(max_tokens=12, ignore_eos=True, **how))


def run(llm: LLM, *requests: Request) -> dict[str, list[StepOutput]]:
    """All outputs by request; checks that nothing is left behind."""
    outputs: dict[str, list[StepOutput]] = {one.request_id: [] for one in requests}
    for one in requests:
        llm.engine.add(one)
    while llm.engine.has_work():
        for output in llm.engine.step():
            outputs[output.request.request_id].append(output)
    llm.engine.check()
    assert not llm.engine.snapshot().violations
    assert llm.engine.blocks.usage().free == SIZES["num_blocks"]
    return outputs


def tokens(outputs: list[StepOutput]) -> list[int]:
    found = outputs[-1].hypotheses
    return list(found[0].token_ids) if found else [token for one in outputs for token in one.token_ids]


@pytest.fixture
def llm(tiny_model: Path) -> LLM:
    return LLM(tiny_model, drafter=Drafter(None, DraftPolicy()), **SIZES)


@pytest.fixture
def spoil(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int], None]:
    """Call it with a request and a length of its output: its logits are NaN from then on."""
    execute = ModelRunner.execute

    def begin(name: str, length: int) -> None:
        def spoiled(runner: ModelRunner, batch, *listeners) -> StepLogits:
            values = execute(runner, batch, *listeners).values.clone()
            row = 0
            for sequence in batch.sequences:
                if sequence.request.request_id == name and len(sequence.request.output_token_ids) >= length:
                    values[row : row + sequence.num_logits_rows] = torch.nan
                row += sequence.num_logits_rows
            return StepLogits(values)

        monkeypatch.setattr(ModelRunner, "execute", spoiled)

    return begin


@pytest.mark.parametrize("length", [0, 5])
@pytest.mark.parametrize("way", WAYS)
def test_nan_ends_its_request_alone(
    llm: LLM, spoil: Callable[[str, int], None], way: str, length: int
) -> None:
    others = [request(f"{name}-{n}", 30 + n, how) for name, how in WAYS.items() for n in range(2)]
    expected = {name: tokens(outputs) for name, outputs in run(llm, *others).items()}
    spoil("bad", length)
    (alone,) = run(llm, request("bad", 40, WAYS[way]))["bad"][-1:]
    assert isinstance(alone.error, LogitsError)
    assert alone.finished
    others = [request(f"{name}-{n}", 30 + n, how) for name, how in WAYS.items() for n in range(2)]
    outputs = run(llm, *others[:4], request("bad", 40, WAYS[way]), *others[4:])
    assert isinstance(outputs.pop("bad")[-1].error, LogitsError)
    assert {name: tokens(one) for name, one in outputs.items()} == expected


def test_an_exception_while_a_sequence_is_verified_ends_its_request_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way = []

    def fails(*_: object) -> None:
        under_way.append([name for name in ("bad", "good", "none") if llm.engine.is_under_way(name)])
        raise RuntimeError("a bug")

    expected = tokens(run(llm, request("good", 33, GREEDY))["good"])
    monkeypatch.setattr("tandem_engine.sampling.verify.token_logprobs", fails)
    outputs = run(llm, request("good", 33, GREEDY), request("bad", 20, SAMPLED | {"logprobs": 2}))
    assert isinstance(outputs["bad"][-1].error, RuntimeError)
    assert tokens(outputs["good"]) == expected
    assert under_way == [["bad"]]


def test_all_requests_of_a_step_are_under_way_while_the_model_computes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way, execute = [], ModelRunner.execute

    def spy(runner: ModelRunner, batch, *listeners) -> StepLogits:
        under_way.append([name for name in ("a", "b", "none") if llm.engine.is_under_way(name)])
        return execute(runner, batch, *listeners)

    monkeypatch.setattr(ModelRunner, "execute", spy)
    run(llm, request("a", 20, GREEDY), request("b", 21, SAMPLED))
    assert under_way[0] == ["a", "b"]
    assert not llm.engine.is_under_way("a")


def test_late_answers_that_give_way_get_the_tokens_that_they_get_alone(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps take half a second of a false clock; requests in time find all places taken by late answers."""
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    llm = LLM(tiny_model, **SIZES | {"max_batch": 2})
    late = [request(f"late {length}", length, SAMPLED) for length in (20, 30, 40)]
    in_time = [request(f"in time {length}", length, GREEDY) for length in (25, 35, 45)]
    expected = {}
    for one in (*late, *in_time):
        alone = request(one.request_id, one.num_prompt_tokens, {})
        alone.sampling = one.sampling = replace(one.sampling, max_tokens=40 if one in late else 5)
        run(llm, alone)
        expected[one.request_id] = alone.output_token_ids
    for one in late:
        one.due = now - 100
        llm.engine.add(one)
    ended: list[str] = []
    for number in range(1000):
        if number in (4, 6, 12):
            one = in_time[(4, 6, 12).index(number)]
            one.due = now + 2.5
            llm.engine.add(one)
        ended += [output.request.request_id for output in llm.engine.step() if output.finished]
        now += 0.5
        if not llm.engine.has_work():
            break
    assert [name for name in ended if name.startswith("in time")] == ended[:3]
    assert {one.request_id: one.output_token_ids for one in (*late, *in_time)} == expected
    assert all(one.num_preemptions == 0 for one in late), "their KV stayed"
