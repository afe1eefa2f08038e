"""Whatever is drafted, a whole engine generates what it generates without: the same text for every way of
sampling, and texts that follow the model's distribution exactly.

tests/engine/test_verify.py shows this of the verifier alone, for any tree; here drafts, scheduler, KV cache,
stop strings and log probabilities take part.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from free_drafts import FreeDrafts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, DraftPolicy, drafter_for
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.spans import AcceptedSpan
from tandem_engine import model_loader
from tandem_engine.assemble import EngineConfig, assemble
from tandem_engine.draft_source import DraftSource, Emitted
from tandem_engine.draft_tree import DraftTree
from tandem_engine.llm import LLM, Completion
from tandem_engine.request import Request
from torch import Tensor
from toy_models import SIZES, VOCABULARY, prompt_of, save_checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

# -- every way of sampling -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> LLM:
    return LLM(tiny_model, **SIZES)


@pytest.fixture(scope="module", params=["local", "chain"])
def drafted(tiny_model: Path, request: pytest.FixtureRequest) -> LLM:
    llm = LLM(tiny_model, drafter=drafter_for(request.param), **SIZES)
    llm.engine._drafter.step_cost = FreeDrafts()
    return llm


tokens = st.integers(0, VOCABULARY - 1)
sampling_params = st.builds(
    lambda temperature, max_tokens, **others: SamplingParams(
        temperature=temperature,
        max_tokens=max_tokens,
        min_tokens=others.pop("min_share") * max_tokens // 4,
        stop_token_ids=tuple(others.pop("stop_token_ids")),
        **others,
    ),
    temperature=st.sampled_from([0.0, 0.0, 0.5, 1.0, 2.0]),
    max_tokens=st.integers(1, 48),
    min_share=st.integers(0, 3),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.4, -2.0]),
    logit_bias=st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
    stop_token_ids=st.lists(tokens, max_size=2),
    seed=st.integers(0, 2**64 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
    ignore_eos=st.booleans(),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(
        st.tuples(st.integers(1, 80), st.integers(0, 30), sampling_params), min_size=1, max_size=4
    ),
    stop_at=st.none() | st.integers(0, 40),
)
def test_text_stop_and_log_probabilities_are_those_without_drafts(
    plain: LLM, drafted: LLM, asked: list[tuple[int, int, SamplingParams]], stop_at: int | None
) -> None:
    prompts = [prompt_of(length, start) for length, start, _ in asked]
    sampling = [params for _, _, params in asked]
    want = plain.generate(prompts, sampling)
    if stop_at is not None:
        # A string that does occur, in the middle of what a draft may bring.
        stop = want[0].text[stop_at : stop_at + 2]
        sampling = [replaced(params, stop=(stop,)) if stop else params for params in sampling]
        want = plain.generate(prompts, sampling)
    got = drafted.generate(prompts, sampling)
    for one, other in zip(want, got, strict=True):
        assert (one.token_ids, one.text) == (other.token_ids, other.text)
        assert (one.finish_reason, one.stop_reason) == (other.finish_reason, other.stop_reason)
        assert_same_logprobs(one, other)
    assert drafted.engine.scheduler.check() == []


def replaced(params: SamplingParams, **changes: object) -> SamplingParams:
    return SamplingParams(**{**params.__dict__, **changes})


def assert_same_logprobs(one: Completion, other: Completion) -> None:
    """Of the same tokens; to rounding, for torch's products depend on the number of rows."""
    assert len(one.logprobs) == len(other.logprobs)
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a.token_id == b.token_id
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [p for _, p in a.top] == pytest.approx([p for _, p in b.top], abs=1e-4)


def test_such_requests_are_drafted_for(drafted: LLM) -> None:
    """Else the property above would say little."""
    for temperature in (0.0, 0.5):
        sampling = SamplingParams(
            temperature=temperature, frequency_penalty=-2.0, max_tokens=48, ignore_eos=True, seed=1
        )
        (completion,) = drafted.generate([prompt_of(60)], sampling)
        assert completion.stats.accepted_tokens > 10


# -- the distribution ----------------------------------------------------------------------------------

