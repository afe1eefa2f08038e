"""Replays dialogues through drafters, without a model: what they would have guessed of known answers.

    prompt   everything before an assistant's turn, rendered by the chat template
    target   that turn's tokens, the end-of-turn token included; the first comes from prefill, undrafted
    step     the drafter gives a tree; the guesses that the target follows are accepted, and one token more is
             emitted

Greedy verification of a model that would have written these very turns goes exactly so. `batch` dialogues
take their steps together, so that one call drafts for all of them; what a turn taught is known to the turns
that begin after it has ended.

A cold replay gives every dialogue a drafter of its own, which nothing is shared with. Otherwise the first
pass measures first trials (of each group, the dialogue that comes first) and further trials (the rest), every
later pass repeats what the drafter has seen.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from tandem_cli.bench.dataset import DatasetError, Dialogue
from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.model.conversation import Message
from tandem_core.model.tokenizer import Tokenizer
from tandem_drafting.native import Guesses

#: Calibration is reported by tenths of the predicted probability.
NUM_DECILES = 10


@dataclass(frozen=True)
class Answer:
    """One assistant's turn."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """The answers of one dialogue, and whether its group was met before it."""

    answers: tuple[Answer, ...]
    is_first_trial: bool


class ReplayDrafter(Protocol):
    """What is replayed: drafts for sequences named by numbers."""

    name: str

    def begin(self, sequence: int, prompt: Sequence[int]) -> None:
        """A sequence whose text so far is this."""

    def draft(self, sequences: Sequence[int], rooms: Sequence[int]) -> list[Guesses | None]:
        """A tree for each, no deeper than there is room."""

    def accept(self, sequence: int, emitted: Sequence[int]) -> None:
        """What the step emitted; the first call for a sequence is the token of prefill."""

    def end(self, sequence: int, target: Sequence[int]) -> None:
        """The turn is over; now it may be learned from."""


@dataclass
class Decile:
    """Guesses of one tenth of predicted probability."""

    num_guesses: int = 0
    predicted: float = 0.0
    accepted: int = 0
    #: Sum over steps of the squares of what was accepted beyond what was predicted.
    surprise_squared: float = 0.0

    def add(self, predictions: Sequence[float], num_accepted: int) -> None:
        """The guesses of one step."""
        self.num_guesses += len(predictions)
        self.predicted += sum(predictions)
        self.accepted += num_accepted
        self.surprise_squared += (num_accepted - sum(predictions)) ** 2


@dataclass(frozen=True)
class Calibration:
    """Mean prediction of some guesses, and the share of them that was accepted.

    error: standard error of that share, as if steps were independent; guesses of one step are not.
    """

    predicted: float
    accepted: float
    error: float
    num_guesses: int


@dataclass
class Figures:
    """Sums over steps."""

    steps: int = 0
    emitted: int = 0
    emitted_squared: int = 0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0
    deciles: list[Decile] = field(default_factory=lambda: [Decile() for _ in range(NUM_DECILES)])

    @property
    def mat(self) -> float:
        """Mean tokens emitted per step, the one after the accepted guesses included."""
        return self.emitted / self.steps if self.steps else 0.0

    @property
    def mat_error(self) -> float:
        """Standard error of `mat`, as if steps were independent, which they are not quite."""
        if self.steps < 2:
            return 0.0
        variance = self.emitted_squared / self.steps - self.mat**2
        return math.sqrt(max(variance, 0.0) / self.steps)

    @property
    def iteration_hit_rate(self) -> float:
        """Share of steps with at least one accepted guess."""
        return self.hits / self.steps if self.steps else 0.0

    @property
    def accepted_per_hit(self) -> float:
        """Mean accepted guesses of such steps."""
        return self.accepted / self.hits if self.hits else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Share of guesses that were accepted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def microseconds(self) -> float:
        """Mean drafting time per sequence and step."""
        return 1e6 * self.seconds / self.steps if self.steps else 0.0

    def calibration(self) -> list[Calibration]:
        """Per tenth that has guesses."""
        return [
            Calibration(
                d.predicted / d.num_guesses,
                d.accepted / d.num_guesses,
                math.sqrt(d.surprise_squared) / d.num_guesses,
                d.num_guesses,
            )
            for d in self.deciles
            if d.num_guesses
        ]

    def add(self, guesses: Guesses | None, path: Sequence[int], emitted: int) -> None:
        """One sequence's step, in which the guesses `path` (as node numbers) were accepted."""
        self.steps += 1
        self.emitted += emitted
        self.emitted_squared += emitted**2
        self.hits += bool(path)
        self.accepted += len(path)
        if guesses is None:
            return
        self.drafted += len(guesses.tree)
        accepted = set(path)
        predictions: list[list[float]] = [[] for _ in self.deciles]
        hits = [0] * NUM_DECILES
        for node, reach in enumerate(guesses.reach, start=1):
            tenth = min(int(reach * NUM_DECILES), NUM_DECILES - 1)
            predictions[tenth].append(reach)
            hits[tenth] += node in accepted
        for decile, of_step, num_accepted in zip(self.deciles, predictions, hits, strict=True):
            if of_step:
                decile.add(of_step, num_accepted)


