"""The benchmark that looks for tokens which drafts have changed: it finds them, and small runs have none."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import exactness
import pytest
from exactness import (
    Generator,
    Outcome,
    Piece,
    compare,
    count_differing,
    cut_model,
    cut_tokenizer,
    make_piece,
    read_log,
    report,
)
from tandem_core.sampling import SamplingParams
from tandem_core.speculation import SpeculationMode
from toy_models import SIZES, prompt_of

CORPUS = [prompt_of(200, start) for start in (0, 11, 23)]
ENGINE = {**SIZES, "num_blocks": 512}


@pytest.fixture(scope="module")
def generator(tiny_model: Path) -> Generator:
    return Generator(tiny_model, **ENGINE)


def test_no_token_differs_at_any_batch(generator: Generator) -> None:
    outcomes = [compare(generator, make_piece(n, CORPUS, max_tokens=48), n, "tiny") for n in range(4)]
    for outcome in outcomes:
        assert outcome.differing == {"local": 0, "global": 0}
        assert outcome.tokens == sum(outcome.modes.values()) > 100
    for mode, some in (("local", 10), ("global", 100)):
        accepted = sum(outcome.accepted[mode] for outcome in outcomes)
        drafted = sum(outcome.drafted[mode] for outcome in outcomes)
        assert some < accepted < drafted, "hardly anything was put to the test"


def test_pieces_repeat_and_differ_from_one_another() -> None:
    assert make_piece(3, CORPUS) == make_piece(3, CORPUS)
    assert make_piece(3, CORPUS) != make_piece(7, CORPUS)
    assert [make_piece(n, CORPUS).batch for n in range(4)] == [1, 4, 16, 64]
    seeds = [sampling.seed for n in range(4) for sampling in make_piece(n, CORPUS).sampling]
    assert len(set(seeds)) == len(seeds)


def test_a_changed_seed_is_seen_as_tokens_that_differ(generator: Generator) -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    prompts = tuple(tuple(prompt_of(20, start)) for start in (1, 2))
    one = Piece(2, prompts, (dataclasses.replace(sampling, seed=1), dataclasses.replace(sampling, seed=2)))
    other = Piece(2, prompts, (one.sampling[0], dataclasses.replace(sampling, seed=3)))
    texts = [generator.run(piece, SpeculationMode.OFF).texts for piece in (one, other)]
    assert texts[0][0] == texts[1][0]
    assert 0 < count_differing(*texts) <= 20


def test_a_missing_token_differs() -> None:
    assert count_differing([[1, 2, 3]], [[1, 2, 3]]) == 0
    assert count_differing([[1, 2, 3], [4]], [[1, 5], [4, 4]]) == 3


def outcome(piece: int, differing: int = 0) -> Outcome:
    modes = dict.fromkeys(exactness.SAMPLING, 25)
    return Outcome(
        "m", piece, 4, 100, modes, {"local": 7, "global": 9}, {"local": 5, "global": 6},
        {"local": 0, "global": differing},
    )  # fmt: skip


def test_the_report_adds_up_and_hides_nothing() -> None:
    table, totals = report([outcome(0), outcome(1, differing=3)])
    assert totals.startswith("200 tokens without drafts are compared with 2 runs with drafts: 3 differ.")
    assert "| m | all | global | 200 | 18 | 12 | 3 |" in table
    assert "| m | 4 | local | 200 | 14 | 10 | 0 |" in table


def test_a_logged_piece_is_read_back(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    assert read_log(log, Outcome) == []
    log.write_text(json.dumps(dataclasses.asdict(outcome(1))) + "\n")
    assert read_log(log, Outcome) == [outcome(1)]


def test_a_cut_model_keeps_the_weights_it_keeps(
    tiny_model: Path, tmp_path: Path, generator: Generator
) -> None:
    """With all its layers it writes the same text; with fewer, another."""
    piece = make_piece(1, CORPUS, max_tokens=24)
    texts = {}
    for layers in (3, 1):
        folder = tmp_path / str(layers)
        folder.mkdir()
        texts[layers] = (
            Generator(cut_model(tiny_model, layers, folder), **ENGINE).run(piece, SpeculationMode.OFF).texts
        )
    whole = generator.run(piece, SpeculationMode.OFF).texts
    assert count_differing(texts[3], whole) == 0
    assert count_differing(texts[1], whole) > 0


def test_a_cut_tokenizer_has_the_first_ids_and_what_leads_to_them() -> None:
    whole = {
        "added_tokens": [{"id": 0, "content": "<end>"}, {"id": 5, "content": "<pad>"}],
        "model": {
            "type": "BPE",
            "vocab": {"<end>": 0, "a": 1, "b": 2, "ab": 3, "abb": 4},
            "merges": ["a b", ["ab", "b"]],
        },
    }
    cut = cut_tokenizer(whole, 4)
    assert cut["added_tokens"] == whole["added_tokens"][:1]
    assert cut["model"] == {
        "type": "BPE",
        "vocab": {"<end>": 0, "a": 1, "b": 2, "ab": 3},
        "merges": [["a", "b"]],
    }
