"""Which model tells best whether a candidate will be accepted: forest, boosting, counting or mixing.

    pip install scikit-learn
    python benchmarks/acceptance_models.py --dataset DIALOGUES.jsonl --policy POLICY.md --out FILE.md

All of them are fitted to the first half of the dialogues and then draft the answers of the second half, from
the same candidates: what has followed the last 1 to 16 tokens in the sequence and in answers of earlier
dialogues. The tree grows by the likeliest candidate, whose chance is the product of those along its path.

    counting   how often it held in the table's cell, drawn to coarser tables where a cell is thin
    mixing     every match length of both sources votes by how often such a count held; a logistic regression
               weighs the votes, one for each pair of longest matches, of the candidate and of anything
    forest     random forest
    boosting   gradient boosting on histograms

Features of a candidate: for both sources and every match length its count and the sum of all counts; how long
ago it followed; its depth. What Tandem's drafter does is mixing, learnt online (drafting/csrc/learner.h);
here all are fitted offline, once, so that they compare.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from drafting_research.replaying import Conversation, read_conversations
from reporting import describe_command, describe_machine, markdown_table
from tandem_cli.bench.dataset import load_dialogues, sample_dialogues
from tandem_engine import model_loader

#: Match lengths that are looked up, and how many of the latest places of each count.
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)
LATEST = 32
MAX_CANDIDATES = 16
NUM_LEVELS = 2 * len(LENGTHS)
#: Columns: counts by source and length, their totals, how long ago by source, depth.
COUNTS, TOTALS = slice(0, NUM_LEVELS), slice(NUM_LEVELS, 2 * NUM_LEVELS)
AGES = slice(2 * NUM_LEVELS, 2 * NUM_LEVELS + 2)
DEPTH = 2 * NUM_LEVELS + 2
NUM_FEATURES = DEPTH + 1
#: Sizes of tree that are reported.
NODES = (8, 16)


class Places:
    """A text that grows, and where its runs of tokens end."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._begin = 0
        self._followed: dict[tuple[int, ...], list[int]] = {}

    def begin_run(self) -> None:
        """What comes next does not follow what was there."""
        self._begin = len(self.tokens)

    def continues(self, token_ids: Sequence[int]) -> bool:
        """Whether the text is how these tokens begin."""
        return list(token_ids[: len(self.tokens)]) == self.tokens

    def extend(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            at = len(self.tokens)
            for length in LENGTHS:
                if at - length < self._begin:
                    break
                self._followed.setdefault(tuple(self.tokens[at - length : at]), []).append(at)
            self.tokens.append(token)

    def followers(self, context: tuple[int, ...], end: int) -> dict[int, tuple[int, int]]:
        """Of the latest places before `end`: count and last place by token."""
        places = self._followed.get(context)
        if places is None:
            return {}
        stop = bisect.bisect_left(places, end)
        found: dict[int, tuple[int, int]] = {}
        for place in places[max(0, stop - LATEST) : stop]:
            token = self.tokens[place]
            found[token] = (found[token][0] + 1 if token in found else 1, place)
        return found


class Spot:
    """A position in an answer from which is drafted: what is known there, and what will come."""

    def __init__(self, own: Places, at: int, shared: Places, shared_end: int, target: Sequence[int]) -> None:
        self._sources = ((own, at), (shared, shared_end))
        self._recent = tuple(own.tokens[max(0, at - LENGTHS[-1]) : at])
        #: What follows, the token that no guess is needed for excluded.
        self.target = target
        self._known: dict[tuple[int, ...], tuple[list[int], np.ndarray]] = {}

    def candidates(self, path: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
        """Tokens that may follow a path of guesses, and their features [tokens, NUM_FEATURES]."""
        known = self._known.get(path)
        if known is None:
            known = self._known[path] = self._find(path)
        return known

    def _find(self, path: tuple[int, ...]) -> tuple[list[int], np.ndarray]:
        context = self._recent + path
        found = [
            (source * len(LENGTHS) + level, source, text.followers(context[-length:], end))
            for level, length in enumerate(LENGTHS)
            if length <= len(context)
            for source, (text, end) in enumerate(self._sources)
        ]
        blank = [0.0] * NUM_FEATURES
        blank[DEPTH] = len(path)
        for column, _, followers in found:
            blank[NUM_LEVELS + column] = sum([count for count, _ in followers.values()])
        rows: dict[int, list[float]] = {}
        for column, source, followers in reversed(found):  # longest first
            for token, (count, place) in sorted(followers.items(), key=lambda item: -item[1][0]):
                row = rows.get(token)
                if row is None:
                    if len(rows) == MAX_CANDIDATES:
                        continue
                    row = rows[token] = blank.copy()
                row[column] = count
                if row[AGES.start + source] == 0.0:
                    row[AGES.start + source] = float(np.log2(1 + self._sources[source][1] - place))
        return list(rows), np.array(list(rows.values()), np.float32).reshape(-1, NUM_FEATURES)


class Model(Protocol):
    """Tells the chance that a candidate is what comes next."""

    def fit(self, rows: np.ndarray, labels: np.ndarray) -> object:
        """rows [n, NUM_FEATURES], labels [n] 0 or 1."""

    def chances(self, rows: np.ndarray) -> np.ndarray:
        """[n]."""


def longest(present: np.ndarray) -> np.ndarray:
    """Of columns by match length: one more than the last that is set, 0 where none is."""
    return (present * np.arange(1, present.shape[1] + 1)).max(axis=1)


class Counting:
    """Tables from coarse to fine; each cell is drawn to the coarser table's."""

    _DRAW = 8.0

    def fit(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self._tables: list[tuple[np.ndarray, np.ndarray]] = []
        below = np.full(len(rows), labels.mean())
        self._base = float(labels.mean())
        for cells in self._cells(rows):
            names, index = np.unique(cells, return_inverse=True)
            seen = np.bincount(index)
            hits = np.bincount(index, labels.astype(float))
            chances = (hits + self._DRAW * np.bincount(index, below) / seen) / (seen + self._DRAW)
            self._tables.append((names, chances))
            below = chances[index]

    def chances(self, rows: np.ndarray) -> np.ndarray:
        chances = np.full(len(rows), self._base)
        for cells, (names, known) in zip(self._cells(rows), self._tables, strict=True):
            at = np.minimum(np.searchsorted(names, cells), len(names) - 1)
            chances = np.where(names[at] == cells, known[at], chances)
        return chances

    @staticmethod
    def _cells(rows: np.ndarray) -> list[np.ndarray]:
        """Cell numbers by source and match length; then count and share; then recency and depth."""
        counts, totals = rows[:, COUNTS], rows[:, TOTALS]
        middle = len(LENGTHS)
        own, shared = longest(counts[:, :middle] > 0), longest(counts[:, middle:] > 0)
        best = np.where(own >= shared, own - 1, middle + shared - 1)
        count = np.take_along_axis(counts, best[:, None], 1)[:, 0]
        share = count / np.take_along_axis(totals, best[:, None], 1)[:, 0]
        level = own * (middle + 1) + shared
        anything = longest((totals[:, :middle] > 0) | (totals[:, middle:] > 0))
        level = level * (middle + 1) + anything
        age = np.take_along_axis(rows[:, AGES], (best >= middle).astype(int)[:, None], 1)[:, 0]
        parts = (np.minimum(np.log2(count), 4), np.minimum(share * 6, 5), age / 4, rows[:, DEPTH])
        counted, shared_by, late, depth = (part.astype(int) for part in parts)
        fine = (level * 5 + counted) * 6 + shared_by
        finest = (fine * 4 + np.minimum(late, 3)) * 4 + np.minimum(depth, 3)
        return [level, fine, finest]


class Mixing:
    """Votes of all match lengths, weighed by logistic regressions."""

    _LEAST = 100

    def fit(self, rows: np.ndarray, labels: np.ndarray) -> None:
        from sklearn.linear_model import LogisticRegression

        self._votes = []
        for column in range(NUM_LEVELS):
            cells = self._cells(rows, column)
            hits = np.bincount(cells, labels, 64) + 0.2
            self._votes.append(hits / (np.bincount(cells, minlength=64) + 1.0))
        votes, gates = self._inputs(rows), self._gates(rows)
        everywhere = LogisticRegression(C=1.0, max_iter=300).fit(votes, labels)
        self._weights = {}
        self._default = (everywhere.coef_[0], everywhere.intercept_[0])
        for gate in np.unique(gates):
            of_gate = gates == gate
            if of_gate.sum() < self._LEAST or len(set(labels[of_gate])) < 2:
                continue
            fitted = LogisticRegression(C=0.1, max_iter=300).fit(votes[of_gate], labels[of_gate])
            self._weights[gate] = (fitted.coef_[0], fitted.intercept_[0])

    def chances(self, rows: np.ndarray) -> np.ndarray:
        votes, gates = self._inputs(rows), self._gates(rows)
        sums = np.empty(len(rows))
        for gate in np.unique(gates):
            weights, bias = self._weights.get(gate, self._default)
            of_gate = gates == gate
            sums[of_gate] = votes[of_gate] @ weights + bias
        return 1 / (1 + np.exp(-sums))

    @staticmethod
    def _cells(rows: np.ndarray, column: int) -> np.ndarray:
        """By count and by what else was counted there, each to powers of two."""
        count = rows[:, COUNTS][:, column]
        other = rows[:, TOTALS][:, column] - count
        return np.ceil(np.log2(1 + count)).astype(int) * 8 + np.ceil(np.log2(1 + other)).astype(int)

    def _inputs(self, rows: np.ndarray) -> np.ndarray:
        """Logits of the votes, 0 where a length matches nothing."""
        votes = np.zeros((len(rows), NUM_LEVELS))
        for column, table in enumerate(self._votes):
            vote = table[self._cells(rows, column)]
            votes[:, column] = np.where(rows[:, TOTALS][:, column] > 0, np.log(vote / (1 - vote)), 0.0)
        return votes

    @staticmethod
    def _gates(rows: np.ndarray) -> np.ndarray:
        middle = len(LENGTHS)
        counts, totals = rows[:, COUNTS] > 0, rows[:, TOTALS] > 0
        mine = longest(counts[:, :middle] | counts[:, middle:])
        anything = longest(totals[:, :middle] | totals[:, middle:])
        return mine * (middle + 1) + anything


class Fitted:
    """One of scikit-learn's."""

    def __init__(self, classifier) -> None:  # type: ignore[no-untyped-def]
        self._classifier = classifier

    def fit(self, rows: np.ndarray, labels: np.ndarray) -> None:
        self._classifier.fit(rows, labels)

    def chances(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self._classifier.predict_proba(rows)[:, 1])


def make_models() -> dict[str, Model]:
    from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier

    return {
        "counting": Counting(),
        "mixing": Mixing(),
        "forest": Fitted(RandomForestClassifier(100, min_samples_leaf=8, n_jobs=-1, random_state=1)),
        "boosting": Fitted(
            HistGradientBoostingClassifier(
                max_iter=400, learning_rate=0.06, max_leaf_nodes=31, early_stopping=True, random_state=1
            )
        ),
    }


def accepted_lengths(spots: Sequence[Spot], model: Model) -> np.ndarray:
    """Accepted guesses of every spot's tree at each of NODES: [spots, sizes].

    Trees grow side by side, so that the model is asked for many candidates at once.
    """
    # Heaps of (-reach, order, path, whether the target goes there), likeliest first.
    heaps: list[list[tuple[float, int, tuple[int, ...], bool]]] = [[] for _ in spots]
    grown: list[tuple[tuple[int, ...], float, bool] | None] = [((), 1.0, True)] * len(spots)
    accepted = np.zeros((len(spots), len(NODES)), int)
    for size in range(1, NODES[-1] + 1):
        asked = [(number, node) for number, node in enumerate(grown) if node is not None]
        found = [spots[number].candidates(node[0]) for number, node in asked]
        rows = np.concatenate([features for _, features in found])
        chances = iter(model.chances(rows).tolist() if len(rows) else [])
        for (number, (path, reach, is_right)), (tokens, _) in zip(asked, found, strict=True):
            target, heap = spots[number].target, heaps[number]
            for token in tokens:
                chance = next(chances)
                if len(path) < len(target):
                    goes = is_right and target[len(path)] == token
                    heapq.heappush(heap, (-reach * chance, size * 100 + len(heap), (*path, token), goes))
        for number, heap in enumerate(heaps):
            grown[number] = None
            if heap:
                reach, _, path, is_right = heapq.heappop(heap)
                grown[number] = (path, -reach, is_right)
                if is_right:
                    for column, nodes in enumerate(NODES):
                        if size <= nodes:
                            accepted[number, column] = max(accepted[number, column], len(path))
    return accepted


def conversation_spots(conversation: Conversation, shared: Places, shared_end: int) -> Iterator[list[Spot]]:
    """Of each answer: one for each token but the first, which comes from prefill."""
    own = Places()
    for answer in conversation.answers:
        if not own.continues(answer.prompt):  # the chat template renders the end of an answer in another way
            own = Places()
        own.extend(answer.prompt[len(own.tokens) :])
        begin = len(own.tokens)
        own.extend(answer.target)
        yield [
            Spot(own, begin + at, shared, shared_end, answer.target[at:-1])
            for at in range(1, len(answer.target))
        ]


def walk(accepted: np.ndarray) -> int:
    """Steps that an answer takes whose spots accept so much."""
    at = steps = 0
    while at < len(accepted):
        at += int(accepted[at]) + 1
        steps += 1
    return steps


def training_rows(spots: Sequence[Spot], generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Candidates at some depth on the right path of each spot, and which of them are right."""
    rows, labels = [], []
    for spot in spots:
        depth = int(generator.geometric(0.4)) - 1
        if depth >= len(spot.target):
            continue
        tokens, features = spot.candidates(tuple(spot.target[:depth]))
        rows.append(features)
        labels += [token == spot.target[depth] for token in tokens]
    return np.concatenate(rows), np.array(labels, int)


def share_answers(conversations: Sequence[Conversation]) -> tuple[Places, list[int]]:
    """All answers, and how many of their tokens came before each conversation."""
    shared = Places()
    ends = []
    for conversation in conversations:
        ends.append(len(shared.tokens))
        for answer in conversation.answers:
            shared.begin_run()
            shared.extend(answer.target)
    return shared, ends


class Score:
    """How one model did."""

    def __init__(self) -> None:
        #: By pass and size of tree.
        self.steps = np.zeros((2, len(NODES)), int)
        self.tokens = 0
        self._loss = 0.0
        self._num_candidates = 0

    def add_loss(self, chances: np.ndarray, labels: np.ndarray) -> None:
        chances = np.clip(chances, 1e-6, 1 - 1e-6)
        self._loss -= float(np.log(np.where(labels == 1, chances, 1 - chances)).sum())
        self._num_candidates += len(labels)

    @property
    def log_loss(self) -> float:
        return self._loss / self._num_candidates


def compare(conversations: Sequence[Conversation]) -> list[list[str]]:
    """Rows of the table."""
    shared, ends = share_answers(conversations)
    generator = np.random.default_rng(1)
    half = len(conversations) // 2
    parts = [
        training_rows(spots, generator)
        for conversation, end in zip(conversations[:half], ends, strict=False)
        for spots in conversation_spots(conversation, shared, end)
        if spots
    ]
    rows = np.concatenate([features for features, _ in parts])
    labels = np.concatenate([right for _, right in parts])
    print(f"{len(rows)} candidates to learn from, {labels.mean():.3f} of them right", flush=True)
    models, scores, fitting = make_models(), dict[str, Score](), dict[str, float]()
    for name, model in models.items():
        begun = time.perf_counter()
        model.fit(rows, labels)
        scores[name], fitting[name] = Score(), time.perf_counter() - begun
    for conversation, first_end in zip(conversations[half:], ends[half:], strict=True):
        for number, end in enumerate((first_end, len(shared.tokens))):
            for spots in conversation_spots(conversation, shared, end):
                if not spots:
                    continue
                held, right = training_rows(spots, generator)
                for name, model in models.items():
                    score, accepted = scores[name], accepted_lengths(spots, model)
                    score.steps[number] += [walk(of_size) for of_size in accepted.T]
                    if number == 0:
                        score.tokens += len(spots)
                        if len(right):
                            score.add_loss(model.chances(held), right)
    return [
        [
            name,
            f"{score.log_loss:.4f}",
            *(f"{score.tokens / steps:.2f}" for steps in score.steps.ravel()),
            f"{fitting[name]:.0f} s",
        ]
        for name, score in scores.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", default="smollm2-135m-instruct", help="whose tokenizer and chat template")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: some that come along")
    parser.add_argument("--policy", type=Path, help="a system prompt for all of them")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    try:
        import sklearn  # noqa: F401
    except ImportError:
        parser.error("scikit-learn is not installed: pip install scikit-learn")
    dialogues = load_dialogues(options.dataset) if options.dataset is not None else sample_dialogues()
    policy = options.policy.read_text() if options.policy is not None else None
    rows = compare(read_conversations(model_loader.pull(options.model), dialogues, policy))
    head = ["model", "log loss"]
    head += [f"MAT {which}, {nodes} nodes" for which in ("first", "repeated") for nodes in NODES]
    table = markdown_table([*head, "fitting"], rows)
    print(table)
    if options.out is not None:
        options.out.write_text(
            f"# Which model tells best what is accepted\n\n`{describe_command()}`\n\n{describe_machine()}\n\n"
            "Fitted to the first half of the dialogues, measured on the second. log loss: of candidates on "
            f"the right path. MAT: mean tokens per step, with the bonus token.\n\n{table}\n"
        )


if __name__ == "__main__":
    main()
