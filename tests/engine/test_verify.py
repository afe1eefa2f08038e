"""Drafts change how many tokens a step emits, never which: verification is exact for any tree.

The target is a small model written out as a function of the prefix, so that every logit is known.
"""

import dataclasses
import itertools
import math
import random
import threading
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tandem_core import guide
from tandem_core.errors import InvariantError, LogitsError
from tandem_core.sampling import SamplingParams
from tandem_engine.batch import Batch, ScheduledSequence
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request
from tandem_engine.sampling import Verified, Verifier

VOCAB = 5
PROMPT = [1, 3, 2]
GREEDY = SamplingParams(temperature=0.0)


class Target:
    """Logits [VOCAB] that depend on the whole prefix and, through it, on nothing else.

    num_levels: how many different values logits take; few make ties and repeated choices likely.
    """

    def __init__(self, seed: int, num_levels: int = 1000) -> None:
        self.seed = seed
        self.num_levels = num_levels

    def logits(self, prefix: list[int]) -> torch.Tensor:
        generator = np.random.default_rng([self.seed, *prefix])
        levels = generator.integers(0, self.num_levels, VOCAB)
        return torch.from_numpy((levels / self.num_levels * 4.0).astype(np.float32))

    def probabilities(self, prefix: list[int]) -> np.ndarray:
        return self.logits(prefix).double().softmax(-1).numpy()


def prefix_of(draft: DraftTree, node: int) -> list[int]:
    tokens: list[int] = []
    while node:
        tokens.append(draft.token_ids[node - 1])
        node = draft.parents[node - 1]
    return tokens[::-1]


def scheduled(request: Request, draft: DraftTree | None) -> ScheduledSequence:
    """As in the first step (the whole prompt is computed) without a draft, else as in decoding."""
    tokens = request.tokens(0, request.num_tokens)
    if draft is None:
        return ScheduledSequence(request, ((0,),), 0, tuple(tokens), None, True)
    return ScheduledSequence(request, ((0,),), len(tokens) - 1, (tokens[-1], *draft.token_ids), draft, True)


def rows_for(sequence: ScheduledSequence, target: Target) -> list[torch.Tensor]:
    """What the model computes for the sequence: one row, or one per node."""
    tokens = sequence.request.tokens(0, sequence.request.num_tokens)
    if sequence.draft is None:
        return [target.logits(tokens)]
    nodes = range(len(sequence.draft) + 1)
    return [target.logits(tokens + prefix_of(sequence.draft, node)) for node in nodes]


def verify_one(request: Request, draft: DraftTree | None, target: Target) -> Verified:
    sequence = scheduled(request, draft)
    (result,) = Verifier().verify(Batch((sequence,)), torch.stack(rows_for(sequence, target)))
    return result


def random_tree(generator: random.Random, num_nodes: int) -> DraftTree:
    """Any shape, duplicate guesses included."""
    return DraftTree(
        tuple(generator.randrange(VOCAB) for _ in range(num_nodes)),
        tuple(generator.randint(0, i) for i in range(num_nodes)),
        tuple(generator.choice(["prompt", "output", "global"]) for _ in range(num_nodes)),
    )


def full_tree(depth: int) -> DraftTree:
    """All VOCAB^d prefixes down to the depth: every walk goes to the end."""
    token_ids, parents, level = [], [], [0]
    for _ in range(depth):
        next_level = []
        for parent, token in itertools.product(level, range(VOCAB)):
            token_ids.append(token)
            parents.append(parent)
            next_level.append(len(token_ids))
        level = next_level
    return DraftTree(tuple(token_ids), tuple(parents), ("global",) * len(token_ids))


def generate(
    params: SamplingParams, target: Target, num_tokens: int, trees: random.Random | None
) -> tuple[list[int], int]:
    """The first num_tokens output tokens and the steps they took; drafts when trees is given."""
    request = Request("r", list(PROMPT), params)
    num_steps = 0
    while len(request.output_token_ids) < num_tokens:
        draft = random_tree(trees, trees.randint(0, 20)) if trees is not None else None
        request.output_token_ids.extend(verify_one(request, draft, target).token_ids)
        num_steps += 1
    return request.output_token_ids[:num_tokens], num_steps


