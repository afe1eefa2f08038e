"""transformers' `generate`, greedy, on the GGUF file unpacked to one dtype.

    python -m peers.transformers MODEL.gguf --dtype bfloat16 [--drafts]

Requests that come together are one padded batch. With prompt lookup, its speculation without a second
model, it takes one request at a time, so there they queue. It cannot take a request while others run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
import transformers

from peers.protocol import Answer, Job, Stream, Together, serve, take_stdout


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), required=True)
    parser.add_argument("--drafts", action="store_true")
    options = parser.parse_args()
    replies = take_stdout()
    model = load(options.model, getattr(torch, options.dtype))

    def handle(job: Job) -> Answer:
        if not isinstance(job, Together):
            raise ValueError("generate() takes no request while another runs")
        epoch = time.perf_counter()
        if not options.drafts:
            return Answer(_generate(model, job.prompts, job.max_tokens, epoch))
        return Answer(
            [
                stream
                for prompt in job.prompts
                for stream in _generate(model, [prompt], job.max_tokens, epoch, prompt_lookup_num_tokens=10)
            ]
        )

    serve(
        f"transformers {transformers.__version__}, torch {torch.__version__}, {options.dtype}",
        handle,
        replies,
    )


def load(gguf: Path, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """The model with plain weights, as Tandem computes with; unpacking at each step would be slower."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=dtype,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def _generate(
    model: transformers.PreTrainedModel,
    prompts: list[list[int]],
    max_tokens: int,
    epoch: float,
    **options: object,
) -> list[Stream]:
    """All streams of a batch look alike. They count as sent at the epoch, also when they had to queue."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    clock = _Clock(epoch)
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        streamer=clock,
        pad_token_id=0,
        **options,
    )
    # The first arrival is the prompt.
    stream = Stream(0.0, clock.times_s[1:], clock.counts[1:], decode_steps=len(clock.counts) - 2)
    return [stream] * len(prompts)


class _Clock(transformers.generation.BaseStreamer):
    """Notes when tokens come, and how many of one sequence."""

    def __init__(self, epoch: float) -> None:
        self.times_s: list[float] = []
        self.counts: list[int] = []
        self._epoch = epoch

    def put(self, value: torch.Tensor) -> None:
        self.times_s.append(time.perf_counter() - self._epoch)
        self.counts.append(value.shape[-1] if value.ndim > 1 else 1)

    def end(self) -> None:
        pass


if __name__ == "__main__":
    main()
