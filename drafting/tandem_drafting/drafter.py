"""Drafts a batch: which guesses to verify in the next step, over all sequences at once.

    propose   grow all trees best first while it pays
    (engine)  verifies the trees and accepts a path of each
    extend    compare the accepted tokens with what was considered, sent or not, and learn; index them; keep
              what else the model thought likely
    forget    the request is over

C++ does the work (drafting/csrc, through native.py), in one call for the whole batch: a call costs as much
as drafting for one sequence.

A draft never changes what is generated, only how fast: any tree is valid, a wrong one costs its rows.

Cost model and gate: a step with Q guesses takes T(Q) (step_cost.py) and yields E tokens, one per sequence
plus each guess's predicted acceptance. The Q with the largest E / T(Q) over the whole batch is drafted. A
sequence whose best candidate stays far below its cost backs off: it is drafted for in every second, fourth,
eighth or sixteenth step, the same steps for all such sequences.

The most tokens per second over the batch may be too slow for a sequence of which no guess is accepted. So
T(Q) stays below the tightest objective of the batch, but for those that T(0) does not keep either: an
objective per token, or the time until an end is due over the tokens that are left.
"""

from __future__ import annotations

import math
import time
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tandem_core.speculation import MAX_CHAIN, SpeculationMode
from tandem_engine.draft_source import Emitted, Likeliest
from tandem_engine.draft_tree import MAX_TREE_NODES, DraftTree
from tandem_engine.request import Request
from torch import Tensor

from tandem_drafting import native
from tandem_drafting.mirror import GlobalMirror
from tandem_drafting.native import (
    NUM_RECYCLED,
    AcceptanceModel,
    Recycler,
    Reliability,
    SequenceIndex,
    SequenceInput,
    TopTokens,
)
from tandem_drafting.step_cost import StepCost

#: Hopeless steps in a row before the interval between drafts doubles, and how often it doubles.
_STEPS_PER_DOUBLING = 2
_MAX_DOUBLINGS = 4
#: Weight of the newest step in the unit of the cost curve, and the factor by which that step may be longer
#: than expected; a longer one is a pause of the process.
_NEWEST_STEP, _LONGEST_STEP = 0.1, 1.25
#: Steps without guesses may be shorter by this factor than the curve says, while all have guesses.
_MAX_ERROR = 1.25
#: CPU seconds of a step in which guides may shape drafts; JSON schemas take 0.05 ms each.
_GUIDES_S = 0.005


@dataclass(frozen=True)
class DraftPolicy:
    """The drafting mode of a pod, and the prior of its step cost."""

    mode: SpeculationMode = SpeculationMode.GLOBAL
    #: Time of one more row relative to a step without drafts, before any measurement. High on purpose: likely
    #: guesses are sent anyway and measure the cost, while unlikely ones would slow down unpredictable text.
    row_cost: float = 0.1