MODES = {
    "greedy": GREEDY,
    "greedy with penalties": SamplingParams(
        temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.3
    ),
    "temperature": SamplingParams(temperature=0.8),
    "top-k": SamplingParams(temperature=1.2, top_k=3),
    "top-p": SamplingParams(top_p=0.7),
    "min-p": SamplingParams(min_p=0.4),
    "bias and min tokens": SamplingParams(logit_bias={0: 1.5, 4: -100.0}, min_tokens=6, stop_token_ids=(2,)),
    "greedy with bad words": SamplingParams(temperature=0.0, bad_words=((3,), (0, 1), (2, 2), (4, 1, 0))),
    "everything": SamplingParams(
        temperature=1.5,
        top_k=4,
        top_p=0.95,
        min_p=0.01,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=-0.3,
        logit_bias={1: 0.7},
        min_tokens=3,
        stop_token_ids=(0,),
        logprobs=2,
        bad_words=((3,), (1, 2), (4, 4, 4)),
    ),
}


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2**32), st.sampled_from([2, 3, 1000]))
def test_any_tree_gives_the_tokens_of_no_tree(mode: str, seed: int, trees: int, num_levels: int) -> None:
    params = dataclasses.replace(MODES[mode], seed=seed)
    target = Target(seed, num_levels)
    drafted, num_steps = generate(params, target, 12, random.Random(trees))
    plain, num_plain_steps = generate(params, target, 12, None)
    assert drafted == plain
    assert num_steps <= num_plain_steps == 12


def test_random_trees_do_get_accepted() -> None:
    """Else the property above would say little."""
    num_steps = [generate(GREEDY, Target(seed), 30, random.Random(seed))[1] for seed in range(20)]
    assert sum(num_steps) < 0.75 * 20 * 30


@pytest.mark.parametrize(
    "draft", [None, full_tree(2), random_tree(random.Random(5), 15)], ids=["none", "full", "random"]
)
def test_emitted_sequences_follow_the_targets_distribution(draft: DraftTree | None) -> None:
    """Chi-square of all 5^3 sequences of 3 tokens against their exact probabilities."""
    target = Target(11)
    expected: dict[tuple[int, ...], float] = {}
    for tokens in itertools.product(range(VOCAB), repeat=3):
        prefixes = [PROMPT + list(tokens[:n]) for n in range(3)]
        expected[tokens] = math.prod(
            target.probabilities(p)[t] for p, t in zip(prefixes, tokens, strict=True)
        )
    num_runs = 4000
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_runs):
        request = Request("r", list(PROMPT), SamplingParams(seed=seed))
        while len(request.output_token_ids) < 3:
            sequence = scheduled(request, draft)
            state = tuple(request.output_token_ids)
            if state not in rows:
                rows[state] = torch.stack(rows_for(sequence, target))
            (result,) = Verifier().verify(Batch((sequence,)), rows[state])
            request.output_token_ids.extend(result.token_ids)
        counts[tuple(request.output_token_ids[:3])] += 1
    # Sequences expected fewer than 5 times are counted together, as the test's approximation wants.
    common = [t for t, p in expected.items() if p * num_runs >= 5]
    observed = np.array([*(counts[t] for t in common), num_runs - sum(counts[t] for t in common)], float)
    wanted = np.array([*(expected[t] for t in common), 1.0 - sum(expected[t] for t in common)]) * num_runs
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    freedom = len(common)
    assert freedom > 50
    # 3.1 standard deviations above the mean: P = 0.001, and the seeds are fixed
    assert statistic < freedom + 3.1 * math.sqrt(2 * freedom)


def test_the_walk_follows_the_choices_and_names_the_sources() -> None:
    #        0 -> 1 (token 4) -> 3 (token 2)
    #          -> 2 (token 1) -> 4 (token 2) -> 5 (token 0)
    draft = DraftTree((4, 1, 2, 2, 0), (0, 0, 1, 2, 4), ("prompt", "output", "prompt", "global", "output"))
    logits = torch.zeros(6, VOCAB)
    for node, best in enumerate([1, 3, 2, 3, 4, 3]):
        logits[node, best] = 1.0
    request = Request("r", list(PROMPT), GREEDY)
    (result,) = Verifier().verify(Batch((scheduled(request, draft),)), logits)
    assert result == Verified(
        token_ids=(1, 2, 4), path=(0, 2, 4), accepted_sources=("output", "global"), logprobs=()
    )


def test_of_two_equal_guesses_the_first_is_taken() -> None:
    draft = DraftTree((2, 2), (0, 0), ("prompt", "global"))
    logits = torch.eye(VOCAB)[[2, 3, 4]]
    (result,) = Verifier().verify(Batch((scheduled(Request("r", list(PROMPT), GREEDY), draft),)), logits)
    assert (result.token_ids, result.path) == ((2, 3), (0, 1))