@dataclass(frozen=True)
class PassFigures:
    """One pass over all dialogues."""

    first_trials: Figures
    further_trials: Figures
    everything: Figures


def read_conversations(folder: Path, dialogues: Iterable[Dialogue], policy: str | None) -> list[Conversation]:
    """Tokenises dialogues with the model of a folder; `policy` becomes their system prompt.

    Raises DatasetError when there is no assistant's turn to replay, or the template refuses a dialogue.
    """
    try:
        tokenizer = Tokenizer(folder)
    except ModelLoadError as error:
        raise DatasetError(str(error)) from error
    ending = tokenizer.encode(tokenizer.manifest.eos_token, add_special_tokens=False)
    conversations = []
    groups: set[str] = set()
    for dialogue in dialogues:
        messages = [Message("system", policy)] if policy else []
        answers = []
        for turn in dialogue.turns:
            if turn.role == "assistant" and messages:
                try:
                    prompt = tuple(tokenizer.encode_chat(messages))
                except InvalidRequestError as error:
                    raise DatasetError(f"dialogue {dialogue.id}: {error}") from error
                said = tokenizer.encode(turn.content, add_special_tokens=False)
                answers.append(Answer(prompt, (*said, *ending)))
            messages.append(Message(turn.role, turn.content))
        # A dialogue without a group is a group of its own.
        is_first = not dialogue.group or dialogue.group not in groups
        groups.add(dialogue.group)
        if answers:
            conversations.append(Conversation(tuple(answers), is_first))
    if not conversations:
        raise DatasetError(
            "no dialogue has an assistant's turn after another's, so there is nothing to replay"
        )
    return conversations


def replay(
    drafter: ReplayDrafter,
    conversations: Sequence[Conversation],
    batch: int = 1,
    figures: PassFigures | None = None,
) -> PassFigures:
    """One pass, added to `figures`; the drafter keeps what it has learned for the next."""
    figures = figures or PassFigures(Figures(), Figures(), Figures())
    waiting = list(reversed(conversations))
    live: dict[int, _Lane] = {}
    for number in range(batch):
        _fill(live, number, drafter, waiting)
    while live:
        lanes = list(live.values())
        rooms = [lane.room for lane in lanes]
        started = time.perf_counter()
        trees = drafter.draft([lane.number for lane in lanes], rooms)
        seconds = (time.perf_counter() - started) / len(lanes)
        for lane, guesses in zip(lanes, trees, strict=True):
            path, emitted = lane.verify(guesses)
            for total in (
                figures.everything,
                (figures.first_trials if lane.conversation.is_first_trial else figures.further_trials),
            ):
                total.add(guesses, path, emitted)
                total.seconds += seconds
            if lane.is_done:
                del live[lane.number]
                _fill(live, lane.number, drafter, waiting)
    return figures


def replay_cold(make_drafter: Callable[[], ReplayDrafter], conversations: Sequence[Conversation]) -> Figures:
    """Every dialogue with a drafter that has seen nothing yet."""
    figures = PassFigures(Figures(), Figures(), Figures())
    for conversation in conversations:
        replay(make_drafter(), [conversation], figures=figures)
    return figures.everything


def _fill(live: dict[int, _Lane], number: int, drafter: ReplayDrafter, waiting: list[Conversation]) -> None:
    """Puts the next dialogue that has anything to draft into a place of the batch."""
    while waiting:
        lane = _Lane(drafter, number, waiting.pop())
        if not lane.is_done:
            live[number] = lane
            return


class _Lane:
    """One dialogue of the batch, answer by answer."""

    def __init__(self, drafter: ReplayDrafter, number: int, conversation: Conversation) -> None:
        self.number = number
        self.conversation = conversation
        self._drafter = drafter
        self._answers = list(reversed(conversation.answers))
        self._begin()

    @property
    def room(self) -> int:
        """Deepest guess that could still be accepted."""
        return len(self._target) - self._position - 1

    @property
    def is_done(self) -> bool:
        return self._position >= len(self._target)

    def verify(self, guesses: Guesses | None) -> tuple[list[int], int]:
        """Accepts what the target follows; returns the accepted nodes and how many tokens were emitted."""
        children = guesses.tree.children() if guesses is not None else [{}]
        path: list[int] = []
        node: int | None = 0
        emitted: list[int] = []
        while node is not None and self._position + len(emitted) < len(self._target):
            token = self._target[self._position + len(emitted)]
            emitted.append(token)
            node = children[node].get(token)
            if node is not None:
                path.append(node)
        self._drafter.accept(self.number, emitted)
        self._position += len(emitted)
        if self.is_done:
            self._drafter.end(self.number, self._target)
            if self._answers:
                self._begin()
        return path, len(emitted)

    def _begin(self) -> None:
        """The next answer of which more than prefill's token is to come."""
        while self._answers:
            answer = self._answers.pop()
            self._target = answer.target
            self._position = 1
            self._drafter.begin(self.number, answer.prompt)
            self._drafter.accept(self.number, answer.target[:1])
            if not self.is_done:
                return
            self._drafter.end(self.number, answer.target)
