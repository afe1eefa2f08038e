"""The interface between the engine and a source of drafts, such as n-gram lookup (tandem_drafting).

Per decode step the engine calls, in this order and from its one thread:

    propose        a tree of guesses for each decoding request, or None
    (engine)       verifies the trees and accepts a path of each
    observe_step   how long the step took
    extend         the tokens the step emitted, and the logits they were sampled from
    forget         requests that have ended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request

#: Tokens per row of logits that a device finds for `extend`.
NUM_LIKELIEST = 4


@dataclass(frozen=True)
class Emitted:
    """Tokens that one step emitted for a request."""

    request: Request
    token_ids: Sequence[int]
    #: Per token: the row of the step's logits that it was sampled from.
    logits_rows: Sequence[int]


@dataclass(frozen=True)
class Likeliest:
    """The likeliest tokens of each row of a step's logits, the likeliest first, as a device found them."""

    #: [rows, NUM_LIKELIEST], or the vocabulary's size if that is less.
    token_ids: NDArray[np.int64]
    #: Logits, in the shape of token_ids.
    logits: NDArray[np.float32]


class DraftSource(Protocol):
    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        """One tree of at most `max_nodes` draft tokens per request, None where no draft is worth its cost.
        share: the part of the time left by the requests' objectives per token that drafts may use."""

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        """Notes the duration of a step that only decoded; context: cached tokens of all its sequences."""

    def extend(self, emitted: Sequence[Emitted], logits: Tensor | Likeliest) -> None:
        """logits [rows, vocab] float32 of the step on the CPU, valid during the call; of a step on a GPU what
        was found there.
        """

    def forget(self, request_id: str) -> None:
        """Deletes the state of a request; unknown ids are ignored."""
