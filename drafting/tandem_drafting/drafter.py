"""Drafts a batch: which guesses to verify in the next step, over all sequences at once.

    propose   grow all trees best first while it pays
    (engine)  verifies the trees and accepts a path of each
    extend    compare the accepted tokens with what was considered, sent or not, and learn; index them; keep
              what else the model thought likely
    forget    the request is over

C++ does the work (drafting/csrc, through native.py), in one call for the whole batch: a call costs as much
as drafting for one sequence.

A draft never changes what is generated, only how fast: any tree is valid, a wrong one costs its rows.

The price: a step with Q guesses takes T(Q) (step_cost.py) and yields E tokens, one per sequence plus each
guess's chance to be accepted. The likeliest guesses are added while that can raise E / T(Q), over the whole
batch, so that copy length follows from hit rate and batch size.

Drafting takes time itself, about 1 % of a short step. A sequence of which nothing came near to being worth
that, several times in a row, is drafted for in every second, fourth, eighth or sixteenth step only, the same
ones for all such sequences; and so are all for a while when what was drafted for the whole batch has not paid
for itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_core.speculation import MAX_CHAIN, SpeculationMode
from tandem_engine.draft_source import Emitted
from tandem_engine.draft_tree import MAX_TREE_NODES, DraftTree
from tandem_engine.request import Request
from torch import Tensor

from tandem_drafting import native
from tandem_drafting.likeliest import likeliest_of
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.native import (
    NUM_RECYCLED,
    AcceptanceModel,
    Recycler,
    Reliability,
    SequenceIndex,
    SequenceInput,
)
from tandem_drafting.step_cost import StepCost

#: After so many drafts in vain in a row one is made every second step, after as many again every fourth.
_VAIN_BEFORE_REST = 2
_MOST_REST_BITS = 4
_LONGEST_REST = (1 << _MOST_REST_BITS) - 1
#: Tokens of plain decoding after which it is told whether drafting pays for itself, in so many steps at
#: least; and how many such periods it rests at most.
_PERIOD = 256
_LEAST_STEPS = 32
_MOST_PERIODS = 8
#: Steps without a draft after which one is made at the price that a new pod would pay: a price that was once
#: measured too high would not be measured again.
_STEPS_TO_RETRIAL = 128
#: Indexing a prompt, or losing the processor, is no measure of a step's work.
_MOST_OWN_SECONDS = 2e-4


class _Worth:
    """Whether drafting pays for itself: found out by doing it for a period, now and then.

    What drafts are worth shows only while they are made all the time, since what the model thought likely is
    kept in steps that were drafted for. After a period that did not pay there are one, two, four, at most
    _MOST_PERIODS with a look now and then; one that promises much ends them.
    """

    def __init__(self) -> None:
        self.is_given = True
        self._left = _PERIOD
        self._periods_of_rest = 1
        self._balance = 0.0

    def step(self, num_sequences: int) -> None:
        """Another step begins."""
        self._left -= min(num_sequences, _PERIOD // _LEAST_STEPS)
        if self._left <= 0:
            self._decide(is_worth_it=not self.is_given or self._balance > 0.0)

    def note(self, gain: float, cost: float) -> None:
        """A draft of the whole batch: what it promises, and what making it took, as shares of a step."""
        if self.is_given:
            self._balance += gain - cost
        else:
            self._balance += 0.3 * (gain - cost - self._balance)
            if self._balance > 0.0:
                self._decide(is_worth_it=True)

    def _decide(self, *, is_worth_it: bool) -> None:
        if is_worth_it:
            if self.is_given:
                self._periods_of_rest = 1
            self._left = _PERIOD
        else:
            self._left = _PERIOD * self._periods_of_rest
            self._periods_of_rest = min(2 * self._periods_of_rest, _MOST_PERIODS)
        self.is_given = is_worth_it
        self._balance = 0.0


@dataclass
class _Mean:
    """A running mean."""

    value: float
    rate: float

    def add(self, value: float) -> None:
        self.value += self.rate * (value - self.value)


@dataclass(frozen=True)
class DraftPolicy:
    """What a pod may draft, and the first estimate of its price."""

    strategy: SpeculationMode = SpeculationMode.GLOBAL
    #: Time of one more row of a step relative to a step without drafts. Rather too much than too little: a
    #: likely guess shows soon what rows cost, while dear ones in text that nobody can guess cost steps.
    row_cost: float = 0.1


class _Sequence:
    """What is kept of a request."""

    def __init__(
        self,
        request: Request,
        learner: AcceptanceModel,
        recycler: Recycler,
        mirror: GlobalMirror | None,
        *,
        max_chain: int,
    ) -> None:
        self.text = SequenceIndex(request.num_prompt_tokens)
        self.mirror = mirror
        self.job = SequenceInput(self.text, learner, recycler=recycler, max_chain=max_chain)
        #: Whether the last step was drafted for, so that there is something to learn.
        self.is_drafted = False
        #: Drafts in a row that were in vain; and which bits of a step's number must be 0 for a draft.
        self.num_vain = 0
        self.rest_mask = 0

    def prepare(self, request: Request, room: int) -> SequenceInput:
        """The job, with the text up to date."""
        text, job = self.text, self.job
        if text.num_tokens != request.num_tokens:
            text.extend(request.tokens(text.num_tokens, request.num_tokens))
        job.room = room
        if self.mirror is not None:
            job.own_run = self.mirror.run_of(request.request_id)
            job.set_corpus(self.mirror.corpus)
        self.is_drafted = True
        return job

    def judge(self, *, is_drafted: bool, is_vain: bool) -> None:
        """Decides when to draft again. What came near is no reason to look less often, nor more."""
        if is_drafted:
            self.num_vain = 0
        elif is_vain:
            self.num_vain += 1
        self.rest_mask = (1 << min(self.num_vain // _VAIN_BEFORE_REST, _MOST_REST_BITS)) - 1


class Drafter:
    """Owns the sequences' texts and what was learnt. Used by one thread; mirrors are written by others."""

    def __init__(self, mirror: GlobalMirror | None, policy: DraftPolicy) -> None:
        self._strategy = policy.strategy
        self._mirrors: dict[str, GlobalMirror] = {}
        if mirror is not None:
            self.attach(mirror)
        #: By tenant: what is learnt from one's texts serves no other's.
        self._learners: dict[str, AcceptanceModel] = {}
        self._recyclers: dict[str, Recycler] = {}
        self._sequences: dict[str, _Sequence] = {}
        #: What the engine measures; it reports its steps here.
        self.step_cost = StepCost(policy.row_cost)
        self._first_cost = StepCost(policy.row_cost)
        self._num_steps = 0
        #: The step of the last draft, or of the last that was allowed the first price.
        self._last_trial = 0
        #: Seconds that drafting for a sequence takes, and learning from what came of it.
        self._proposing = _Mean(0.0, 0.05)
        self._learning = _Mean(0.0, 0.05)
        self._worth = _Worth()

    def attach(self, mirror: GlobalMirror) -> None:
        """Uses a mirror for its tenant's requests that begin from now on, and for no other's."""
        self._mirrors[mirror.tenant] = mirror

    def learner(self, tenant: str) -> AcceptanceModel:
        """What was learnt of a tenant's texts; to be used on the engine's thread alone."""
        learner = self._learners.get(tenant)
        if learner is None:
            learner = self._learners[tenant] = AcceptanceModel()
        return learner

    def reliability(self) -> list[Reliability]:
        """What was predicted and what came of it, over all tenants; any thread may ask."""
        return [
            Reliability(
                sum(part.num_guesses for part in tenth),
                sum(part.predicted for part in tenth),
                sum(part.accepted for part in tenth),
            )
            for tenth in zip(
                *[learner.reliability() for learner in list(self._learners.values())], strict=True
            )
        ]

    def propose(self, requests: Sequence[Request], max_nodes: int) -> list[DraftTree | None]:
        """One tree of at most `max_nodes` guesses per request, None where nothing pays.

        The price counts every request given, so pass the whole decoding batch. Requests that are not
        decoding get None. Nothing beyond a request's max_tokens is guessed.
        """
        begun = time.perf_counter()
        self._num_steps += 1
        trees: list[DraftTree | None] = [None] * len(requests)
        if self._strategy is SpeculationMode.OFF or max_nodes < 1:
            return trees
        self._worth.step(len(requests))
        drafted: list[tuple[int, _Sequence]] = []
        jobs: list[SequenceInput] = []
        for n, request in enumerate(requests):
            room = request.sampling.max_tokens - len(request.output_token_ids) - 1
            if room < 1 or request.speculation is SpeculationMode.OFF or not request.is_decoding:
                continue
            sequence = self._sequences.get(request.request_id)
            if sequence is None:
                sequence = self._sequences[request.request_id] = self._begin(request)
            if self._num_steps & (sequence.rest_mask if self._worth.is_given else _LONGEST_REST):
                continue
            drafted.append((n, sequence))
            jobs.append(sequence.prepare(request, room))
        if not jobs:
            return trees
        context = sum([request.num_computed_tokens for request in requests])
        max_guesses = min(max_nodes, MAX_TREE_NODES - 1)
        is_trial = self._num_steps - self._last_trial >= _STEPS_TO_RETRIAL
        cost = self._first_cost if is_trial else self.step_cost
        seconds = cost.curve(len(requests), context, max_guesses * len(jobs))
        own_seconds = self._proposing.value + self._learning.value
        own_share = own_seconds / (self.step_cost.mean_seconds or 1.0)
        made = native.draft_batch(jobs, max_guesses, len(requests), seconds, own_share * seconds[0])
        self._worth.note(made.gain - 1.0, own_share * len(jobs))
        for (n, sequence), tree, is_vain in zip(drafted, made.trees(), made.is_vain, strict=True):
            trees[n] = tree
            if tree is not None or is_trial:
                self._last_trial = self._num_steps
            sequence.judge(is_drafted=tree is not None, is_vain=bool(is_vain))
        self._proposing.add(min((time.perf_counter() - begun) / len(jobs), _MOST_OWN_SECONDS))
        return trees

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        self.step_cost.observe(num_sequences, context, num_guesses, seconds)

    def extend(self, emitted: Sequence[Emitted], logits: Tensor | None = None) -> None:
        """Learns from what a step has emitted for requests, the bonus tokens included.

        logits [rows, vocab] float32; None: what else was likely is not learnt.

        May be called before or after the tokens are appended to the request.
        """
        begun = time.perf_counter()
        jobs: list[SequenceInput] = []
        token_ids: list[Sequence[int]] = []
        wanted: list[int] = []
        for one in emitted:
            sequence = self._sequences.get(one.request.request_id)
            if sequence is not None and sequence.is_drafted:
                sequence.is_drafted = False
                jobs.append(sequence.job)
                token_ids.append(one.token_ids)
                wanted += one.logits_rows
        if not jobs:
            return
        likeliest = None
        if logits is not None and logits.shape[1] >= NUM_RECYCLED:
            likeliest = likeliest_of(logits, wanted)
        native.learn(jobs, token_ids, likeliest)
        self._learning.add(min((time.perf_counter() - begun) / len(jobs), _MOST_OWN_SECONDS))

    def forget(self, request_id: str) -> None:
        """Drops what is known of a finished request; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def forget_tenant(self, tenant: str) -> None:
        """Drops what was learnt of a tenant's texts; its mirror is its owner's to empty.

        Requests under way keep the successors that the model thought likely until they end.
        """
        learner = self._learners.get(tenant)
        if learner is not None:
            # Not another one: what was counted goes on being counted.
            learner.load_bytes(AcceptanceModel().to_bytes())
        self._recyclers.pop(tenant, None)

    @property
    def num_sequences(self) -> int:
        """Requests whose text is held; 0 when idle."""
        return len(self._sequences)

    def num_indexed(self, request_id: str) -> int:
        """Tokens of a request's text that drafts may come from."""
        sequence = self._sequences.get(request_id)
        return sequence.text.num_tokens if sequence is not None else 0

    def _begin(self, request: Request) -> _Sequence:
        strategy = request.speculation or self._strategy
        mirror = None
        if SpeculationMode.LOCAL not in (strategy, self._strategy):
            mirror = self._mirrors.get(request.tenant)
        max_chain = MAX_CHAIN if strategy is SpeculationMode.CHAIN else 0
        recycler = self._recyclers.get(request.tenant)
        if recycler is None:
            recycler = self._recyclers[request.tenant] = Recycler()
        return _Sequence(request, self.learner(request.tenant), recycler, mirror, max_chain=max_chain)


def drafter_for(speculation: str) -> Drafter | None:
    """A drafter without a mirror, for an engine alone; None for "off"."""
    mode = SpeculationMode(speculation)
    return None if mode is SpeculationMode.OFF else Drafter(None, DraftPolicy(strategy=mode))
