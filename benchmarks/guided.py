"""Guided decoding: equality of tokens with drafts, speed with drafts, and the cost of a guide.

    PYTHONPATH=tests/helpers python benchmarks/guided.py --tokens 1000000 --log FILE.jsonl --out FILE.md

Three parts, on the JSON schemas of guide_schemas.py:

exactness  pieces like those of exactness.py, each request under a schema of its own, without drafts and with
           drafts from the text (local) and from shared text too (global); by a small random model with the
           tokenizer of the default one, whole or its first N tokens (--vocabulary N, several times as fast).
           Finished answers are checked by jsonschema. Each finished piece is a line of the log, behind which
           a further run continues.
speed      the default model writes answers under schemas of a customer-service bot, one request at a time and
           four, without drafts and with those of a pod without shared text. Per second of CPU time on one
           thread, so that other processes do not count; prompts are cached beforehand.
costs      time to compile each schema, and per token for the mask and for following the text.

Exit status 1: a token differs, or an answer violates its schema.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from api_schemas import BY_HAND
from exactness import (
    BATCHES,
    MODES,
    SAMPLING,
    Generator,
    Outcome,
    Piece,
    Run,
    cut_tokenizer,
    num_differing,
    outcome_of,
    read_log,
    report,
)
from guide_schemas import corpus, fault
from reporting import markdown_table, write_page
from tandem_cli.bench.dataset import load_dialogues
from tandem_core.guide import Guide, GuideKind
from tandem_core.model.guides import GuideCompiler, check_guide
from tandem_core.model.manifest import ModelManifest
from tandem_core.model.tokenizer import Tokenizer
from tandem_core.sampling import FinishReason, SamplingParams
from tandem_core.speculation import SpeculationMode
from tandem_drafting.drafter import drafter_for
from tandem_engine import model_loader
from tandem_engine.guided import SOURCE, GuideState
from tandem_engine.llm import LLM, Completion
from transformers import LlamaConfig, LlamaForCausalLM

MAX_TOKENS = 400
#: The schemas of BY_HAND that tools and extractors of a shop use.
SPEED_SCHEMAS = (
    "cancel order", "exchange items", "address", "flight search", "charge", "invoice", "pydantic order",
    "kubernetes container",
)  # fmt: skip
#: Requests at a time.
CONCURRENCY = (1, 4)


def guide_of(schema: Mapping[str, object]) -> Guide:
    return Guide(GuideKind.JSON_SCHEMA, json.dumps(schema))


def lengthened(schema: Mapping[str, object], num_items: int) -> Mapping[str, object]:
    """A list of its instances; the schema itself where its references would change their meaning."""
    if {"$schema", "$id", "$ref"} & schema.keys() or '"#"' in json.dumps(schema):
        return schema
    items = {keyword: value for keyword, value in schema.items() if keyword != "$defs"}
    return {
        "type": "array",
        "items": items,
        "minItems": num_items,
        "maxItems": num_items,
        "$defs": schema.get("$defs", {}),
    }


# -- exactness -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GuidedOutcome(Outcome):
    """A line of the log."""

    #: Accepted guesses that the guide itself drafted, by speculation mode.
    forced: dict[str, int]
    #: Answers that ended before their limit, and those of them that are no instance of their schema.
    finished: int
    invalid: int


def random_model(model_dir: Path, folder: Path, vocab_size: int) -> Path:
    """Two layers and the first tokens of the model's tokenizer. Returns `folder`."""
    manifest = ModelManifest.read(model_dir)
    vocab_size = min(vocab_size, manifest.vocab_size)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, bos_token_id=1,
        eos_token_id=manifest.eos_token_ids[0], initializer_range=0.2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "config.json").write_text(config.to_json_string())
    tokenizer = json.loads((model_dir / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").write_text(json.dumps(cut_tokenizer(tokenizer, vocab_size)), encoding="utf-8")
    dataclasses.replace(
        manifest,
        name=f"random, {vocab_size:,} tokens",
        revision="random",
        vocab_size=vocab_size,
        weights="model.safetensors",
        weight_bits=0,
    ).write(folder)
    return folder


def make_guided_piece(
    number: int, prompts: Sequence[Sequence[int]], schemas: Sequence[Mapping[str, object]]
) -> Piece:
    """The number-th piece; equal for equal numbers."""
    choices = random.Random(number)
    batch, num_requests = BATCHES[number % len(BATCHES)]
    kinds = list(SAMPLING.values())
    chosen, sampling = [], []
    for index in range(num_requests):
        text = prompts[choices.randrange(len(prompts))]
        start = choices.randrange(max(len(text) - 64, 1))
        chosen.append(tuple(text[start : start + choices.randint(16, 128)]))
        schema = lengthened(schemas[choices.randrange(len(schemas))], choices.randint(2, 6))
        own = dataclasses.replace(
            kinds[index % len(kinds)],
            max_tokens=choices.randint(MAX_TOKENS // 4, MAX_TOKENS),
            seed=choices.getrandbits(63),
            guide=guide_of(schema),
        )
        sampling.append(own)
    return Piece(batch, chosen, sampling)


def guided_outcomes(
    model_dir: Path, num_tokens: int, log: Sequence[GuidedOutcome]
) -> Iterator[GuidedOutcome]:
    """Pieces behind the logged ones, until they have `num_tokens` tokens together."""
    tokenizer, name = Tokenizer(model_dir), ModelManifest.read(model_dir).name
    generator = Generator(model_dir, threads=1)
    prompts = [tokenizer.encode(dialogue.as_text()) for dialogue in load_dialogues(None)]
    schemas = [schema for _, schema in corpus()]
    missing = num_tokens - sum(outcome.tokens for outcome in log)
    for number in itertools.count(1 + max((outcome.piece for outcome in log), default=-1)):
        if missing <= 0:
            break
        piece = make_guided_piece(number, prompts, schemas)
        plain = generator.run(piece, SpeculationMode.OFF)
        drafting = [generator.run(piece, mode) for mode in MODES]
        judged = list(judge(piece, plain, tokenizer))
        yield GuidedOutcome(
            **dataclasses.asdict(outcome_of(piece, number, name, plain, drafting)),
            forced={mode.value: run.accepted[SOURCE] for mode, run in zip(MODES, drafting, strict=True)},
            finished=len(judged),
            invalid=sum(fault != "" for fault in judged),
        )
        missing -= sum(map(len, plain.texts))


def judge(piece: Piece, run: Run, tokenizer: Tokenizer) -> Iterator[str]:
    """For each answer that ended before its limit, why it violates its schema, or ""."""
    for text, sampling in zip(run.texts, piece.sampling, strict=True):
        if sampling.guide is not None and text[-1] in tokenizer.manifest.eos_token_ids:
            found = fault(json.loads(sampling.guide.source), tokenizer.decode(text[:-1]))
            if found:
                print(f"INVALID {sampling.guide.source}: {found}", file=sys.stderr)
            yield found


# -- speed -----------------------------------------------------------------------------------------------


class Speed(NamedTuple):
    """The figures of all answers of a round."""

    tokens_per_second: float
    tokens_per_step: float
    faults: int


def prompt_of(name: str, tokenizer: Tokenizer, dialogue: str) -> list[int]:
    text = f"{dialogue[:600]}\n\nWrite the JSON for: {name}."
    return tokenizer.encode(text)


def speed_of(llm: LLM, concurrency: int, dialogues: Sequence[str], *, guided: bool, round_: int) -> Speed:
    runs: list[tuple[str, list[int], SamplingParams]] = []
    for number, name in enumerate(SPEED_SCHEMAS):
        guide = guide_of(BY_HAND[name]) if guided else None
        params = SamplingParams(
            max_tokens=160, temperature=0.7, seed=1000 * round_ + number, guide=guide, ignore_eos=not guided
        )
        runs.append(
            (name, prompt_of(name, llm.tokenizer, dialogues[(number + round_) % len(dialogues)]), params)
        )
    decode_s, tokens, steps, faults = 0.0, 0, 0, 0
    for first in range(0, len(runs), concurrency):
        group = runs[first : first + concurrency]
        prompts = [prompt for _, prompt, _ in group]
        llm.generate(prompts, SamplingParams(max_tokens=1))
        start = time.process_time()
        done = llm.generate(prompts, [params for *_, params in group])
        decode_s += time.process_time() - start
        tokens += sum(len(c.token_ids) for c in done)
        steps += sum(c.stats.decode_steps for c in done)
        if guided:
            faults += sum(is_fault(name, c) for (name, *_), c in zip(group, done, strict=True))
    return Speed(tokens / decode_s, tokens / max(steps, 1), faults)


def is_fault(name: str, completion: Completion) -> bool:
    is_cut = completion.finish_reason is FinishReason.LENGTH
    return not is_cut and fault(BY_HAND[name], completion.text) != ""


def measure_speed(model_dir: Path, num_rounds: int) -> tuple[list[list[str]], int]:
    """Rows of the table, and how many answers are no instances."""
    dialogues = [dialogue.as_text() for dialogue in load_dialogues(None)]
    modes = {"off": drafter_for("off"), "local": drafter_for("local")}
    llms = {
        name: LLM(model_dir, drafter=drafter, num_blocks=256, threads=1) for name, drafter in modes.items()
    }
    found: dict[tuple[int, str, bool], list[Speed]] = {}
    cases = [("off", False), ("off", True), ("local", True)]
    for round_, concurrency in itertools.product(range(num_rounds + 1), CONCURRENCY):
        for name, guided in cases:
            speed = speed_of(llms[name], concurrency, dialogues, guided=guided, round_=round_)
            if round_ > 0:  # the first one fills caches
                found.setdefault((concurrency, name, guided), []).append(speed)
    rows = []
    for concurrency in CONCURRENCY:
        plain = found[concurrency, "off", True]
        for name, guided in cases:
            speeds = found[concurrency, name, guided]
            ratios = [
                one.tokens_per_second / base.tokens_per_second
                for one, base in zip(speeds, plain, strict=True)
            ]
            rows.append(
                [
                    str(concurrency),
                    "yes" if guided else "no",
                    name,
                    f"{statistics.median(s.tokens_per_second for s in speeds):.0f}",
                    f"{statistics.median(s.tokens_per_step for s in speeds):.2f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                ]
            )
    return rows, sum(speed.faults for speeds in found.values() for speed in speeds)


# -- costs -----------------------------------------------------------------------------------------------


def quantiles(values: Sequence[float]) -> list[str]:
    """Median, p99 and largest, in ms."""
    ordered = sorted(values)
    chosen = (ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.99)], ordered[-1])
    return [f"{1e3 * value:.2f}" for value in chosen]


def timed(times: list[float], work: Callable[[], object]) -> None:
    start = time.perf_counter()
    work()
    times.append(time.perf_counter() - start)


def measure_costs(model_dir: Path) -> list[list[str]]:
    """Over all schemas; tokens are chosen evenly among those that the guide allows."""
    manifest = ModelManifest.read(model_dir)
    compiler = GuideCompiler(model_dir, manifest)
    check_s: list[float] = []
    compile_s: list[float] = []
    mask_s: list[float] = []
    follow_s: list[float] = []
    draft_s: list[float] = []
    for number, (_, schema) in enumerate(corpus()):
        guide = guide_of(schema)
        timed(check_s, lambda guide=guide: check_guide(guide))
        timed(compile_s, lambda guide=guide: compiler.matcher(guide))
        state = GuideState(compiler, guide)
        text: list[int] = []
        choices = random.Random(number)
        for _ in range(200):
            start = time.perf_counter()
            (mask,) = state.masks(text)
            mask_s.append(time.perf_counter() - start)
            if mask is None:
                break
            allowed = np.unpackbits(mask, count=manifest.vocab_size, bitorder="little").nonzero()[0]
            token_id = int(allowed[choices.randrange(len(allowed))])
            if token_id in manifest.eos_token_ids:
                break
            text.append(token_id)
            timed(follow_s, lambda state=state, text=text: state.follow(text))
            timed(draft_s, lambda state=state: state.draft(None, 16))
    return [
        ["check at the gateway, per schema", str(len(check_s)), *quantiles(check_s)],
        ["compile at a pod, per schema", str(len(compile_s)), *quantiles(compile_s)],
        ["mask, per token", f"{len(mask_s):,}", *quantiles(mask_s)],
        ["follow the text, per token", f"{len(follow_s):,}", *quantiles(follow_s)],
        ["forced text, per step", f"{len(draft_s):,}", *quantiles(draft_s)],
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=20_000, help="of the exactness part, without drafts")
    parser.add_argument("--vocabulary", type=int, default=1 << 30, help="of the exactness part's tokenizer")
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no further piece after this")
    parser.add_argument("--log", type=Path, required=True, help="of the exactness part")
    parser.add_argument("--rounds", type=int, default=2, help="of the speed part")
    parser.add_argument("--only-exactness", action="store_true", help="leave the page as it is")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    stop_at = time.monotonic() + options.seconds
    options.log.parent.mkdir(parents=True, exist_ok=True)
    outcomes = read_log(options.log, GuidedOutcome)
    model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
    with tempfile.TemporaryDirectory() as folder, options.log.open("a", buffering=1) as log:
        small = random_model(model_dir, Path(folder), options.vocabulary)
        for outcome in guided_outcomes(small, options.tokens, tuple(outcomes)):
            outcomes.append(outcome)
            log.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            if time.monotonic() > stop_at:
                break
    exact_table, exact_notes = report(outcomes)
    forced = {mode: sum(outcome.forced[mode] for outcome in outcomes) for mode in MODES}
    num_invalid = sum(outcome.invalid for outcome in outcomes)
    exact_notes += (
        f" The guide forces {' and '.join(f'{num:,} ({mode})' for mode, num in forced.items())} of the "
        f"accepted draft tokens. {sum(outcome.finished for outcome in outcomes):,} answers ended before "
        f"their limit; {num_invalid} of them violate their schema."
    )
    if options.only_exactness:
        print(exact_table, exact_notes, sep="\n\n")
        sys.exit(num_differing(outcomes) > 0 or num_invalid > 0)
    speed_rows, num_faults = measure_speed(model_dir, options.rounds)
    tables = [
        markdown_table(
            (
                "requests at a time",
                "guided",
                "drafts",
                "tokens per CPU s",
                "tokens per step",
                "x guided, no drafts",
            ),
            speed_rows,
        ),
        markdown_table(("cost", "measured", "median ms", "p99 ms", "largest ms"), measure_costs(model_dir)),
        exact_table,
    ]
    notes = (
        f"{len(SPEED_SCHEMAS)} schemas, medians of {options.rounds} rounds (minimum and maximum in "
        f"brackets); {num_faults} finished answers violate their schema. Costs cover all "
        f"{sum(1 for _ in corpus())} schemas.\n\n{exact_notes}"
    )
    write_page(options.out, "Guided decoding", "\n\n".join(tables), notes)
    sys.exit(num_differing(outcomes) > 0 or num_faults + num_invalid > 0)


if __name__ == "__main__":
    main()