class _Sequence:
    """The drafting state of a request."""

    def __init__(
        self,
        request: Request,
        model: AcceptanceModel,
        recycler: Recycler,
        mirror: GlobalMirror | None,
        *,
        max_chain: int,
    ) -> None:
        self.index = SequenceIndex(request.num_prompt_tokens)
        self.mirror = mirror
        self.input = SequenceInput(self.index, model, recycler=recycler, max_chain=max_chain)
        #: Whether the last step had a draft call for this sequence, so that `extend` has an outcome to learn.
        self.is_drafted = False
        self._num_hopeless = 0
        #: Bits of the step number that must be 0 for a draft.
        self.backoff_mask = 0

    def prepare(self, request: Request, room: int) -> SequenceInput:
        """The input, with the index up to date."""
        if self.index.num_tokens != request.num_tokens:
            self.index.extend(request.tokens(self.index.num_tokens, request.num_tokens))
        self.input.room = room
        if self.mirror is not None:
            self.input.own_run = self.mirror.run_of(request.request_id)
            self.input.set_corpus(self.mirror.corpus)
        self.is_drafted = True
        return self.input

    def back_off(self, *, has_draft: bool, is_hopeless: bool) -> None:
        """A draft ends the backoff, a hopeless step extends it."""
        if has_draft:
            self._num_hopeless = 0
        elif is_hopeless:
            self._num_hopeless += 1
        self.backoff_mask = (1 << min(self._num_hopeless // _STEPS_PER_DOUBLING, _MAX_DOUBLINGS)) - 1


class Drafter:
    """Owns sequence indexes and acceptance models. Used by one thread; others write the mirrors."""

    def __init__(self, mirror: GlobalMirror | None, policy: DraftPolicy) -> None:
        self._mode = policy.mode
        self._mirrors: dict[str, GlobalMirror] = {}
        if mirror is not None:
            self.attach(mirror)
        #: By tenant: nothing learned from one tenant's sequences serves another.
        self._models: dict[str, AcceptanceModel] = {}
        self._recyclers: dict[str, Recycler] = {}
        self._sequences: dict[str, _Sequence] = {}
        self.step_cost = StepCost(policy.row_cost)
        #: Sequences of the last draft, and the expected cost of the step by its number of draft tokens.
        self._expected: tuple[int, Sequence[float]] = (0, ())
        #: Seconds per unit of cost; 0: not measured yet.
        self._unit_s = 0.0
        self._num_steps = 0

    def attach(self, mirror: GlobalMirror) -> None:
        """Uses a mirror for its tenant's requests that begin from now on, and for no other's."""
        self._mirrors[mirror.tenant] = mirror

    def detach(self, tenant: str, mirror: GlobalMirror | None) -> None:
        """Frees what is held of a tenant, once its running requests end; what was learned from it is lost.

        A newer mirror of the tenant, attached since, stays.
        """
        if mirror is not None and self._mirrors.get(tenant) is mirror:
            del self._mirrors[tenant]
        self._models.pop(tenant, None)
        self._recyclers.pop(tenant, None)

    def reliability(self) -> list[Reliability]:
        """Predicted and realised acceptance over all tenants; any thread may ask."""
        return [
            Reliability(
                sum(part.num_guesses for part in tenth),
                sum(part.predicted for part in tenth),
                sum(part.accepted for part in tenth),
            )
            for tenth in zip(*[model.reliability() for model in list(self._models.values())], strict=True)
        ]

    def propose(
        self, requests: Sequence[Request], max_nodes: int, share: float = 1.0
    ) -> list[DraftTree | None]:
        """One tree of at most `max_nodes` guesses per request, None where nothing pays. share: of the time
        that their objectives leave, what guesses may take; what guides force is sent even so.

        The price counts every request given, so pass the whole decoding batch. Requests that are not
        decoding get None. Nothing beyond a request's max_tokens is guessed, and nothing that its guide
        forbids; what the guide forces comes first.
        """
        self._num_steps += 1
        trees: list[DraftTree | None] = [None] * len(requests)
        if self._mode is SpeculationMode.OFF or max_nodes < 1:
            return trees
        max_guesses = min(max_nodes, MAX_TREE_NODES - 1)
        self._expected = 0, ()
        self._grow(trees, requests, max_guesses, share)
        self._guide(trees, requests, max_guesses)
        return trees

    def _guide(self, trees: list[DraftTree | None], requests: Sequence[Request], max_guesses: int) -> None:
        """Filters the trees by guides and adds forced text, for at most `_GUIDES_S` in all. Each step starts
        with another request. A guide just below the limit for slow ones takes up to 5 ms, which delays all
        requests."""
        ends = time.thread_time() + _GUIDES_S
        for at in range(len(requests)):
            n = (at + self._num_steps) % len(requests)
            request = requests[n]
            if request.guide is None or not _may_draft(request):
                continue
            most = min(max_guesses, _room(request)) if time.thread_time() < ends else 0
            trees[n] = request.guide.draft(request.output_token_ids, trees[n], most) if most else None

    def _grow(
        self, trees: list[DraftTree | None], requests: Sequence[Request], max_guesses: int, share: float
    ) -> None:
        drafted: list[tuple[int, _Sequence]] = []
        inputs: list[SequenceInput] = []
        for n, request in enumerate(requests):
            if not _may_draft(request):
                continue
            sequence = self._sequences.get(request.request_id)
            if sequence is None:
                sequence = self._sequences[request.request_id] = self._begin(request)
            if self._num_steps & sequence.backoff_mask:
                continue
            drafted.append((n, sequence))
            inputs.append(sequence.prepare(request, _room(request)))
        if not inputs:
            return
        context = sum([request.num_computed_tokens for request in requests])
        seconds = self.step_cost.curve(len(requests), context, max_guesses * len(inputs))
        self._expected = len(requests), seconds
        in_time = self._in_time(seconds, requests, share)
        made = native.draft_batch(inputs, max_guesses, len(requests), in_time)
        for (n, sequence), tree, is_hopeless in zip(drafted, made.trees(), made.is_hopeless, strict=True):
            trees[n] = tree
            sequence.back_off(has_draft=tree is not None, is_hopeless=bool(is_hopeless))

    def _in_time(self, seconds: array[float], requests: Sequence[Request], share: float) -> array[float]:
        """The part of the curve that keeps the tightest objective that can be kept."""
        if not self._unit_s:
            return seconds
        plain = seconds[0]
        now = time.monotonic()
        limits = [request.token_limit_s(now) / self._unit_s for request in requests]
        kept = [limit for limit in limits if plain <= limit * _MAX_ERROR < math.inf]
        if not kept:
            return seconds
        limit = plain + share * (min(kept) - plain)
        return seconds[: max(bisect_right(seconds, limit), 1)]

    def observe_step(self, num_sequences: int, context: int, num_guesses: int, seconds: float) -> None:
        self.step_cost.observe(num_sequences, context, num_guesses, seconds)
        num_drafted, expected = self._expected
        if num_sequences == num_drafted and num_guesses < len(expected):
            unit_s = seconds / expected[num_guesses]
            if self._unit_s:
                unit_s = min(unit_s, _LONGEST_STEP * self._unit_s)
                unit_s = self._unit_s + _NEWEST_STEP * (unit_s - self._unit_s)
            self._unit_s = unit_s

    def extend(self, emitted: Sequence[Emitted], logits: Tensor | Likeliest | None = None) -> None:
        """Learns from the tokens that a step emitted, the bonus tokens included.

        logits [rows, vocab] float32 on the CPU, or what a device found in them; None: token recycling learns
        nothing. Call it before or after the tokens are appended to the request.
        """
        inputs: list[SequenceInput] = []
        token_ids: list[Sequence[int]] = []
        rows: list[int] = []
        for one in emitted:
            sequence = self._sequences.get(one.request.request_id)
            if sequence is not None and sequence.is_drafted:
                sequence.is_drafted = False
                inputs.append(sequence.input)
                token_ids.append(one.token_ids)
                rows += one.logits_rows
        if not inputs:
            return
        top = None
        if isinstance(logits, Likeliest):
            if logits.token_ids.shape[1] >= NUM_RECYCLED:
                top = TopTokens.of_tokens(
                    logits.token_ids[rows, :NUM_RECYCLED], logits.logits[rows, :NUM_RECYCLED]
                )
        elif logits is not None and logits.shape[1] >= NUM_RECYCLED:
            logits = logits.contiguous()
            top = TopTokens.of_logits(logits.data_ptr(), logits.shape[1], rows)
        native.learn(inputs, token_ids, top)

    def forget(self, request_id: str) -> None:
        """Drops what is known of a finished request; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def forget_tenant(self, tenant: str) -> None:
        """Drops what was learned from a tenant's sequences; its mirror is emptied by its owner.

        Running requests keep their recycled tokens until they end.
        """
        model = self._models.get(tenant)
        if model is not None:
            model.reset()
        self._recyclers.pop(tenant, None)

    @property
    def num_sequences(self) -> int:
        """Requests whose text is held; 0 when idle."""
        return len(self._sequences)

    def num_indexed(self, request_id: str) -> int:
        """Tokens of a request's text that drafts may come from."""
        sequence = self._sequences.get(request_id)
        return sequence.index.num_tokens if sequence is not None else 0

    def _begin(self, request: Request) -> _Sequence:
        mode = request.speculation or self._mode
        mirror = None
        if SpeculationMode.LOCAL not in (mode, self._mode):
            mirror = self._mirrors.get(request.tenant)
        max_chain = MAX_CHAIN if mode is SpeculationMode.CHAIN else 0
        model = self._models.get(request.tenant)
        if model is None:
            model = self._models[request.tenant] = AcceptanceModel()
        recycler = self._recyclers.get(request.tenant)
        if recycler is None:
            recycler = self._recyclers[request.tenant] = Recycler()
        return _Sequence(request, model, recycler, mirror, max_chain=max_chain)


def _room(request: Request) -> int:
    """Guesses that can matter: the last token needs none."""
    return request.sampling.max_tokens - len(request.output_token_ids) - 1


def _may_draft(request: Request) -> bool:
    return _room(request) >= 1 and request.speculation is not SpeculationMode.OFF and request.is_decoding


def drafter_for(speculation: str) -> Drafter | None:
    """A drafter without a mirror, for an engine alone; None for "off"."""
    mode = SpeculationMode(speculation)
    return None if mode is SpeculationMode.OFF else Drafter(None, DraftPolicy(mode=mode))
