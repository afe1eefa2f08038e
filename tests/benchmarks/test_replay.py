"""`benchmarks/replay.py`: what is measured, on dialogues whose answers can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from model_folders import make_folder
from replay import ReplayConfig, main, run
from replaying import (
    DRAFTERS,
    Answer,
    Conversation,
    ReplayDrafter,
    read_conversations,
    replay,
    replay_cold,
)
from tandem_cli.bench.dataset import DatasetError, Dialogue, Turn
from tandem_drafting.native import Guesses
from tandem_engine.draft_tree import DraftTree
from toy_tokenizers import without_merges

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without weights: one token a byte."""
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer = without_merges(256 + len(special), special)
    tokenizer.add_special_tokens(special)
    return make_folder(
        tmp_path_factory.mktemp("model"),
        tokenizer,
        max_model_len=4096,
        vocab_size=260,
        eos_token="<|end|>",
        chat_template=TEMPLATE,
    )


def dialogue(name: str, group: str, *turns: tuple[str, str]) -> Dialogue:
    return Dialogue(name, group, tuple(Turn(role, content) for role, content in turns))


class Prophet:
    """Knows the next `depth` tokens of every answer, or is wrong about them."""

    name = "prophet"

    def __init__(self, answers: Sequence[Answer], depth: int, *, is_right: bool = True) -> None:
        self._answers = {answer.prompt: answer.target for answer in answers}
        self._depth = depth
        self._shift = 0 if is_right else 1
        self._at: dict[int, tuple[tuple[int, ...], int]] = {}
        self.ended: list[tuple[int, ...]] = []

    def begin(self, sequence: int, prompt: Sequence[int]) -> None:
        self._at[sequence] = self._answers[tuple(prompt)], 0

    def draft(self, sequences: Sequence[int], rooms: Sequence[int]) -> list[Guesses | None]:
        return [self._tree(sequence, room) for sequence, room in zip(sequences, rooms, strict=True)]

    def accept(self, sequence: int, emitted: Sequence[int]) -> None:
        target, position = self._at[sequence]
        assert tuple(emitted) == target[position : position + len(emitted)]
        self._at[sequence] = target, position + len(emitted)

    def end(self, sequence: int, target: Sequence[int]) -> None:
        self.ended.append(tuple(target))

    def _tree(self, sequence: int, room: int) -> Guesses | None:
        target, position = self._at[sequence]
        tokens = tuple(t + self._shift for t in target[position : position + min(self._depth, room)])
        if not tokens:
            return None
        tree = DraftTree(tokens, tuple(range(len(tokens))), ("prophet",) * len(tokens))
        return Guesses(tree, (0.95,) * len(tokens))


def conversation(*lengths: int, start: int = 0) -> Conversation:
    answers = tuple(Answer((start + n,), tuple(range(100, 100 + length))) for n, length in enumerate(lengths))
    return Conversation(answers)


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_every_token_is_emitted_once_and_counted(batch: int) -> None:
    conversations = [
        conversation(11, 1, 6), conversation(21, start=10), conversation(1, start=20)
    ]  # fmt: skip
    answers = [answer for c in conversations for answer in c.answers]
    prophet = Prophet(answers, depth=4)
    figures = replay(prophet, conversations, batch)
    # Prefill's token of each answer is not counted; steps emit 5 tokens: four guesses, and one more.
    assert figures.emitted == 10 + 5 + 20
    assert figures.steps == 2 + 1 + 4
    assert figures.mat == 5.0
    assert figures.accepted == figures.drafted == 4 * 7
    assert (figures.iteration_hit_rate, figures.token_hit_rate) == (1.0, 1.0)
    assert figures.predicted_hit_rate == pytest.approx(0.95)
    assert sorted(prophet.ended) == sorted(answer.target for answer in answers)


def test_wrong_guesses_cost_steps_and_no_token() -> None:
    conversations = [conversation(11)]
    figures = replay(Prophet(conversations[0].answers, 4, is_right=False), conversations)
    assert (figures.steps, figures.emitted, figures.hits, figures.accepted) == (10, 10, 0, 0)
    assert figures.mat == 1.0