VOCAB = 6
LENGTH = 3
#: Every token has followed every other, so that there is always something to guess.
PROMPT = [a for b in range(VOCAB) for c in range(VOCAB) for a in (b, c)]
NUM_TEXTS = 6000
SAMPLED = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=256, bos_token_id=1, eos_token_id=2,
        initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = tmp_path_factory.mktemp("checkpoints") / "six"
    save_checkpoint(model, checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TANDEM_HOME", str(tmp_path_factory.mktemp("home")))
        return model_loader.pull(str(checkpoint))


#: Of the next token, behind each beginning of a text.
Conditionals = dict[tuple[int, ...], np.ndarray]


@pytest.fixture(scope="module")
def conditionals(model: LlamaForCausalLM) -> Conditionals:
    """By transformers, in float32, normalised in float64."""
    found: Conditionals = {}
    for length in range(LENGTH):
        beginnings = list(itertools.product(range(VOCAB), repeat=length))
        ids = torch.tensor([[*PROMPT, *beginning] for beginning in beginnings])
        with torch.inference_mode():
            logits = model(ids).logits[:, -1].double()
        for beginning, row in zip(beginnings, logits.softmax(-1).numpy(), strict=True):
            found[beginning] = row
    return found


class Scripted:
    """Proposes one line to the end of the text, each guess picked by its probability."""

    def __init__(
        self, conditionals: Conditionals, pick: Callable[[np.ndarray], np.intp], mirror: None = None
    ) -> None:
        self._conditionals = conditionals
        self._pick = pick

    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        return [self._line(request) for request in requests]

    def _line(self, request: Request) -> DraftTree | None:
        # The last token of all is nobody's guess: it comes as the bonus.
        room = LENGTH - 1 - len(request.output_token_ids)
        text = list(request.output_token_ids)
        for _ in range(room):
            text.append(int(self._pick(self._conditionals[tuple(text)])))
        guesses = tuple(text[len(request.output_token_ids) :])
        return DraftTree(guesses, tuple(range(room)), ("output",) * room) if room > 0 else None

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Learns nothing."""

    def extend(self, emitted: Sequence[Emitted], logits: Tensor) -> None:
        """Learns nothing."""

    def forget(self, request_id: str) -> None:
        """Keeps nothing."""


def generate(folder: Path, drafter: DraftSource | None, mirror: GlobalMirror | None, seed: int):
    """Counts of NUM_TEXTS texts, and how many guesses were accepted."""
    config = EngineConfig(model=folder, max_batch=32, max_draft_nodes=16, **{**SIZES, "num_blocks": 512})
    engine = assemble(config, drafter).engine
    counts: Counter[tuple[int, ...]] = Counter()
    accepted = 0
    waiting = [
        Request(f"r{n}", list(PROMPT), replaced(SAMPLED, seed=seed + n)) for n in reversed(range(NUM_TEXTS))
    ]
    live = 0
    while waiting or live:
        while waiting and live < 32:
            engine.add(waiting.pop())
            live += 1
        for output in engine.step():
            accepted += len(output.accepted_sources)
            if output.finished:
                live -= 1
                counts[tuple(output.request.output_token_ids)] += 1
                if mirror is not None:
                    text = tuple(output.request.output_token_ids)
                    mirror.apply_delta([AcceptedSpan(output.request.request_id, 0, text)], "1")
    return counts, accepted


def expected_of(conditionals: Conditionals) -> dict[tuple[int, ...], float]:
    return {
        text: math.prod(conditionals[text[:n]][text[n]] for n in range(LENGTH))
        for text in itertools.product(range(VOCAB), repeat=LENGTH)
    }


def excess(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square over all texts, in standard deviations above what chance gives on average.

    The chi-square approximation needs expected counts of at least 5, so rarer texts are counted together.
    """
    total = counts.total()
    common = [text for text, p in expected.items() if p * total >= 5]
    observed = np.array([*(counts[text] for text in common), total - sum(counts[t] for t in common)], float)
    wanted = np.array([*(expected[t] for t in common), 1.0 - sum(expected[t] for t in common)]) * total
    assert len(common) > 60, "too few texts to tell anything"
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return (statistic - len(common)) / math.sqrt(2 * len(common))


@pytest.mark.parametrize(
    ("drafts", "seed"),
    [
        ("off", 0),
        ("local", 10_000),
        ("global", 20_000),
        ("least likely", 30_000),
        ("likeliest", 40_000),
    ],
)
def test_texts_follow_the_exact_product_of_probabilities(
    folder: Path, conditionals: Conditionals, drafts: str, seed: int
) -> None:
    """All 216 texts of three tokens."""
    mirror = GlobalMirror(vocab_size=VOCAB) if drafts == "global" else None
    drafter: DraftSource | None = None
    if drafts in ("local", "global"):
        drafter = Drafter(mirror, DraftPolicy())
        drafter.step_cost = FreeDrafts()
    elif drafts != "off":
        drafter = Scripted(conditionals, np.argmin if drafts == "least likely" else np.argmax)
    counts, accepted = generate(folder, drafter, mirror, seed)
    assert counts.total() == NUM_TEXTS
    assert (accepted == 0) == (drafts == "off")
    # 3.1: one time in a thousand by chance, and the seeds are fixed.
    assert abs(excess(counts, expected_of(conditionals))) < 3.1


def test_the_test_of_the_distribution_can_fail(conditionals: Conditionals) -> None:
    """Texts of a verifier that takes one likeliest guess in ten without asking the model."""
    expected = expected_of(conditionals)
    generator = np.random.default_rng(1)
    texts, weights = list(expected), np.array(list(expected.values()))
    fair: Counter[tuple[int, ...]] = Counter()
    biased: Counter[tuple[int, ...]] = Counter()
    for index in generator.choice(len(texts), NUM_TEXTS, p=weights / weights.sum()):
        text = texts[index]
        fair[text] += 1
        if generator.random() < 0.1:
            text = (text[0], int(conditionals[text[:1]].argmax()), text[2])
        biased[text] += 1
    assert abs(excess(fair, expected)) < 3.1
    assert excess(biased, expected) > 3.1
