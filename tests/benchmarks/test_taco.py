"""TACO-LLM's table: what is published stands beside what is replayed, at the same batches."""

from __future__ import annotations

from drafting_research.cost_model import CostModel
from drafting_research.drafters import Chain, Forest
from drafting_research.replaying import Answer, Conversation, replay
from drafting_research.taco import taco_table
from tandem_drafting.native import CorpusIndex


def dialogues(count: int) -> list[Conversation]:
    """Two answers each; half of an answer is the same in all of them."""
    common = tuple(range(100, 130))
    return [
        Conversation(
            tuple(Answer((n, 9, m), (*common, *range(200 + 20 * n, 215 + 20 * n))) for m in range(2)), True
        )
        for n in range(count)
    ]


def rows(table: str) -> list[list[str]]:
    lines = [line for line in table.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_batch_has_the_published_row_and_ours_for_every_pass() -> None:
    table = rows(taco_table(dialogues(8), (1, 8, 6), 1000, passes=2))
    names = [(row[0], row[1]) for row in table]
    ours = ["chain", *(name for name in ("global-chain", "line", "forest") for _ in range(2))]
    assert names == [
        ("1", "**TACO, published**"), *(("1", name) for name in ours),
        ("8", "**TACO, published**"), *(("8", name) for name in ours),
        *(("6", name) for name in ours),
    ]  # fmt: skip
    assert [row[2] for row in table[1:8]] == ["", *["pass 1", "pass 2"] * 3]
    assert table[0][3:9] == [".49 to .61", "-", "-", "-", "at most 7", "2.46"]
    assert (table[8][4], table[8][8]) == ("2.45", "2.48")


def test_speed_up_is_that_of_the_cost_model() -> None:
    conversations = dialogues(8)
    (row,) = [
        row for row in rows(taco_table(conversations, (4,), 1000, passes=1)) if row[1] == "global-chain"
    ]
    sequences = [Conversation((answer,), True) for c in conversations for answer in c.answers]
    figures = replay(Chain("x", 7, is_global=True), sequences, 4).everything
    drafted = figures.drafted / figures.steps
    assert (row[5], row[6], row[7]) == (
        f"{figures.token_hit_rate:.3f}", f"{figures.mat:.3f}", f"{drafted:.2f}"
    )  # fmt: skip
    assert row[8] == f"{CostModel(4, 3 + 45 / 2).speed_up(figures.mat, drafted):.2f}"


def test_a_line_is_a_line_and_a_price_shortens_it() -> None:
    """The same text drafted by lines: free, and at a price that no guess is worth."""
    conversations = dialogues(6)
    free = Forest("line", 7, CorpusIndex(2000, 1000), max_chain=7)
    costly = Forest(
        "line", 7, CorpusIndex(2000, 1000), max_chain=7, price=lambda n: [1.0 + q for q in range(7 * n + 1)]
    )
    got = replay(free, conversations).everything
    assert got.mat > 2
    assert got.drafted <= 7 * got.steps
    assert replay(costly, conversations).everything.drafted == 0
    sequence = 5
    free.begin(sequence, (1, 2))
    free.accept(sequence, tuple(range(100, 104)))
    (guesses,) = free.draft([sequence], [20])
    assert guesses is not None
    assert guesses.tree.parents == tuple(range(len(guesses.tree)))