def test_prompts_are_rendered_as_the_gateway_does(folder: Path) -> None:
    turns = (("user", "Hi"), ("assistant", "Yes?"), ("user", "A"), ("assistant", "B"))
    (read,) = read_conversations(folder, [dialogue("d", "", *turns)], "Be brief")
    texts = [(read.answers[n].prompt, read.answers[n].target) for n in range(2)]
    assert [len(target) for _, target in texts] == [len("Yes?") + 1, len("B") + 1]
    assert texts[0][1][-1] == texts[1][1][-1] == 0, "the end-of-turn token"
    # System, user and the opened turn; then the answer and another question besides.
    assert len(texts[0][0]) == (1 + len("Be brief") + 1) + (1 + 2 + 1) + 1
    assert texts[1][0][: len(texts[0][0])] == texts[0][0]
    assert texts[1][0][len(texts[0][0]) :][:5] == texts[0][1]


def test_without_an_answer_there_is_nothing_to_replay(folder: Path) -> None:
    with pytest.raises(DatasetError, match="nothing to replay"):
        read_conversations(folder, [dialogue("d", "", ("user", "Hi"))], None)


@pytest.mark.parametrize("name", sorted(DRAFTERS))
def test_every_drafter_learns_what_it_may(name: str) -> None:
    """The same answer thrice in one dialogue, then in another: found again where the drafter looks."""
    answer = tuple(range(20, 60))
    first = Conversation(tuple(Answer((1, *answer * n, 2), answer) for n in range(3)))
    second = Conversation((Answer((3, 4, 5), answer),))
    drafter: ReplayDrafter = DRAFTERS[name](16, 100, 1000)
    local = replay(drafter, [first])
    assert local.mat > 2.5
    far = replay(drafter, [second])
    if name == "local":
        assert far.mat == 1.0
    else:
        assert far.mat > 3.0


def test_cold_dialogues_know_nothing_of_each_other() -> None:
    """Two equal ones, whose answer repeats within the dialogue: the second fares as the first, alone."""
    answer = tuple(range(20, 60))
    twice = [Conversation((Answer((1,), answer), Answer((1, *answer, 2), answer)))] * 2
    cold = replay_cold(lambda: DRAFTERS["forest"](7, 100, 1000), twice)
    alone = replay(DRAFTERS["forest"](7, 100, 1000), twice[:1])
    shared = replay(DRAFTERS["forest"](7, 100, 1000), twice)
    assert (cold.steps, cold.accepted) == (2 * alone.steps, 2 * alone.accepted)
    assert shared.steps < cold.steps


def test_the_report_has_a_row_for_every_combination(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, hello!"}]
    data.write_text("".join(json.dumps({"id": n, "group": "g", "turns": turns}) + "\n" for n in range(3)))
    config = ReplayConfig(
        data=data, nodes=(4, 8), sources=("local", "forest"), passes=2, batches=(1, 3),
        policy=None, model=str(folder),
    )  # fmt: skip
    report = run(config)
    assert "3 dialogues, 3 answers of 42 tokens" in report
    rows = [line for line in report.splitlines() if line.startswith(("| local", "| forest"))]
    # Two passes; besides, each source and size is replayed cold.
    assert len(rows) == 2 * 2 * 2 * 2 + 2 * 2
    assert sum("| cold |" in row for row in rows) == 2 * 2
    with pytest.raises(DatasetError, match="'forests'; there are local"):
        run(replace(config, sources=("forests",)))


def test_the_command_takes_numbers_with_commas_and_options_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--model", str(folder), "--passes", "1", "--sources", "local,line")
    main([*common, "--nodes", "4,8", "--nodes", "12", "--batch", "1,5"])
    output = capsys.readouterr().out
    counts = [output.count(f"| {source} | {n} |") for source in ("local", "line") for n in (4, 8, 12)]
    # Cold once; then the pass of each batch.
    assert counts == [1 + 2] * 6
    main([*common, "--nodes", "4", "--output", str(tmp_path / "t.md")])
    assert "| local | 4 | 1 | pass 1 |" in (tmp_path / "t.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (("--nodes", "64"), "--nodes: '64': give whole numbers from 1 to 63"),
        (("--batch", "1;8"), "--batch: '1;8': give whole numbers"),
        (("--data", "{folder}/bad.jsonl"), "bad.jsonl:2: no JSON"),
    ],
)
def test_what_cannot_be_replayed_is_refused_in_one_sentence(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, str],
    complaint: str,
) -> None:
    (tmp_path / "bad.jsonl").write_text('{"turns": [{"role": "user", "content": "x"}]}\n{"turns"\n')
    with pytest.raises(SystemExit) as exit:
        main(["--model", str(folder), arguments[0], arguments[1].format(folder=tmp_path)])
    assert exit.value.code == 2
    assert complaint in " ".join(capsys.readouterr().err.split())
