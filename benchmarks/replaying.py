"""Replays dialogues through drafters, without a model: which draft tokens known answers would accept.

    prompt   everything before an assistant's turn, rendered by the chat template
    target   that turn's tokens, the end-of-turn token included; the first comes from prefill, undrafted
    step     the drafter gives a tree; the draft tokens that the target follows are accepted, and one token
             more is emitted

A model that had written these turns would verify them in the same way, with greedy sampling. `batch`
dialogues take their steps together, with one drafting call for all; a drafter learns a turn when it ends.

A cold replay gives every dialogue a drafter of its own. Otherwise every pass after the first repeats known
answers.

    local    the sequence alone
    forest   the sequence and earlier answers: the drafter of decode pods
    line     the same candidates in one line: the pods' mode `chain`
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tandem_cli.bench.dataset import DatasetError, Dialogue
from tandem_core.errors import InvalidRequestError, ModelLoadError
from tandem_core.model.conversation import Message
from tandem_core.model.tokenizer import Tokenizer
from tandem_drafting.native import (
    AcceptanceModel,
    CorpusIndex,
    Guesses,
    SequenceIndex,
    SequenceInput,
    draft,
    learn,
)


@dataclass(frozen=True)
class Answer:
    """One assistant's turn."""

    prompt: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True)
class Conversation:
    """The answers of one dialogue."""

    answers: tuple[Answer, ...]


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
class Figures:
    """Sums over steps."""

    steps: int = 0
    emitted: int = 0
    emitted_squared: int = 0
    hits: int = 0
    drafted: int = 0
    accepted: int = 0
    #: Sum of the predicted probabilities of acceptance.
    predicted: float = 0.0
    seconds: float = 0.0

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

    @property
    def predicted_hit_rate(self) -> float:
        """Mean predicted probability of acceptance, to compare with `token_hit_rate`."""
        return self.predicted / self.drafted if self.drafted else 0.0

    def add(self, guesses: Guesses | None, path: Sequence[int], emitted: int) -> None:
        """One sequence's step, in which the guesses `path` (as node numbers) were accepted."""
        self.steps += 1
        self.emitted += emitted
        self.emitted_squared += emitted**2
        self.hits += bool(path)
        self.accepted += len(path)
        if guesses is not None:
            self.drafted += len(guesses.tree)
            self.predicted += sum(guesses.reach)


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
        if answers:
            conversations.append(Conversation(tuple(answers)))
    if not conversations:
        raise DatasetError(
            "no dialogue has an assistant's turn after another's, so there is nothing to replay"
        )
    return conversations


def replay(
    drafter: ReplayDrafter,
    conversations: Sequence[Conversation],
    batch: int = 1,
    figures: Figures | None = None,
) -> Figures:
    """One pass, added to `figures`; the drafter keeps what it has learned for the next."""
    figures = figures or Figures()
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
            figures.add(guesses, path, emitted)
            figures.seconds += seconds
            if lane.is_done:
                del live[lane.number]
                _fill(live, lane.number, drafter, waiting)
    return figures


def replay_cold(make_drafter: Callable[[], ReplayDrafter], conversations: Sequence[Conversation]) -> Figures:
    """Every dialogue with a drafter that has seen nothing yet."""
    figures = Figures()
    for conversation in conversations:
        replay(make_drafter(), [conversation], figures=figures)
    return figures


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


class Forest:
    """The drafter of a pod, without its draft cost: it always drafts as much as it may.

    max_chain: draft tokens in one line; 0: trees.
    """

    def __init__(self, name: str, num_nodes: int, corpus: CorpusIndex | None, *, max_chain: int = 0) -> None:
        self.name = name
        self._num_nodes = num_nodes
        self._corpus = corpus
        self._max_chain = max_chain
        self._learner = AcceptanceModel()
        self._jobs: dict[int, SequenceInput] = {}
        self._num_runs = 0

    def begin(self, sequence: int, prompt: Sequence[int]) -> None:
        text = SequenceIndex(len(prompt))
        text.extend(prompt)
        self._jobs[sequence] = SequenceInput(text, self._learner, self._corpus, max_chain=self._max_chain)

    def draft(self, sequences: Sequence[int], rooms: Sequence[int]) -> list[Guesses | None]:
        jobs = [self._jobs[sequence] for sequence in sequences]
        for job, room in zip(jobs, rooms, strict=True):
            job.room = room
        step_s = [1.0 + 1e-9 * num_guesses for num_guesses in range(self._num_nodes * len(jobs) + 1)]
        return draft(jobs, self._num_nodes, step_s)

    def accept(self, sequence: int, emitted: Sequence[int]) -> None:
        learn([self._jobs[sequence]], [emitted])

    def end(self, sequence: int, target: Sequence[int]) -> None:
        if self._corpus is not None:
            self._corpus.add(self._num_runs, target)
            self._num_runs += 1


#: Name -> a drafter, from the number of nodes, the vocabulary's size and the tokens to remember.
DRAFTERS: dict[str, Callable[[int, int, int], ReplayDrafter]] = {
    "local": lambda nodes, vocab, room: Forest("local", nodes, None),
    "forest": lambda nodes, vocab, room: Forest("forest", nodes, CorpusIndex(room, vocab)),
    "line": lambda nodes, vocab, room: Forest("line", nodes, CorpusIndex(room, vocab), max_chain=nodes),
}
