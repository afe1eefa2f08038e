"""The drafter written in C++ (drafting/csrc), loaded through ctypes.

    SequenceIndex     one sequence: prompt, output and its last draft
    CorpusIndex       sequences that a tenant's requests generated
    Recycler          likely next tokens from earlier logits
    AcceptanceModel   predicts the acceptance of a guess
    SequenceInput     the inputs of one sequence's draft
    draft_batch       drafts for a batch
    learn             takes the tokens that a step emitted

Calls release the GIL. An object belongs to one thread, except that one thread may add to a CorpusIndex
while others draft from it.
"""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tandem_engine.draft_tree import MAX_TREE_NODES, DraftTree

#: Where guesses come from, by the number the library gives them.
SOURCES = ("prompt", "output", "global", "recycled")
#: Likeliest successors that a Recycler takes.
NUM_RECYCLED = 4
#: Parts in which predictions are compared with what came of them.
NUM_TENTHS = 10

_POINTER, _INT32, _INT64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
_DOUBLE = ctypes.c_double
_MAX_GUESSES = MAX_TREE_NODES - 1


class _Draft(ctypes.Structure):
    """TandemInput of drafting/csrc/drafter.cpp, field by field."""

    _fields_ = (
        *((name, _POINTER) for name in ("sequence", "corpus", "recycler", "model")),
        ("max_chain", _INT32),
    )


#: Words of 32 bits: TandemStep's room, own_run, num_guesses and is_hopeless; TandemGuess' token, parent,
#: source and probability.
_STEP_WORDS = _GUESS_WORDS = 4


#: Function -> its result and arguments.
Signatures = dict[str, tuple[object, tuple[object, ...]]]
_SIGNATURES: Signatures = {
    "tandem_draft": (
        None,
        (_POINTER, _POINTER, _INT32, _INT32, _DOUBLE, _POINTER, _INT32, _POINTER),
    ),
    "tandem_draft_learn": (None, (_POINTER, _INT32, _POINTER, _POINTER, _POINTER)),
    "tandem_draft_top_tokens": (None, (_POINTER, _INT64, _POINTER, _INT32, _POINTER)),
    "tandem_draft_sequence_new": (_POINTER, (_INT64,)),
    "tandem_draft_sequence_free": (None, (_POINTER,)),
    "tandem_draft_sequence_extend": (None, (_POINTER, _POINTER, _INT64)),
    "tandem_draft_sequence_bytes": (_INT64, (_POINTER,)),
    "tandem_draft_corpus_new": (_POINTER, (_INT64, _INT32)),
    "tandem_draft_corpus_free": (None, (_POINTER,)),
    "tandem_draft_corpus_add": (_INT32, (_POINTER, _INT32, _POINTER, _INT64, _INT64)),
    "tandem_draft_corpus_size": (_INT64, (_POINTER,)),
    "tandem_draft_corpus_bytes": (_INT64, (_POINTER,)),
    "tandem_draft_model_new": (_POINTER, ()),
    "tandem_draft_model_free": (None, (_POINTER,)),
    "tandem_draft_model_reset": (None, (_POINTER,)),
    "tandem_draft_model_tenths": (None, (_POINTER, _POINTER)),
    "tandem_draft_recycler_new": (_POINTER, ()),
    "tandem_draft_recycler_free": (None, (_POINTER,)),
    "tandem_draft_recycler_bytes": (_INT64, (_POINTER,)),
    "tandem_step_cost_new": (_POINTER, (_DOUBLE,)),
    "tandem_step_cost_free": (None, (_POINTER,)),
    "tandem_step_cost_observe": (None, (_POINTER, _POINTER, _INT32)),
    "tandem_step_cost_curve": (None, (_POINTER, _INT32, _INT64, _INT32, _POINTER)),
}


def _load() -> ctypes.CDLL:
    path = Path(__file__).with_name("tandem_drafting.so")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(
            f"cannot load the compiled drafter ({error}); reinstall Tandem, in a checkout run build_native.py"
        ) from error
    declare(library, _SIGNATURES)
    return library


