"""The work of one step: the interface between the scheduler and the model runner.

sequence i:   positions [start, start + num_new_tokens) get KV, through block_ids
              |<- start: KV already there ->|<- token_ids: computed now ->|
draft None    token_ids are the sequence's next tokens (a prefill chunk or one decode token)
draft given   token_ids[0] is the last accepted token, the rest are the draft's nodes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tandem_core.errors import InvariantError

from tandem_engine.block_manager import BlockCopy
from tandem_engine.draft_tree import DraftTree
from tandem_engine.request import Request
from tandem_engine.state_slots import StateStep


@dataclass(frozen=True)
class ScheduledSequence:
    request: Request
    #: By group, the physical blocks in logical order; they cover start + len(token_ids) tokens.
    block_ids: tuple[tuple[int, ...], ...]
    #: Tokens whose KV is in the cache before this step.
    start: int
    token_ids: tuple[int, ...]
    draft: DraftTree | None
    #: Whether a token is sampled: True for the last prompt chunk and for decoding. Logits are then computed
    #: for the last token, or for every node of the draft.
    samples: bool
    #: Which of the request's beams; those of one request follow each other.
    beam: int = 0
    #: Slots of the recurrent state; None: no layer has one.
    state: StateStep | None = None

    def __post_init__(self) -> None:
        if self.draft is not None and len(self.token_ids) != len(self.draft) + 1:
            raise InvariantError("a drafted sequence computes the root and every node")
        if not self.token_ids:
            raise InvariantError("a scheduled sequence computes at least one token")

    @property
    def num_new_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def defers_state(self) -> bool:
        """Whether the state advances only when it is known which of the tokens count."""
        return self.state is not None and self.state.final < 0

    @property
    def num_logits_rows(self) -> int:
        if not self.samples:
            return 0
        return 1 if self.draft is None else self.num_new_tokens

    @property
    def scored_positions(self) -> range:
        """Positions of the prompt whose logits give log probabilities that the request wants."""
        scores = self.request.prompt_scores
        return range(0) if scores is None else scores.missing(self.start, self.start + self.num_new_tokens)

    def positions(self) -> Sequence[int]:
        """Each new token's position in the text, for RoPE; a draft's nodes by their depth."""
        if self.draft is None:
            return range(self.start, self.start + self.num_new_tokens)
        return [self.start + depth for depth in self.draft.depths()]

    def ancestor_bits(self) -> list[int]:
        """Each new token's bits for attention; all zero marks a causal sequence."""
        return [0] * self.num_new_tokens if self.draft is None else self.draft.ancestor_bits()


@dataclass(frozen=True)
class Batch:
    sequences: tuple[ScheduledSequence, ...]
    #: KV that is copied before anything is computed.
    copies: tuple[BlockCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new_tokens for s in self.sequences)

    @property
    def num_logits_rows(self) -> int:
        return sum(s.num_logits_rows for s in self.sequences)
