"""TACO-LLM's table of linear drafts, with our figures on the replayed dialogues beside the published ones.

TACO (72B, customer service) drafts lines of 7 from a local and a global lookahead cache. It publishes, for
batches of 1 to 128, end-to-end speed-ups; iteration hit rates of .49 to .61 over all batches; and accepted
guesses per hit, the bonus token left out, for batches of 8 and 128. Its model, text and hardware are others
than ours: the two sides of the table say how good drafts of this kind are, not who would win on one text.

    chain, global-chain    the longest match, copied, 7 guesses whatever they cost
    line                   our candidates in one line of at most 7, no longer than pays on the modelled GPU
    forest                 our trees of at most 16, likewise

Every answer is a sequence of its own here, or there would be fewer sequences than the largest batch holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from reporting import markdown_table
from tandem_drafting.native import CorpusIndex

from drafting_research.cost_model import H200, LLAMA_8B, CostModel
from drafting_research.drafters import Chain, Forest
from drafting_research.replaying import Conversation, Figures, ReplayDrafter, replay

LINE = 7
TREE = 16


@dataclass(frozen=True)
class Published:
    """None: not told for this batch."""

    accepted_per_hit: float | None
    speed_up: float


PUBLISHED = {
    1: Published(None, 2.46),
    8: Published(2.45, 2.48),
    16: Published(None, 1.95),
    32: Published(None, 1.92),
    64: Published(None, 1.88),
    128: Published(1.08, 1.83),
}
PUBLISHED_HIT_RATES = ".49 to .61"

_HEAD = (
    "batch", "drafts", "seen", "iteration hit rate", "accepted per hit", "token hit rate", "MAT",
    "guesses per step", "speed-up", "drafting counted",
)  # fmt: skip


def taco_table(
    conversations: Sequence[Conversation], batches: Sequence[int], vocab_size: int, passes: int
) -> str:
    """The table as Markdown, its assumptions above it."""
    sequences = [
        Conversation((answer,), conversation.is_first_trial)
        for conversation in conversations
        for answer in conversation.answers
    ]
    context = sum(len(s.answers[0].prompt) + len(s.answers[0].target) / 2 for s in sequences) / len(sequences)
    room = passes * sum(len(s.answers[0].target) + 1 for s in sequences) + 1
    # Knows of no other sequence, so neither batch nor pass makes a difference.
    chain = replay(Chain("chain", LINE, is_global=False), sequences).everything
    rows = []
    for batch in batches:
        if batch in PUBLISHED:
            rows.append(_published_cells(batch, PUBLISHED[batch]))
        model = CostModel(batch, context)
        rows.append([str(batch), "chain", "", *_cells(chain, model)])
        for make in _drafters(context, vocab_size, room):
            drafter = make()
            for number in range(1, passes + 1):
                figures = replay(drafter, sequences, batch).everything
                rows.append([str(batch), drafter.name, f"pass {number}", *_cells(figures, model)])
    return "\n".join(
        [
            "TACO-LLM's table. Speed-up, of TACO: end to end, as published; ours: of decoding, modelled for "
            f"one {H200.name} ({H200.bytes_per_s / 1e12:g} TB/s, {H200.operations_per_s / 1e12:.0f} TFLOP/s) "
            f"with {LLAMA_8B.name}, {context:.0f} tokens of context: MAT x T(batch) / T(rows), "
            "T = max(memory, products) as in cost_model.py. Drafting counted: with the drafting time "
            "measured here, as if the GPU waited for it; chain and global-chain are Python, whose time says "
            "nothing. Line and forest draft what pays on the modelled GPU.",
            "",
            markdown_table(_HEAD, rows),
        ]
    )


def _drafters(context: float, vocab_size: int, room: int) -> list[Callable[[], ReplayDrafter]]:
    def price_of(max_guesses: int) -> Callable[[int], Sequence[float]]:
        return cache(
            lambda num_sequences: CostModel(num_sequences, context).price(max_guesses * num_sequences)
        )

    return [
        lambda: Chain("global-chain", LINE, is_global=True),
        lambda: Forest("line", LINE, CorpusIndex(room, vocab_size), max_chain=LINE, price=price_of(LINE)),
        lambda: Forest("forest", TREE, CorpusIndex(room, vocab_size), price=price_of(TREE)),
    ]


def _published_cells(batch: int, published: Published) -> list[str]:
    per_hit = "-" if published.accepted_per_hit is None else f"{published.accepted_per_hit:.2f}"
    head = [str(batch), "**TACO, published**", "", PUBLISHED_HIT_RATES, per_hit]
    return [*head, "-", "-", f"at most {LINE}", f"{published.speed_up:.2f}", "-"]


def _cells(figures: Figures, model: CostModel) -> list[str]:
    drafted = figures.drafted / figures.steps
    seconds = figures.seconds / figures.steps
    return [
        f"{figures.iteration_hit_rate:.3f}",
        f"{figures.accepted_per_hit:.2f}",
        f"{figures.token_hit_rate:.3f}",
        f"{figures.mat:.3f}",
        f"{drafted:.2f}",
        f"{model.speed_up(figures.mat, drafted):.2f}",
        f"{model.speed_up(figures.mat, drafted, seconds):.2f}",
    ]