def declare(library: ctypes.CDLL, signatures: Signatures) -> None:
    """Sets the functions' types. Raises ImportError when the library lacks one."""
    for name, (result, arguments) in signatures.items():
        try:
            function = getattr(library, name)
        except AttributeError as error:  # says which file and function
            raise ImportError(
                f"the drafter was compiled from other sources than this Python code ({error}); "
                "run `python build_native.py` or `make venv`; without a checkout reinstall Tandem"
            ) from error
        function.restype, function.argtypes = result, list(arguments)


LIBRARY = _load()


def _ids(token_ids: Sequence[int]) -> array[int]:
    return token_ids if isinstance(token_ids, array) else array("i", token_ids)


class SequenceIndex:
    """One sequence's prompt and output, indexed; O(1) amortised per token."""

    def __init__(self, num_prompt_tokens: int) -> None:
        self._library = LIBRARY
        self.handle = self._library.tandem_draft_sequence_new(num_prompt_tokens)
        #: Tokens appended.
        self.num_tokens = 0

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.tandem_draft_sequence_free(self.handle)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""
        ids = _ids(token_ids)
        self._library.tandem_draft_sequence_extend(self.handle, ids.buffer_info()[0], len(ids))
        self.num_tokens += len(ids)

    @property
    def memory_bytes(self) -> int:
        return int(self._library.tandem_draft_sequence_bytes(self.handle))


class CorpusIndex:
    """Runs of generated text, at most `capacity` tokens with one more for each run."""

    def __init__(self, capacity: int, vocab_size: int) -> None:
        if not 0 < capacity < 2**31:
            raise ValueError(f"capacity is {capacity} tokens, wanted 1 .. 2147483647")
        self._library = LIBRARY
        self.capacity = capacity
        self.vocab_size = vocab_size
        self.handle = self._library.tandem_draft_corpus_new(capacity, vocab_size)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.tandem_draft_corpus_free(self.handle)

    def add(self, run: int, token_ids: Sequence[int], num_context: int = 0) -> bool:
        """Adds tokens to a run, named by a number of 31 bits.

        Where other runs were added to since, the first `num_context` tokens should be the run's last ones so
        far: they are what the new ones follow, and not counted again.

        False, with nothing added, when there is no room or a token is none of the vocabulary's.
        """
        ids = _ids(token_ids)
        return bool(
            self._library.tandem_draft_corpus_add(
                self.handle, run, ids.buffer_info()[0], len(ids), num_context
            )
        )

    @property
    def num_tokens(self) -> int:
        """Room taken, in tokens; a run takes one for its beginning."""
        return int(self._library.tandem_draft_corpus_size(self.handle))

    @property
    def memory_bytes(self) -> int:
        return int(self._library.tandem_draft_corpus_bytes(self.handle))


class TopTokens:
    """The NUM_RECYCLED likeliest tokens of rows of logits, the likeliest first, and their logits."""

    #: As TopTokens of drafting/csrc/recycler.h: int32 tokens, float32 logits.
    _WORDS = 2 * NUM_RECYCLED

    def __init__(self, words: array[int], start: int, stop: int) -> None:
        self._words = words
        self._start, self._stop = start, stop
        self.address = words.buffer_info()[0] + 4 * self._WORDS * start

    def __len__(self) -> int:
        return self._stop - self._start

    def part(self, start: int, stop: int) -> TopTokens:
        """Rows [start, stop), sharing the memory."""
        return TopTokens(self._words, self._start + start, self._start + stop)

    @property
    def tokens(self) -> list[list[int]]:
        """By row."""
        rows = range(self._start * self._WORDS, self._stop * self._WORDS, self._WORDS)
        return [self._words[at : at + NUM_RECYCLED].tolist() for at in rows]

    @staticmethod
    def of_tokens(tokens: npt.ArrayLike, logits: npt.ArrayLike) -> TopTokens:
        """From tables [rows, NUM_RECYCLED], the likeliest first: what a device has found."""
        chosen = np.asarray(tokens, np.int32)
        words = np.concatenate((chosen, np.asarray(logits, np.float32).view(np.int32)), axis=1)
        return TopTokens(array("i", words.tobytes()), 0, len(chosen))

    @staticmethod
    def of_logits(logits_address: int, vocab_size: int, rows: Sequence[int]) -> TopTokens:
        """The top tokens of rows of dense float32 logits [.., vocab_size] at an address of this process."""
        if vocab_size < NUM_RECYCLED:
            raise ValueError(f"a vocabulary of {vocab_size} tokens; wanted {NUM_RECYCLED} or more")
        words = array("i", bytes(4 * TopTokens._WORDS * len(rows)))
        wanted = _ids(rows)
        LIBRARY.tandem_draft_top_tokens(
            logits_address, vocab_size, wanted.buffer_info()[0], len(wanted), words.buffer_info()[0]
        )
        return TopTokens(words, 0, len(wanted))


