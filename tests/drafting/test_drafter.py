"""The drafter: valid trees, worth their rows, learning from what is accepted."""

from __future__ import annotations

import random
import time
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core.sampling import SamplingParams
from tandem_core.speculation import SpeculationMode
from tandem_drafting.drafter import Drafter, DraftPolicy
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_drafting.step_cost import StepCost
from tandem_engine.draft_source import Emitted
from tandem_engine.request import Request


def request_at(text: list[int], num_prompt: int, request_id: str = "r", **options) -> Request:
    """A request that has just been given its first output token."""
    sampling = SamplingParams(max_tokens=options.pop("max_tokens", 10_000))
    request = Request(request_id, text[:num_prompt], sampling, **options)
    request.output_token_ids = text[num_prompt : num_prompt + 1]
    request.num_computed_tokens = num_prompt
    return request


class Replay:
    """Decodes a given text as greedy verification would, and counts."""

    def __init__(self, drafter: Drafter, text: list[int], num_prompt: int) -> None:
        self.drafter, self.text = drafter, text
        self.request = request_at(text, num_prompt)
        self.steps = self.drafted = self.accepted = 0

    def run(self, max_nodes: int = 15) -> Replay:
        while self.request.num_tokens < len(self.text):
            (tree,) = self.drafter.propose([self.request], max_nodes)
            children = tree.children() if tree is not None else [{}]
            node = 0
            emitted: list[int] = []
            while self.request.num_tokens + len(emitted) < len(self.text):
                token = self.text[self.request.num_tokens + len(emitted)]
                emitted.append(token)
                if token not in children[node]:
                    break
                node = children[node][token]
            self.drafter.extend([Emitted(self.request, emitted, ())])
            self.request.output_token_ids += emitted
            self.request.num_computed_tokens = self.request.num_tokens - 1
            self.steps += 1
            self.drafted += len(tree) if tree is not None else 0
            self.accepted += len(emitted) - 1
        return self


def noise(length: int, seed: int = 0, vocabulary: int = 1000) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(vocabulary) for _ in range(length)]


texts = st.lists(st.integers(0, 4), min_size=4, max_size=60)


@settings(max_examples=60, deadline=None)
@given(st.lists(texts, min_size=1, max_size=4), st.integers(0, 80), st.floats(0, 0.2), st.integers(1, 12))
def test_every_tree_is_valid(batch, max_nodes, row_cost, room):
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("x", 0, tuple(batch[0]))], "1")
    drafter = Drafter(mirror, DraftPolicy(row_cost=row_cost))
    requests = [
        request_at(text, len(text) - 1, request_id=str(i), max_tokens=room) for i, text in enumerate(batch)
    ]
    trees = drafter.propose(requests, max_nodes)
    assert len(trees) == len(requests)
    for tree in trees:
        if tree is None:
            continue
        assert 1 <= len(tree) <= min(max_nodes, 63)
        assert max(tree.depths()) <= room - 1  # the bonus token needs room too
        # No guess twice under one parent, and known sources only; DraftTree checks the order itself.
        assert len({*zip(tree.token_ids, tree.parents, strict=True)}) == len(tree)
        assert {*tree.sources} <= {"prompt", "output", "global", "recycled"}


def test_a_repeated_text_is_copied():
    text = noise(300)
    replay = Replay(Drafter(None, DraftPolicy()), text + text, len(text)).run()
    assert replay.accepted / replay.drafted > 0.9
    assert replay.steps < 300 / 10


def test_random_text_is_soon_left_alone():
    drafter = Drafter(None, DraftPolicy())
    replay = Replay(drafter, noise(2000), 1000).run()
    assert replay.drafted / replay.steps < 0.1


def test_drafting_resumes_when_the_text_becomes_predictable():
    """Silence is no dead end: what was considered but not sent is judged as well."""
    passage = noise(200, seed=1)
    text = noise(2000) + passage * 4
    replay = Replay(Drafter(None, DraftPolicy()), text, 1000).run()
    assert replay.accepted > 3 * len(passage) * 0.7


def test_another_request_s_text_is_copied_through_the_mirror():
    text = noise(300)
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("earlier", 0, tuple(text))], "1")
    warm = Replay(Drafter(mirror, DraftPolicy()), text, 10).run()
    cold = Replay(Drafter(None, DraftPolicy()), text, 10).run()
    assert warm.accepted > 200 > 10 > cold.accepted
    snapshot, position = mirror.snapshot()
    mirror.apply_snapshot(snapshot, position)
    assert Replay(Drafter(mirror, DraftPolicy()), text, 10).run().accepted > 200


