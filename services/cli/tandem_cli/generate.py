"""`tandem generate`: the engine alone in this process, the yardstick for everything distributed."""

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
    from tandem_core.sampling import SamplingParams
    from tandem_drafting.drafter import drafter_for
    from tandem_engine.llm import LLM
    from tandem_gateway import errors as gateway_errors
    from tandem_gateway.model import ModelFolderError, ServedModel
    from tandem_gateway.request import Message

    text = sys.stdin.read() if prompt == "-" else prompt
    if not text.strip():
        raise PromptError("the prompt is empty; give some text")
    try:
        sampling = SamplingParams(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=options.seed
        )
        # The gateway's own code makes the prompt, so that the engine computes what it would over the wire.
        model = ServedModel.load(options.model_dir)
        prompt_ids = (
            model.encode_chat([Message("user", text)]) if options.as_chat else model.encode_text(text)
        )
        llm = LLM(
            options.model_dir,
            drafter=drafter_for(options.speculation),
            dtype=options.dtype,
            quantization=options.quantization,
        )
        for piece in llm.stream(list(prompt_ids), sampling):
            sys.stdout.write(piece)
            sys.stdout.flush()
    except (TandemError, ModelFolderError, gateway_errors.InvalidRequestError) as error:
        raise PromptError(str(error)) from error
    sys.stdout.write("\n")
