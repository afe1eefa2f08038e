"""Proves that a type's modules give transformers' text through the engine: small random models, greedy.

The texts of transformers' eager mode, which computes all tokens anew for each next one, are compared with the
engine's: three sequences in chunks, with drafts, with prefix hits, and preempted in a pool that is too small.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
from free_drafts import FreeDrafts
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import Drafter, drafter_for
from tandem_engine import model_loader
from tandem_engine.llm import LLM, Completion
from tandem_engine.models.executors import Executor
from tandem_engine.models.modules import ModulesDecoder
from tiny_decoders import VOCAB, tiny_model
from toy_models import SIZES, save_checkpoint
from transformers import AutoModelForCausalLM, PreTrainedModel

NUM_TOKENS = 20
_GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
#: Log probabilities of the best two tokens that are this close are a tie in float32.
_TIE = 1e-4


def prompts() -> list[list[int]]:
    """The first two are repetitive, so that drafts find something."""
    repeated = [[3 + (start + i * i) % 37 for i in range(length)] for start, length in ((0, 47), (5, 29))]
    generator = torch.Generator().manual_seed(4)
    return [*repeated, torch.randint(3, VOCAB, (33,), generator=generator).tolist()]


@torch.inference_mode()
def eager_texts(model: PreTrainedModel) -> list[list[int]]:
    texts = []
    for prompt in prompts():
        ids = list(prompt)
        for _ in range(NUM_TOKENS):
            at = torch.arange(len(ids))[None]
            logits = model(input_ids=torch.tensor([ids]), position_ids=at, use_cache=False).logits
            ids.append(int(logits[0, -1].argmax()))
        texts.append(ids[len(prompt) :])
    return texts


def pulled(model: PreTrainedModel, folder: Path) -> Path:
    """The model folder of a checkpoint that is saved below `folder`."""
    checkpoint = folder / str(model.config.model_type)
    save_checkpoint(model, checkpoint)
    with mock.patch.dict(os.environ, {"TANDEM_HOME": str(folder / "home")}):
        return model_loader.pull(str(checkpoint))


@contextmanager
def only_modules() -> Iterator[None]:
    """Types with a native family are computed by transformers' modules too."""
    with (
        mock.patch("tandem_engine.model_loader.pull.executor_of", return_value=Executor.TRANSFORMERS),
        mock.patch("tandem_engine.model_loader.loading.executor_of", return_value=Executor.TRANSFORMERS),
    ):
        yield


@dataclass(frozen=True)
class Proof:
    """What was seen while the texts were compared."""

    is_recurrent: bool
    takes_drafts: bool
    num_drafted: int
    num_preemptions: int


def prove(model_type: str, folder: Path) -> Proof:
    """Raises AssertionError, or ModelLoadError for what is refused."""
    path = pulled(tiny_model(model_type), folder)
    # As transformers loads it: some types then get zeros for the padding token's embedding.
    want = eager_texts(
        AutoModelForCausalLM.from_pretrained(
            folder / model_type, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    )
    sizes = SIZES | {"chunk_size": 16}
    drafter = drafter_for("local")
    assert isinstance(drafter, Drafter)
    drafter.step_cost = FreeDrafts()
    llm = LLM(path, drafter=drafter, **sizes)
    decoder = llm.engine._runner.decoder
    assert isinstance(decoder, ModulesDecoder)
    assert decoder.difference <= 1e-4, f"logits differ by {decoder.difference:.1e}"
    drafted = llm.generate(prompts(), _GREEDY)
    _assert_same(drafted, want, "with drafts")
    again = llm.generate(prompts(), _GREEDY)
    _assert_same(again, want, "with prefix hits")
    assert any(c.stats.cached_tokens for c in again) is not decoder.is_recurrent
    preempted = LLM(path, **sizes | {"num_blocks": 7}).generate(prompts(), _GREEDY)
    _assert_same(preempted, want, "preempted, without drafts")
    return Proof(
        decoder.is_recurrent,
        decoder.takes_drafts,
        sum(c.stats.drafted_tokens for c in drafted),
        sum(c.stats.preemptions for c in preempted),
    )


def _assert_same(got: Sequence[Completion], want: Sequence[Sequence[int]], what: str) -> None:
    """Equal token for token, up to the first tie."""
    for n, (completion, expected) in enumerate(zip(got, want, strict=True)):
        for position, (token, wanted) in enumerate(zip(completion.token_ids, expected, strict=True)):
            if token != wanted:
                top = completion.logprobs[position].top
                gap = top[0][1] - top[1][1]
                assert gap < _TIE, f"{what}: prompt {n} differs at token {position}: {token} != {wanted}"
                break