class Recycler:
    """The model's likeliest successors of the contexts it was lately asked for; `learn` fills it."""

    def __init__(self) -> None:
        self._library = LIBRARY
        self.handle = self._library.tandem_draft_recycler_new()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.tandem_draft_recycler_free(self.handle)

    @property
    def memory_bytes(self) -> int:
        return int(self._library.tandem_draft_recycler_bytes(self.handle))


@dataclass(frozen=True)
class Reliability:
    """What became of the guesses that were sent with a predicted acceptance within one tenth."""

    num_guesses: float
    #: Sum of the predictions: how many should have been accepted.
    predicted: float
    accepted: float


class AcceptanceModel:
    """Predicts the acceptance of guesses; learns from the sequences of one tenant."""

    def __init__(self) -> None:
        self._library = LIBRARY
        self.handle = self._library.tandem_draft_model_new()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            self._library.tandem_draft_model_free(self.handle)

    def reset(self) -> None:
        """Back to the initial weights; `reliability` keeps its counts."""
        self._library.tandem_draft_model_reset(self.handle)

    def reliability(self) -> list[Reliability]:
        """By tenths of the prediction, since this object was made; any thread may ask."""
        tenths = array("d", bytes(8 * 3 * NUM_TENTHS))
        self._library.tandem_draft_model_tenths(self.handle, tenths.buffer_info()[0])
        return [Reliability(*tenths[at : at + 3]) for at in range(0, len(tenths), 3)]


class SequenceInput:
    """The inputs of one sequence's draft; kept from step to step.

    sequence: None drafts nothing. room: depth of the deepest guess that could be emitted; 0: no draft.
    own_run: the corpus run of this sequence's own output; -1: none. max_chain: most guesses of an unbranched
    draft; 0: a tree.
    """

    __slots__ = ("_call", "_corpus", "address", "model", "own_run", "recycler", "room", "sequence")

    def __init__(
        self,
        sequence: SequenceIndex | None,
        model: AcceptanceModel,
        corpus: CorpusIndex | None = None,
        recycler: Recycler | None = None,
        *,
        room: int = _MAX_GUESSES,
        own_run: int = -1,
        max_chain: int = 0,
    ) -> None:
        self.sequence, self.model, self.recycler = sequence, model, recycler
        self.room, self.own_run = room, own_run
        self._call = call = _Draft()
        call.sequence = sequence.handle if sequence is not None else None
        call.model, call.max_chain = model.handle, max_chain
        call.recycler = recycler.handle if recycler is not None else None
        self.address = ctypes.addressof(call)
        self._corpus: CorpusIndex | None = None
        self.set_corpus(corpus)

    def set_corpus(self, corpus: CorpusIndex | None) -> None:
        """The tenant's corpus; a rebuilt one is another object."""
        if corpus is not self._corpus:
            self._corpus = corpus
            self._call.corpus = corpus.handle if corpus is not None else None


@dataclass(frozen=True)
class Guesses:
    """A tree, and the predicted acceptance of each of its guesses."""

    tree: DraftTree
    reach: tuple[float, ...]


