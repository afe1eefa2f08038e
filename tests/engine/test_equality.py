"""The engine's text is the model's text: equal to transformers' greedy, token for token, in fp32, and the
same however it was computed (speculation, prefix cache, chunk size, batch, preemption).

Twenty prompts from 30 to 4,000 tokens, 64 tokens each. A difference fails unless the two tokens' logits
are closer than float32 arithmetic can tell apart, and then it is reported; see `assert_same`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tandem_core.model.chat_template import Message
from tandem_core.model.manifest import ModelManifest
from tandem_core.sampling import SamplingParams
from tandem_drafting import native
from tandem_drafting.drafter import drafter_for
from tandem_engine.llm import LLM, Completion

NUM_TOKENS = 64
QUESTIONS = (
    "Where is my order? It was to arrive last Tuesday.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a linked list.",
    "List five uses of a paperclip.",
    "Übersetze ins Deutsche: The parcel was damaged on arrival.",
    "What is 17 * 23? Show the steps.",
    "Write a haiku about rain on a tin roof.",
    "Repeat this exactly three times: order #W4923227 is pending.",
)
#: Characters of dialogue prompts; about four to a token. The last ones come to 4,000 tokens.
PROMPT_CHARS = (600, 900, 1200, 1600, 2000, 2500, 3000, 4000, 5000, 6000, 10_000, 15_500)
MAX_PROMPT_TOKENS = 4000


def make_llm(model_dir: Path, speculation: str = "local", **options: object) -> LLM:
    options["drafter"] = drafter_for(speculation)
    return LLM(model_dir, **{"dtype": "float32", "num_blocks": 400, **options})


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return make_llm(model_dir)


@pytest.fixture(scope="module")
def prompts(llm: LLM, corpus) -> tuple[tuple[int, ...], ...]:
    asked = [tuple(llm.tokenizer.encode_chat([Message("user", q)])) for q in QUESTIONS]
    told = [
        tuple(llm.tokenizer.encode(corpus.prompt(i, n))[:MAX_PROMPT_TOKENS])
        for i, n in enumerate(PROMPT_CHARS)
    ]
    return (*asked, *told)


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)


def tokens_of(llm: LLM, prompts: Sequence[Sequence[int]], sampling: SamplingParams, *, alone: bool = False):
    groups = [[p] for p in prompts] if alone else [prompts]
    completions = [c for group in groups for c in llm.generate(group, sampling)]
    assert llm.engine.scheduler.check() == []
    return completions


@pytest.fixture(scope="module")
def baseline(model_dir: Path, prompts) -> list[Completion]:
    """Every prompt in batches of 8, in chunks of 512, with drafts from the own text."""
    llm = make_llm(model_dir)
    return [c for i in range(0, len(prompts), 8) for c in tokens_of(llm, prompts[i : i + 8], GREEDY)]


@pytest.fixture(scope="module")
def reference(baseline: list[Completion]) -> list[list[int]]:
    return [completion.token_ids for completion in baseline]


@pytest.fixture(scope="module")
def transformers_model(model_dir: Path):
    """transformers' own reading of the same source file, in fp32."""
    from transformers import AutoModelForCausalLM, GgufConfig

    weights = model_dir / ModelManifest.read(model_dir).weights
    model = AutoModelForCausalLM.from_pretrained(
        weights.parent,
        gguf_file=weights.name,
        dtype=torch.float32,
        # Or they would be unpacked again at every step of `generate`.
        quantization_config=GgufConfig(dequantize=True),
    )
    model.generation_config.eos_token_id = None  # all NUM_TOKENS tokens, as ignore_eos does
    return model.eval()


def assert_same(got, want: Sequence[Sequence[int]], what: str) -> None:
    """Token for token. A tie within float32's reach (1e-4 in log probability) may go either way; from
    there on the two texts are of different prefixes, and the comparison of that text ends."""
    ties = []
    for i, (completion, expected) in enumerate(zip(got, want, strict=True)):
        for position, (a, b) in enumerate(zip(completion.token_ids, expected, strict=True)):
            if a == b:
                continue
            top = completion.logprobs[position].top
            gap = top[0][1] - top[1][1]
            assert gap < 1e-4, f"{what}: prompt {i} differs at token {position}: {a} != {b}, gap {gap:.2e}"
            ties.append((i, position, gap))
            break
    assert len(ties) <= 1, f"{what}: more near-ties than chance allows: {ties}"