def test_alternatives_share_their_beginning():
    """After "1 2 3" came 4 and 5 equally often: one tree holds both, under the shared 3."""
    text = [token for i in range(8) for token in (100 + i, 1, 2, 3, 4 + i % 2)] + [1, 2]
    drafter = Drafter(None, DraftPolicy(row_cost=0.01))
    (tree,) = drafter.propose([request_at(text, len(text) - 1)], 15)
    assert tree is not None
    root = tree.children()[0]
    assert {4, 5} <= set(tree.children()[root[3]])


@pytest.mark.parametrize(("mode", "source"), [("off", None), ("local", "prompt"), ("global", "global")])
def test_the_mode_names_the_sources(mode, source):
    text = [1, 2, 3, 4, 5, 6, 7] + ([50, 51, 1, 2, 3] if source != "global" else [50, 51, 52])
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("x", 0, (50, 51, 52, 53, 54))] * 3, "1")
    drafter = Drafter(mirror, DraftPolicy(SpeculationMode(mode)))
    (tree,) = drafter.propose([request_at(text, len(text) - 1)], 15)
    assert (tree.sources[0] if tree is not None else None) == source


def test_a_chain_is_one_line_of_at_most_seven():
    text = [token for i in range(8) for token in (100 + i, *range(1, 13), 20 + i % 2)] + [1, 2]
    drafter = Drafter(None, DraftPolicy(SpeculationMode.CHAIN, row_cost=0.001))
    (tree,) = drafter.propose([request_at(text, len(text) - 1)], 15)
    assert tree is not None
    assert tree.token_ids == (3, 4, 5, 6, 7, 8, 9)
    assert tree.parents == (0, 1, 2, 3, 4, 5, 6)


def test_a_request_may_ask_for_another_mode():
    text = [1, 2, 3, 4, 5, 6, 7, 50, 51, 1, 2, 3]
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("x", 0, (90, 1, 2, 3, 9, 9))] * 3, "1")
    wanted = [None, SpeculationMode.OFF, SpeculationMode.LOCAL]
    requests = [request_at(text, len(text) - 1, str(n), speculation=mode) for n, mode in enumerate(wanted)]
    of_pod, off, local = Drafter(mirror, DraftPolicy(row_cost=0.001)).propose(requests, 15)
    assert of_pod is not None and local is not None
    assert "global" in of_pod.sources
    assert off is None
    assert "global" not in local.sources


@pytest.mark.parametrize("allowed", [SpeculationMode.OFF, SpeculationMode.LOCAL])
def test_a_request_gets_no_more_than_its_pod_allows(allowed):
    text = [1, 2, 3, 4, 5, 6, 7, 50, 51, 1, 2, 3]
    mirror = GlobalMirror()
    mirror.apply_delta([AcceptedSpan("x", 0, (90, 1, 2, 3, 9, 9))], "1")
    drafter = Drafter(mirror, DraftPolicy(allowed, row_cost=0.001))
    (tree,) = drafter.propose([request_at(text, len(text) - 1, speculation=SpeculationMode.GLOBAL)], 15)
    if allowed is SpeculationMode.OFF:
        assert tree is None
    else:
        assert tree is not None
        assert "global" not in tree.sources


def test_sources_tell_prompt_from_output():
    drafter = Drafter(None, DraftPolicy())
    prompt, output = [1, 2, 3, 4, 5, 6], [30, 31, 32, 33, 30, 31]
    request = request_at(prompt + output, len(prompt))
    request.output_token_ids = output
    request.num_computed_tokens = request.num_tokens - 1
    (tree,) = drafter.propose([request], 15)
    assert tree is not None
    assert (tree.token_ids[0], tree.sources[0]) == (32, "output")


def test_a_tenant_s_corpus_serves_no_other_tenant():
    mirror = GlobalMirror(tenant="acme")
    mirror.apply_delta([AcceptedSpan(str(i), 0, (1, 2, 3, 4)) for i in range(5)], "1")
    drafter = Drafter(mirror, DraftPolicy())
    own = request_at([9, 1, 2], 2, "own", tenant="acme")
    foreign = request_at([9, 1, 2], 2, "foreign", tenant="evil")
    drafts = drafter.propose([own, foreign], 15)
    assert drafts[0] is not None
    assert drafts[1] is None


