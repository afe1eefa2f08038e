"""`tandem generate`: runs the engine alone in this process, without pods."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


class PromptError(Exception):
    """The prompt or a sampling parameter cannot be used; one sentence with the remedy."""


@dataclass(frozen=True)
class GenerateOptions:
    model_dir: Path
    dtype: str
    quantization: str
    #: Whether the model's chat template is applied to the prompt as a user's message.
    as_chat: bool
    temperature: float
    max_tokens: int
    seed: int
    speculation: str


def run(options: GenerateOptions, prompt: str) -> None:
    """Write the answer to stdout as it grows. Raises PromptError."""
    from tandem_core.errors import TandemError
    from tandem_core.model.chat_template import Message
    from tandem_core.sampling import SamplingParams
    from tandem_drafting.drafter import drafter_for
    from tandem_engine.llm import LLM

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise PromptError("the prompt is empty; give some text")
    try:
        sampling = SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
        )
        llm = LLM(
            options.model_dir,
            drafter=drafter_for(options.speculation),
            dtype=options.dtype,
            quantization=options.quantization,
        )
        tokens = llm.tokenizer
        prompt_ids = tokens.encode_chat([Message("user", text)]) if options.as_chat else tokens.encode(text)
        for piece in llm.stream(prompt_ids, sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except TandemError as error:
        raise PromptError(str(error)) from error
    sys.stdout.write("\n")