class Drafted:
    """The drafts of a batch, by input."""

    def __init__(self, steps: array[int], guesses: array[int]) -> None:
        self._counts = steps[2::_STEP_WORDS]
        self._total = sum(self._counts)
        self._guesses = guesses
        #: Whether even the best candidate was far less probable than its cost demands.
        self.is_hopeless: Sequence[int] = steps[3::_STEP_WORDS]

    def trees(self) -> list[DraftTree | None]:
        """None where nothing pays."""
        trees: list[DraftTree | None] = [None] * len(self._counts)
        if self._total == 0:
            return trees
        # All at once: reading arrays bit by bit takes longer than drafting.
        words = self._guesses[: self._total * _GUESS_WORDS].tolist()
        tokens, parents = words[0::_GUESS_WORDS], words[1::_GUESS_WORDS]
        sources = [SOURCES[source] for source in words[2::_GUESS_WORDS]]
        end = 0
        for n, count in enumerate(self._counts):
            if count:
                begin, end = end, end + count
                trees[n] = DraftTree(
                    tuple(tokens[begin:end]), tuple(parents[begin:end]), tuple(sources[begin:end])
                )
        return trees

    def reach(self) -> list[tuple[float, ...]]:
        """The predicted acceptance of each guess."""
        reach = array("f", self._guesses[: self._total * _GUESS_WORDS].tobytes())[3::_GUESS_WORDS]
        ends = list(itertools.accumulate(self._counts, initial=0))
        return [tuple(reach[begin:end]) for begin, end in itertools.pairwise(ends)]


def draft_batch(
    inputs: Sequence[SequenceInput], max_guesses: int, expected: float, seconds: array[float]
) -> Drafted:
    """Makes each input's draft, of at most `max_guesses`.

    expected: tokens of the step without guesses. seconds[q]: its time with q guesses in the whole batch,
    non-decreasing. The number of guesses with the most tokens per second is chosen.
    """
    addresses = array("q", [one.address for one in inputs])
    # max_tokens may be larger than the type.
    steps = array("i", [word for one in inputs for word in (min(one.room, _MAX_GUESSES), one.own_run, 0, 0)])
    room = min(max_guesses * len(inputs), len(seconds) - 1)
    guesses = array("i", bytes(4 * _GUESS_WORDS * room))
    LIBRARY.tandem_draft(
        addresses.buffer_info()[0],
        steps.buffer_info()[0],
        len(inputs),
        max_guesses,
        expected,
        seconds.buffer_info()[0],
        len(seconds),
        guesses.buffer_info()[0],
    )
    return Drafted(steps, guesses)


def draft(
    inputs: Sequence[SequenceInput], max_guesses: int, seconds: Sequence[float]
) -> list[Guesses | None]:
    """`draft_batch` for a batch of these inputs alone: each one's guesses, None where nothing pays."""
    drafted = draft_batch(inputs, max_guesses, len(inputs), array("d", seconds))
    return [
        Guesses(tree, reach) if tree is not None else None
        for tree, reach in zip(drafted.trees(), drafted.reach(), strict=True)
    ]


def learn(
    inputs: Sequence[SequenceInput], emitted: Sequence[Sequence[int]], top: TopTokens | None = None
) -> None:
    """Takes the tokens that a step emitted: they update the models and extend the sequences.

    top: for each of these tokens the top tokens of the logits that it was chosen from.
    """
    tokens, ends = array("i"), array("i")
    for one, ids in zip(inputs, emitted, strict=True):
        if one.sequence is None:
            raise ValueError("an input without a sequence cannot be extended")
        tokens.extend(ids)
        ends.append(len(tokens))
        one.sequence.num_tokens += len(ids)
    if top is not None and len(top) != len(tokens):
        raise ValueError(f"top tokens of {len(top)} places, wanted {len(tokens)}")
    addresses = array("q", [one.address for one in inputs])
    LIBRARY.tandem_draft_learn(
        addresses.buffer_info()[0],
        len(inputs),
        tokens.buffer_info()[0],
        ends.buffer_info()[0],
        top.address if top is not None else None,
    )