def test_dearer_rows_and_larger_batches_draft_less():
    text = noise(60, vocabulary=6)

    def num_rows(batch_size: int, row_cost: float) -> float:
        drafter = Drafter(None, DraftPolicy(row_cost=row_cost))
        requests = [request_at(text, 59, str(i)) for i in range(batch_size)]
        trees = drafter.propose(requests, 63)
        return sum(len(tree) for tree in trees if tree is not None) / batch_size

    assert num_rows(1, 0.0) > num_rows(1, 0.05) > num_rows(1, 5.0) == 0
    assert num_rows(1, 0.03) > num_rows(16, 0.03)


class CountedCost(StepCost):
    """Counts the steps that are drafted for: each asks for the cost curve once."""

    num_drafted_steps = 0

    def curve(self, num_sequences: int, context: int, max_guesses: int) -> array[float]:
        self.num_drafted_steps += 1
        return super().curve(num_sequences, context, max_guesses)


def test_text_that_nobody_can_guess_is_soon_drafted_for_rarely():
    text = noise(400, vocabulary=10**6)
    drafter = Drafter(None, DraftPolicy())
    drafter.step_cost = cost = CountedCost()
    request = request_at(text, 100)
    is_drafted = []
    for token in text[101:]:
        before = cost.num_drafted_steps
        drafter.propose([request], 15)
        is_drafted.append(cost.num_drafted_steps > before)
        drafter.extend([Emitted(request, [token], ())])
        request.output_token_ids.append(token)
        request.num_computed_tokens += 1
    assert all(is_drafted[:2])
    assert sum(is_drafted[-80:]) == 5
    # As soon as the text repeats itself, a draft ends the backoff.
    replay = Replay(drafter, text[:400] + text[150:390], 100)
    replay.request = request
    before = request.num_tokens
    replay.run()
    assert request.num_tokens - before == 240
    assert replay.steps < 60


def test_a_cost_that_was_measured_too_high_is_forgotten():
    """Steps with guesses were slow once; the sequence is predictable all along."""
    drafter = Drafter(None, DraftPolicy())
    for guesses in [0, 1] * 64:
        drafter.step_cost.observe(1, 100, guesses, 1e-2 * (1 + 3 * guesses))
    request = request_at(list(range(100, 120)) * 10, 99)
    drafted = []
    for _ in range(5000):
        tree = drafter.propose([request], 15)[0]
        drafted.append(tree is not None)
        guesses = len(tree) if tree is not None else 0
        drafter.step_cost.observe(1, 100, guesses, 1e-2 * (1 + 0.02 * guesses))
    assert not any(drafted[:100])
    assert all(drafted[-100:])


class Limited:
    """A sequence that repeats itself, in steps of 20 ms and 1 ms for each guess, times `slowness`."""

    def __init__(self) -> None:
        self.drafter = Drafter(None, DraftPolicy(row_cost=0.01))
        self.text = list(range(100, 120)) * 10
        self.slowness = 1.0

    def num_guesses(self, *objectives: float, share: float = 1.0) -> int:
        requests = [
            request_at(self.text, 99, str(n), token_s=token_s) for n, token_s in enumerate(objectives)
        ]
        trees = self.drafter.propose(requests, 15, share)
        return sum(len(tree) for tree in trees if tree is not None)

    def run(self, *objectives: float, num_steps: int = 200) -> float:
        """How long the last step took."""
        for _ in range(num_steps):
            num_guesses = self.num_guesses(*objectives)
            seconds = self.slowness * (0.02 + 0.001 * num_guesses)
            self.drafter.observe_step(len(objectives), 100, num_guesses, seconds)
        return seconds


def test_guesses_are_as_many_as_the_tightest_objective_per_token_leaves_time_for():
    limited = Limited()
    most = limited.num_guesses(0.001)
    assert most > 4, "what a step takes is not known yet"
    assert limited.run(0.0) == pytest.approx(0.02 + 0.001 * limited.num_guesses(0.0))
    assert limited.num_guesses(0.1) == limited.num_guesses(0.0)
    assert limited.run(0.024) <= 0.0245
    assert limited.num_guesses(0.024) > limited.num_guesses(0.024, share=0.5) >= 0
    assert limited.num_guesses(0.018) == 0, "steps without guesses may take less than the curve says"
    assert limited.num_guesses(0.01) == limited.num_guesses(0.0), "none would not keep it either"
    # The machine becomes faster.
    limited.slowness = 0.5
    assert limited.run(0.024) == pytest.approx(0.5 * (0.02 + 0.001 * limited.num_guesses(0.0)))