def test_a_mixed_batch_gives_each_sequence_its_own_rows() -> None:
    target, generator = Target(3), random.Random(3)
    alone: list[Verified] = []
    sequences: list[ScheduledSequence] = []
    rows: list[torch.Tensor] = []
    for i, params in enumerate(MODES.values()):
        request = Request(f"r{i}", [*PROMPT, i % VOCAB], dataclasses.replace(params, seed=i))
        draft = random_tree(generator, 10) if i % 3 else None
        alone.append(verify_one(request, draft, target))
        sequences.append(scheduled(request, draft))
        rows.extend(rows_for(sequences[-1], target))
        # a prefill chunk that is not the last owns no rows
        sequences.append(
            ScheduledSequence(Request(f"p{i}", [1] * 8, params), ((0,),), 0, (1,) * 4, None, False)
        )
    batch = Batch(tuple(sequences))
    assert Verifier().verify(batch, torch.stack(rows)) == alone


CHAIN = DraftTree((4, 4, 4), (0, 1, 2), ("output",) * 3)
ALWAYS_4 = torch.eye(VOCAB)[[4, 4, 4, 4]]


def emitted(
    params: SamplingParams, eos: frozenset[int] = frozenset(), num_output: int = 0
) -> tuple[int, ...]:
    """What a model that always says 4 emits with a draft of three 4s."""
    request = Request("r", list(PROMPT), params, eos_token_ids=eos, output_token_ids=[0] * num_output)
    (result,) = Verifier().verify(Batch((scheduled(request, CHAIN),)), ALWAYS_4)
    return result.token_ids


def test_the_walk_stops_at_a_token_that_ends_the_text() -> None:
    assert emitted(GREEDY) == (4, 4, 4, 4)
    assert emitted(GREEDY, eos=frozenset({4})) == (4,)
    assert emitted(dataclasses.replace(GREEDY, ignore_eos=True), eos=frozenset({4})) == (4, 4, 4, 4)
    assert emitted(dataclasses.replace(GREEDY, stop_token_ids=(4,))) == (4,)


def test_the_walk_stops_at_max_tokens() -> None:
    assert emitted(dataclasses.replace(GREEDY, max_tokens=2)) == (4, 4)
    assert emitted(dataclasses.replace(GREEDY, max_tokens=5), num_output=4) == (4,)


def test_min_tokens_count_the_path() -> None:
    """Two more tokens must not be the end: the draft's 4 is refused until then."""
    params = dataclasses.replace(GREEDY, min_tokens=3)
    assert emitted(params, eos=frozenset({4}), num_output=1) == (0,)
    draft = DraftTree((0, 0, 4), (0, 1, 2), ("output",) * 3)
    request = Request("r", list(PROMPT), params, eos_token_ids=frozenset({4}), output_token_ids=[0])
    (result,) = Verifier().verify(Batch((scheduled(request, draft),)), ALWAYS_4)
    assert result.token_ids == (0, 0, 4)


def test_penalties_count_the_path() -> None:
    """Logits 1.0 for 4, 0.5 for 3: after the second 4 the frequency penalty makes 3 the choice."""
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.5, 1.0]]).repeat(4, 1)
    request = Request("r", list(PROMPT), SamplingParams(temperature=0.0, frequency_penalty=0.3))
    (result,) = Verifier().verify(Batch((scheduled(request, CHAIN),)), logits)
    assert result.token_ids == (4, 4, 3)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_words_are_never_generated(temperature: float) -> None:
    bad_words = ((3,), (0, 1), (2, 2), (4, 1, 0))
    for seed in range(30):
        params = SamplingParams(temperature=temperature, seed=seed, bad_words=bad_words)
        tokens, _ = generate(params, Target(seed, 3), 40, random.Random(seed))
        for word in bad_words:
            assert word not in [tuple(tokens[n : n + len(word)]) for n in range(len(tokens))]


def test_bad_words_count_the_path() -> None:
    """The draft's three 4s complete (4, 4) at the second one."""
    assert emitted(dataclasses.replace(GREEDY, bad_words=((4, 4),))) == (4, 0)
    assert emitted(dataclasses.replace(GREEDY, bad_words=((0, 4),)), num_output=1) == (0,)
    assert emitted(dataclasses.replace(GREEDY, bad_words=((2, 4),))) == (4, 4, 4, 4), "the prompt ends with 2"


def test_logprobs_are_those_of_the_raw_logits_at_the_visited_nodes() -> None:
    target = Target(7, num_levels=3)
    params = SamplingParams(temperature=0.0, logit_bias={2: 100.0}, logprobs=3)
    draft = DraftTree((1, 2, 2), (0, 0, 2), ("prompt",) * 3)
    result = verify_one(Request("r", list(PROMPT), params), draft, target)
    assert (result.token_ids, result.path) == ((2, 2, 2), (0, 2, 3))
    for n, entry in enumerate(result.logprobs):
        expected = np.log(target.probabilities(PROMPT + [2] * n))
        order = sorted(range(VOCAB), key=lambda t: (-expected[t], t))[:3]
        assert entry.token_id == 2
        assert entry.logprob == pytest.approx(expected[2], abs=1e-6)
        assert [t for t, _ in entry.top] == order
        assert [p for _, p in entry.top] == pytest.approx(expected[order], abs=1e-6)


