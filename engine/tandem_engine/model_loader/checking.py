"""Compares a model's executor with transformers' eager mode, on the user's own file: `tandem model check`.

Both compute in float32 from the same checkpoint, one after the other; quantized weights are dequantized. They
agree if log probabilities differ by at most _TOLERANCE and the greedy tokens are equal, but for a near tie.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from tandem_core.errors import ModelLoadError
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import SamplingParams
from torch import Tensor

from tandem_engine.llm import LLM
from tandem_engine.model_loader.modules_loading import eager_model

NUM_TOKENS = 20
#: Largest difference of log probabilities; float32 errors of deep models are a tenth of it.
_TOLERANCE = 1e-2
#: Likeliest tokens that are compared at each position.
_NUM_TOP = 5
_MAX_PROMPT_TOKENS = 256
_BLOCK_SIZE = 16


@dataclass(frozen=True)
class CheckResult:
    executor: str
    reference: str
    num_prompt_tokens: int
    #: Largest difference of the log probabilities of the five likeliest tokens.
    difference: float
    text: str
    reference_text: str
    #: Index of the first token that differs; None: all are equal.
    first_difference: int | None
    #: Whether the reference takes both tokens there for equally likely.
    is_tie: bool

    @property
    def agrees(self) -> bool:
        return self.difference <= _TOLERANCE and (self.first_difference is None or self.is_tie)


def check(folder: Path, prompt: str) -> CheckResult:
    """Continues `prompt` with both. Raises ModelLoadError."""
    tokenizer = Tokenizer(folder)
    ids = tokenizer.encode(prompt)[:_MAX_PROMPT_TOKENS]
    if not ids:
        raise ModelLoadError("the prompt has no tokens; give a longer one")
    expected, likely = _eager(folder, ids)
    num_blocks = -(-(len(ids) + NUM_TOKENS) // _BLOCK_SIZE) + 2
    llm = LLM(folder, dtype="float32", num_blocks=num_blocks, block_size=_BLOCK_SIZE, max_batch=1)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=_NUM_TOP)
    found = llm.generate([ids], sampling)[0]
    difference, first = 0.0, None
    for n, (token, wanted) in enumerate(zip(found.token_ids, expected, strict=True)):
        for token_id, value in found.logprobs[n].top:
            difference = max(difference, abs(value - float(likely[n][token_id])))
        if token != wanted:
            first = n
            break
    is_tie = False
    if first is not None:
        gap = likely[first][expected[first]] - likely[first][found.token_ids[first]]
        is_tie = float(gap) <= _TOLERANCE
    return CheckResult(
        llm.engine.executor,
        f"transformers {version('transformers')}, eager",
        len(ids),
        difference,
        tokenizer.decode(found.token_ids),
        tokenizer.decode(expected),
        first,
        is_tie,
    )


@torch.inference_mode()
def _eager(folder: Path, prompt: list[int]) -> tuple[list[int], list[Tensor]]:
    """Greedy tokens, each from a pass over all before it, and the log probabilities [V] of each."""
    model = eager_model(folder, torch.float32)
    ids, likely = list(prompt), []
    for _ in range(NUM_TOKENS):
        positions = torch.arange(len(ids))[None]
        logits = model(input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False).logits
        likely.append(logits[0, -1].float().log_softmax(0))
        ids.append(int(likely[-1].argmax()))
    return ids[len(prompt) :], likely