def test_an_objective_per_token_that_cannot_be_kept_leaves_others_theirs():
    limited = Limited()
    limited.run(0.0, 0.0)
    assert limited.num_guesses(0.005, 0.0) == limited.num_guesses(0.0, 0.0)
    assert (
        limited.num_guesses(0.005, 0.023) == limited.num_guesses(0.0, 0.023) < limited.num_guesses(0.0, 0.0)
    )


def test_the_time_that_is_left_until_its_end_limits_guesses_as_an_objective_per_token_does():
    limited = Limited()
    limited.run(0.0)
    limited.run(0.024)
    request = request_at(limited.text, 99, "0")

    def num_guesses(left_s: float, num_left: int) -> int:
        request.ends_by = time.monotonic() + left_s
        request.num_expected = len(request.output_token_ids) + num_left
        tree = limited.drafter.propose([request], 15)[0]
        return len(tree) if tree is not None else 0

    most = limited.num_guesses(0.0)
    assert num_guesses(100.0, 100) == most
    assert num_guesses(2.4, 100) == limited.num_guesses(0.024) < most
    assert num_guesses(2.4, 50) == most, "the text gained tokens by its guesses"
    assert num_guesses(1.9, 100) == 0, "steps without guesses may take less than the curve says"
    assert num_guesses(-1.0, 100) == most, "it is late"


def test_what_was_measured_with_guesses_alone_is_measured_without_before_an_objective_is_given_up():
    """Guesses that cost four times as much as is believed, always as many: the curve says that steps without
    any take 26 ms."""
    source = random.Random(0)
    limited = Limited()
    limited.drafter = Drafter(None, DraftPolicy())

    def run(token_s: float) -> float:
        took = []
        for _ in range(500):
            num_guesses = limited.num_guesses(token_s)
            took.append((0.02 + 0.004 * num_guesses) * source.gauss(1, 0.04))
            limited.drafter.observe_step(1, 100, num_guesses, took[-1])
        return sum(took[-200:]) / 200

    assert run(0.0) > 0.026
    assert run(0.023) < 0.0235


def test_a_pause_of_the_process_does_not_count_as_the_time_of_steps():
    limited = Limited()
    limited.run(0.023)
    before = limited.num_guesses(0.023)
    limited.drafter.observe_step(1, 100, before, 2.0)
    assert before - 1 <= limited.num_guesses(0.023) <= before


def test_steps_of_other_sequences_than_were_drafted_for_do_not_count():
    limited = Limited()
    limited.run(0.023)
    before = limited.num_guesses(0.023)
    for _ in range(60):
        limited.drafter.observe_step(8, 100, 0, 0.06)  # a beam search
    assert limited.num_guesses(0.023) == before


def test_requests_that_are_not_decoding_are_left_alone():
    drafter = Drafter(None, DraftPolicy())
    prefilling = Request("p", [1, 2, 1, 2, 1], SamplingParams())
    last_token = request_at([1, 2, 1, 2, 1], 4, "l", max_tokens=2)  # only the bonus token fits
    assert drafter.propose([prefilling, last_token], 15) == [None, None]


def test_a_forgotten_request_leaves_nothing_behind():
    drafter = Drafter(None, DraftPolicy())
    request = request_at([1, 2, 1, 2], 3)
    drafter.propose([request], 15)
    assert drafter.num_sequences == 1
    drafter.forget("r")
    drafter.forget("r")
    drafter.extend([Emitted(request, [1], ())])
    assert drafter.num_sequences == 0


def test_guides_that_take_long_share_the_time_of_a_step():
    drafted: list[int] = []

    class Slow:
        def __init__(self, number: int) -> None:
            self.number = number

        def draft(self, output_token_ids, tree, max_nodes):
            until = time.thread_time() + 0.003
            while time.thread_time() < until:
                pass
            drafted.append(self.number)

    drafter = Drafter(None, DraftPolicy(mode=SpeculationMode.LOCAL))
    requests = [request_at([1, 2], 1, f"r{number}") for number in range(32)]
    for number, request in enumerate(requests):
        request.guide = Slow(number)
    drafter.propose(requests, 8)
    assert 1 <= len(drafted) <= 3
    for _ in range(31):
        drafter.propose(requests, 8)
    assert set(drafted) == set(range(32))
