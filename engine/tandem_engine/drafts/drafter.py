"""Drafts a batch: which guesses to verify in the next step, over all sequences at once.

    propose   index what is new of each sequence, and grow all trees best first while it pays
    (engine)  verifies the trees and accepts a path of each
    extend    compare the accepted tokens with what was considered, sent or not, and learn
    forget    the request is over

The work is done in C++ (engine/csrc, through native.py); where that was not compiled, nothing is drafted.

A draft never changes what is generated, only how fast: any tree is valid, a wrong one costs its rows.

The price: a step with Q rows beyond the batch's own takes 1 + Q * row_cost times as long, and yields E
tokens, one per sequence plus each guess's chance to be accepted. One more row with chance f pays when

    (E + f) / (1 + (Q + 1) * row_cost) > E / (1 + Q * row_cost)   i.e.   f > E * row_cost / (1 + Q * row_cost)

so that copy length follows from hit rate and batch size, and drafting stops where it does not pay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem_engine.drafts import native
from tandem_engine.drafts.mirror import GlobalMirror
from tandem_engine.drafts.native import Job, Learner, Text
from tandem_engine.drafts.strategy import MAX_CHAIN, Strategy
from tandem_engine.drafts.tree import MAX_TREE_NODES, DraftTree

if TYPE_CHECKING:  # the request module needs this package's tree
    from tandem_engine.request import Request


@dataclass(frozen=True)
class DraftPolicy:
    """What a pod may draft, and the first estimate of its price."""

    strategy: Strategy = Strategy.GLOBAL
    #: Time of one more row of a step relative to a step without drafts.
    row_cost: float = 0.03

    def __post_init__(self) -> None:
        if not 0.0 <= self.row_cost < 10.0:
            raise ValueError(f"row_cost is {self.row_cost}; it is a share of a step, in [0, 10)")


class Drafter:
    """Owns the sequences' texts and what was learnt. Used by one thread; mirrors are written by others."""

    def __init__(self, mirror: GlobalMirror | None, policy: DraftPolicy) -> None:
        self._strategy = policy.strategy if native.LIBRARY is not None else Strategy.OFF
        self._mirrors: dict[str, GlobalMirror] = {}
        if mirror is not None:
            self.attach(mirror)
        #: By tenant: what is learnt from one's texts serves no other's.
        self._learners: dict[str, Learner] = {}
        self._texts: dict[str, Text] = {}
        #: Settable while running: the engine measures it.
        self.row_cost = policy.row_cost

    def attach(self, mirror: GlobalMirror) -> None:
        """Uses a mirror for its tenant's requests, and for no other's."""
        self._mirrors[mirror.tenant] = mirror

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        """One tree of at most `max_nodes` guesses per request, None where nothing pays.

        The price counts every request given, so pass the whole decoding batch. Requests that are not
        decoding get None. Nothing beyond a request's max_tokens is guessed.
        """
        if self._strategy is Strategy.OFF or max_nodes < 1:
            return [None] * len(requests)
        jobs = [self._job(request) for request in requests]
        max_guesses = min(max_nodes, MAX_TREE_NODES - 1)
        seconds = [1.0 + self.row_cost * q for q in range(len(jobs) * max_guesses + 1)]
        drafts = native.draft(jobs, max_guesses, seconds)
        return [guesses.tree if guesses is not None else None for guesses in drafts]

    def extend(self, request: Request, token_ids: Sequence[int]) -> None:
        """Learns from the tokens a step has emitted for the request, the bonus token included.

        May be called before or after they are appended to the request; the next `propose` indexes them.
        """
        text = self._texts.get(request.request_id)
        if text is not None:
            text.teach(self._learner(request.tenant), token_ids)

    def forget(self, request_id: str) -> None:
        """Drops what is known of a finished request; unknown ids are ignored."""
        self._texts.pop(request_id, None)

    @property
    def num_sequences(self) -> int:
        """Requests whose text is held; 0 when idle."""
        return len(self._texts)

    def _job(self, request: Request) -> Job:
        """What the request's sequence draws on, its text brought up to date."""
        room = request.sampling.max_tokens - len(request.output_token_ids) - 1
        learner = self._learner(request.tenant)
        strategy = request.speculation or self._strategy
        if not request.is_decoding or room < 1 or strategy is Strategy.OFF:
            return Job(None, learner, room=0)
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = Text(request.num_prompt_tokens)
        text.extend(request.tokens(text.num_tokens, request.num_tokens))
        max_chain = MAX_CHAIN if strategy is Strategy.CHAIN else 0
        mirror = None
        if Strategy.LOCAL not in (strategy, self._strategy):
            mirror = self._mirrors.get(request.tenant)
        if mirror is None:
            return Job(text, learner, room=room, max_chain=max_chain)
        own_run = mirror.run_of(request.request_id)
        return Job(text, learner, mirror.corpus, room=room, own_run=own_run, max_chain=max_chain)

    def _learner(self, tenant: str) -> Learner:
        learner = self._learners.get(tenant)
        if learner is None:
            learner = self._learners[tenant] = Learner()
        return learner
