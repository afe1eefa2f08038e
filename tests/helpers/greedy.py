"""Prompts of many lengths, greedy sampling, and the comparison of two greedy texts of one model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tandem_core.model.conversation import Message
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine.llm import LLM, Completion

NUM_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
#: Characters of the dialogue prompts; about four to a token.
SHORT_CHARS = (600, 1200, 2000, 4000)
#: The last ones come to 4,000 tokens.
ALL_CHARS = (600, 900, 1200, 1600, 2000, 2500, 3000, 4000, 5000, 6000, 10_000, 15_500)
_MAX_PROMPT_TOKENS = 4000
_QUESTIONS = (
    "Where is my order? It was to arrive last Tuesday.",
    "Explain in two sentences why the sky is blue.",
    "Write a Python function that reverses a linked list.",
    "List five uses of a paperclip.",
    "Übersetze ins Deutsche: The parcel was damaged on arrival.",
    "What is 17 * 23? Show the steps.",
    "Write a haiku about rain on a tin roof.",
    "Repeat this exactly three times: order #W4923227 is pending.",
)

Prompts = tuple[tuple[int, ...], ...]


def make_llm(model_dir: Path, speculation: str = "local", **options: object) -> LLM:
    """The model in float32, where greedy texts can be compared token for token."""
    options["drafter"] = drafter_for(speculation)
    return LLM(model_dir, **{"dtype": "float32", "num_blocks": 400, **options})


def make_prompts(llm: LLM, corpus, dialogue_chars: Sequence[int]) -> Prompts:
    """Eight questions of about 40 tokens, then one dialogue per entry of dialogue_chars."""
    questions = [llm.tokenizer.encode_chat([Message("user", question)]) for question in _QUESTIONS]
    dialogues = [
        llm.tokenizer.encode(corpus.prompt(i, num_chars))[:_MAX_PROMPT_TOKENS]
        for i, num_chars in enumerate(dialogue_chars)
    ]
    return tuple(map(tuple, [*questions, *dialogues]))


def generate(llm: LLM, prompts: Prompts, *, batch_size: int = 8) -> list[Completion]:
    """Greedy completions, batch after batch; afterwards the scheduler must be consistent."""
    completions = []
    for begin in range(0, len(prompts), batch_size):
        completions += llm.generate(prompts[begin : begin + batch_size], GREEDY)
    assert llm.engine.scheduler.check() == []
    return completions


def assert_same(got: Sequence[Completion], want: Sequence[Sequence[int]], what: str) -> None:
    """Equal token for token.

    Two tokens whose log probabilities are within 1e-4 are a tie in float32. The comparison of a text ends at
    its first tie, because the prefixes differ from there on. More than one tie fails.
    """
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