@torch.inference_mode()
def test_equals_transformers_greedy(baseline: list[Completion], prompts, transformers_model) -> None:
    """Given our text as the prefix, transformers' most likely next token is ours at each of the 64 places.
    By induction over the places that is its own greedy text, at the price of one pass a prompt."""
    assert len(prompts) >= 20
    assert max(map(len, prompts)) > 3500
    predicted = []
    for prompt, completion in zip(prompts, baseline, strict=True):
        ids = torch.tensor([[*prompt, *completion.token_ids]])
        logits = transformers_model(ids, logits_to_keep=NUM_TOKENS + 1).logits[0, :-1]
        predicted.append(logits.argmax(-1).tolist())
    assert_same(baseline, predicted, "transformers")
    if native.LIBRARY is not None:
        assert sum(c.stats.accepted_tokens for c in baseline) > 0, "nothing was speculated"


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_equals_what_transformers_generates(baseline: list[Completion], prompts, transformers_model) -> None:
    """The same without the induction: `generate`, token by token over its own cache."""
    texts = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = transformers_model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_TOKENS, do_sample=False
        )
        texts.append(out[0, len(prompt) :].tolist())
    assert_same(baseline, texts, "transformers' generate")


@pytest.mark.parametrize("chunk_size", [64, 512])
@pytest.mark.parametrize("speculation", ["off", "local"])
def test_speculation_and_chunk_size_change_nothing(
    model_dir: Path, prompts, reference: list[list[int]], chunk_size: int, speculation: str
) -> None:
    llm = make_llm(model_dir, chunk_size=chunk_size, speculation=speculation)
    chosen = (6, 9, 13, 16, 19)
    got = tokens_of(llm, [prompts[i] for i in chosen], GREEDY)
    assert_same(got, [reference[i] for i in chosen], f"chunk {chunk_size}, speculation {speculation}")


def test_hot_prefix_cache_and_being_alone_change_nothing(
    model_dir: Path, prompts, reference: list[list[int]]
) -> None:
    llm = make_llm(model_dir)
    chosen = (7, 10, 14, 17, 19)
    cold = tokens_of(llm, [prompts[i] for i in chosen], GREEDY, alone=True)
    hot = tokens_of(llm, [prompts[i] for i in chosen], GREEDY, alone=True)
    assert_same(cold, [reference[i] for i in chosen], "alone, cold")
    assert_same(hot, [reference[i] for i in chosen], "alone, hot")
    assert all(c.stats.cached_tokens >= 64 for c in hot if c.stats.prompt_tokens > 128)


def test_preemption_changes_nothing(model_dir: Path, prompts, reference: list[list[int]]) -> None:
    """A pool too small for all: sequences are preempted and their KV computed again."""
    llm = make_llm(model_dir, num_blocks=30, block_size=16)
    subset = slice(0, 8)
    got = tokens_of(llm, prompts[subset], GREEDY)
    assert_same(got, reference[subset], "preempted")
    assert sum(c.stats.preemptions for c in got) > 0, "nobody was preempted"


def test_seeded_sampling_is_the_same_with_and_without_drafts_in_any_batch(
    model_dir: Path, prompts: tuple[tuple[int, ...], ...]
) -> None:
    subset = prompts[:10]
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.95, seed=1000 + i, max_tokens=NUM_TOKENS, ignore_eos=True)
        for i in range(len(subset))
    ]
    plain = make_llm(model_dir, speculation="off")
    want = [plain.generate([p], s)[0].token_ids for p, s in zip(subset, sampling, strict=True)]
    drafted = make_llm(model_dir).generate(subset, sampling)
    again = plain.generate(subset, sampling)
    different = [i for i, (a, b) in enumerate(zip(drafted, want, strict=True)) if a.token_ids != b]
    assert different == [], "speculation or batching changed sampled text"
    assert [c.token_ids for c in again] == want
    assert len({tuple(w) for w in want}) == len(want)
