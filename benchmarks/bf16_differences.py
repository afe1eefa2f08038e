"""How often, where and why greedy texts differ in bfloat16.

    python benchmarks/bf16_differences.py --out benchmarks/results/NAME.md

Compares, prompt by prompt, greedy texts of one model: float32 beside bfloat16, and bfloat16 with itself
under another batch, another chunk size and speculation. In exact arithmetic all would be equal. Between
dtypes every operation rounds differently. Within bfloat16 only torch's products do, which sum in another
order when the number of rows changes; they are used where there are no compiled kernels (TANDEM_NATIVE=off).
Where the two most likely tokens are closer than the rounding, the text takes the other turn. The gap column
tells: the difference of the two best log probabilities where two texts part, beside its usual size.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues
from tandem_core.sampling import SamplingParams
from tandem_drafting.drafter import drafter_for
from tandem_engine import model_loader
from tandem_engine.llm import LLM, Completion

OUTPUT_TOKENS = 64


@dataclass(frozen=True)
class Run:
    name: str
    dtype: str
    batch: int
    chunk_size: int
    speculation: str


RUNS = (
    Run("float32, alone", "float32", 1, 512, "off"),
    Run("bfloat16, alone", "bfloat16", 1, 512, "off"),
    Run("bfloat16, batch of 4", "bfloat16", 4, 512, "off"),
    Run("bfloat16, chunks of 64", "bfloat16", 1, 64, "off"),
    Run("bfloat16, speculation", "bfloat16", 1, 512, "local"),
    Run("float32, speculation, batch of 4", "float32", 4, 512, "local"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
    dialogues = load_dialogues(options.dataset) if options.dataset else sample_dialogues()
    texts = {run: _generate(model_dir, run, dialogues, options) for run in RUNS}
    rows = [
        _compare(texts[a], texts[b], f"{a.name} | {b.name}")
        for a, b in ((RUNS[i], RUNS[j]) for i, j in ((0, 1), (1, 2), (1, 3), (1, 4), (0, 5)))
    ]
    lines = [
        f"Command: `python benchmarks/bf16_differences.py --prompts {options.prompts} "
        f"--prompt-tokens {options.prompt_tokens} "
        f"{f'--dataset {options.dataset.name} ' if options.dataset else ''}--out {options.out.name}`  ",
        f"{options.prompts} prompts of {options.prompt_tokens} tokens, {OUTPUT_TOKENS} greedy tokens each, "
        f"medians; torch {torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}.",
        "",
        "| one | other | texts that differ | tokens before parting | gap there | usual gap |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def _generate(
    model_dir: Path, run: Run, dialogues: Sequence, options: argparse.Namespace
) -> list[Completion]:
    llm = LLM(
        model_dir,
        dtype=run.dtype,
        chunk_size=run.chunk_size,
        drafter=drafter_for(run.speculation),
        num_blocks=128,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True, logprobs=2)
    prompts = [
        llm.tokenizer.encode(f"Ticket {i}.\n" + dialogues[i % len(dialogues)].as_text())[
            : options.prompt_tokens
        ]
        for i in range(options.prompts)
    ]
    print(run.name, flush=True)
    return [
        completion
        for i in range(0, len(prompts), run.batch)
        for completion in llm.generate(prompts[i : i + run.batch], sampling)
    ]


def _compare(one: Sequence[Completion], other: Sequence[Completion], names: str) -> str:
    partings, gaps = [], []
    usual = [_gap(c, i) for c in one for i in range(OUTPUT_TOKENS)]
    for a, b in zip(one, other, strict=True):
        for i, (x, y) in enumerate(zip(a.token_ids, b.token_ids, strict=True)):
            if x != y:
                partings.append(i)
                gaps.append(_gap(a, i))
                break
    share = f"{len(partings)} of {len(one)}"
    if not partings:
        return f"| {names} | {share} | - | - | {statistics.median(usual):.2f} |"
    return (
        f"| {names} | {share} | {statistics.median(partings):.0f} "
        f"| {statistics.median(gaps):.4f} | {statistics.median(usual):.2f} |"
    )


def _gap(completion: Completion, position: int) -> float:
    best, second = completion.logprobs[position].top
    return best[1] - second[1]


if __name__ == "__main__":
    main()