@pytest.mark.parametrize("num_top", [0, 1, VOCAB, 20])
def test_the_number_of_logprobs(num_top: int) -> None:
    params = SamplingParams(temperature=0.0, logprobs=num_top)
    result = verify_one(Request("r", list(PROMPT), params), None, Target(1))
    (entry,) = result.logprobs
    assert len(entry.top) == min(num_top, VOCAB)
    if num_top:
        assert entry.top[0] == (entry.token_id, entry.logprob)


def test_the_raw_logits_stay_unchanged() -> None:
    sequence = scheduled(Request("r", list(PROMPT), MODES["everything"]), full_tree(2))
    logits = torch.stack(rows_for(sequence, Target(2)))
    before = logits.clone()
    Verifier().verify(Batch((sequence,)), logits)
    assert torch.equal(logits, before)


def test_broken_promises_are_named() -> None:
    request = Request("r", list(PROMPT), GREEDY)
    batch = Batch((scheduled(request, None),))
    with pytest.raises(InvariantError, match="1 rows"):
        Verifier().verify(batch, torch.zeros(2, VOCAB))
    request.output_token_ids.append(1)
    (result,) = Verifier().verify(batch, torch.zeros(1, VOCAB))
    assert isinstance(result.error, InvariantError)
    assert "has 4 tokens" in str(result.error)


@pytest.mark.parametrize("worst", [math.nan, math.inf])
@pytest.mark.parametrize("mode", MODES)
def test_a_row_of_no_numbers_is_the_error_of_its_sequence(mode: str, worst: float) -> None:
    target, draft = Target(4), full_tree(2)
    sequences = [scheduled(Request(name, list(PROMPT), MODES[mode]), draft) for name in ("bad", "good")]
    logits = torch.stack([row for sequence in sequences for row in rows_for(sequence, target)])
    logits[0, 1] = worst
    failed, good = Verifier().verify(Batch(tuple(sequences)), logits)
    assert isinstance(failed.error, LogitsError)
    assert good == verify_one(sequences[1].request, draft, target)


class Guide:
    """Allows any token where it has a mask."""

    is_slow = False

    def __init__(self, has_mask: list[bool]) -> None:
        self.has_mask = has_mask
        self.threads: list[str] = []

    def masks(self, output: list[int], draft: DraftTree | None, ends: frozenset[int]) -> list:
        self.threads.append(threading.current_thread().name)
        everything = np.array([0xFF], dtype=np.uint8)
        return [everything if has_mask else None for has_mask in self.has_mask]


def verify_guided(sequences: list[ScheduledSequence], logits: torch.Tensor) -> list[Verified]:
    verifier, batch = Verifier(), Batch(tuple(sequences))
    verifier.mask_workers.start(batch)
    return verifier.verify(batch, logits)


class Panic(BaseException):
    """As of pyo3, for a panic in Rust."""


def test_a_guide_that_fails_is_the_error_of_its_sequence() -> None:
    def panics(*_: object) -> None:
        raise Panic("in Rust")

    params = dataclasses.replace(GREEDY, guide=guide.Guide(guide.GuideKind.REGEX, ".*"))
    failing, good = Guide([True]), Guide([True])
    failing.masks = panics
    requests = [
        Request(str(n), list(PROMPT), params, guide=state, output_token_ids=[0])
        for n, state in enumerate((failing, good))
    ]
    first, second = verify_guided([scheduled(one, None) for one in requests], ALWAYS_4[:2])
    assert "in Rust" in str(first.error)
    assert (second.error, second.token_ids) == (None, (4,))


@pytest.mark.parametrize("num_masks", [1, 2, 4])
def test_the_walk_stops_before_a_node_without_a_mask(num_masks: int) -> None:
    params = dataclasses.replace(GREEDY, guide=guide.Guide(guide.GuideKind.REGEX, ".*"))
    state = Guide([node < num_masks for node in range(4)])
    request = Request("r", list(PROMPT), params, guide=state, output_token_ids=[0])
    (result,) = verify_guided([scheduled(request, CHAIN)], ALWAYS_4)
    assert result.token_ids == (4,) * num_masks
    assert state.threads != [threading.current_thread().name]
