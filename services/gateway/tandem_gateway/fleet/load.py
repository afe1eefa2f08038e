"""Tracks the work of each pod, from the pod's last report and this gateway's own requests since.

    report ──> PodLoad (costs, limits, free blocks) ──┐
                                                      ├──> jobs of the pod model ──> timeline
    Placed: a request on its pods, one Work on each ──┘

The works of other gateways' requests come from the reports. All times are monotonic seconds of this process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tandem_core.codec import step_cost_from_proto, tokens_per_step_from_proto
from tandem_core.contracts import DEFAULT_DUE_S
from tandem_core.pod_model import Job, PodModel, Times, timeline
from tandem_core.step_cost import StepCost
from tandem_proto.v1 import common_pb2

from tandem_gateway.request import TokenizedRequest

if TYPE_CHECKING:
    from tandem_gateway.fleet.routing import Route

#: Number of ids of ended requests that are kept, because a report may be older than their end.
_MAX_ENDED = 1024
#: Assumed for a pod that has not computed anything yet.
_UNKNOWN = PodModel(StepCost(per_token=0.001), StepCost(per_step=0.02, per_token=0.002), 32, 512, 512)
#: Assumed remaining tokens and context of another gateway's answer, which reports do not contain.
_FOREIGN_TOKENS, _FOREIGN_CONTEXT = 128, 512
#: Assumed share of the running step that has passed: the mean.
_STEP_SHARE = 0.5


@dataclass(frozen=True)
class PodLoad:
    """The part of a pod's last report that routing and prediction use."""

    model: PodModel = _UNKNOWN
    #: Whether the pod has measured the step costs of prompts, and of decoding.
    knows_prompts: bool = False
    knows_texts: bool = False
    #: Free and cached blocks; cached ones are evicted when a request needs them.
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    #: Waiting and running requests.
    num_requests: int = 0
    #: A decode pod computes prompts with fewer uncached tokens itself; the second limit applies while it is
    #: idle.
    local_prefill_tokens: int = 0
    idle_prefill_tokens: int = 0

    @classmethod
    def of(cls, report: common_pb2.PodStatus) -> PodLoad:
        usage, default = report.usage, cls.model
        prefill, decode = step_cost_from_proto(report.prefill_cost), step_cost_from_proto(report.decode_cost)
        chunk_size = report.chunk_size or default.chunk_size
        return cls(
            model=PodModel(
                prefill if prefill.is_known else default.prefill,
                decode if decode.is_known else default.decode,
                report.max_batch or default.max_batch,
                chunk_size,
                min(chunk_size, report.enough_prompt_tokens or chunk_size),
                tokens_per_step_from_proto(report),
            ),
            knows_prompts=prefill.is_known,
            knows_texts=decode.is_known,
            free_blocks=usage.blocks_free + usage.blocks_cached,
            total_blocks=usage.blocks_total,
            block_size=report.block_size,
            num_requests=usage.requests_waiting + usage.requests_running,
            local_prefill_tokens=report.local_prefill_tokens,
            idle_prefill_tokens=report.idle_prefill_tokens,
        )


@dataclass(eq=False)
class Work:
    """The remaining work of a pod for one request."""

    #: Deadline by the objectives, in monotonic seconds.
    due: float
    #: Prompt tokens [start, stop) that the pod computes.
    start: float
    stop: int
    num_tokens: float
    context: int
    num_places: int = 1
    #: The request, if it is one of this gateway.
    placed: Placed | None = None

    @property
    def is_prompt(self) -> bool:
        return self.start < self.stop


class PodWorks:
    """The works of one pod, with the progress of its prompts. Belongs to one event loop."""

    def __init__(self, *, decodes: bool = True) -> None:
        """`decodes`: false for prefill pods, which compute only the first token of an answer."""
        self.load = PodLoad()
        self._decodes = decodes
        self._own: dict[Work, None] = {}
        self._foreign: list[Work] = []
        #: Ids of this gateway's requests on the pod, and of the last ones that ended.
        self.open_ids: set[str] = set()
        self._ended_ids: dict[str, None] = {}
        #: The time up to which the prompts' progress is counted.
        self._advanced_at = time.monotonic()

    @property
    def all(self) -> list[Work]:
        """All works, those of this gateway first."""
        return [*self._own, *self._foreign]

    @property
    def has_prompts(self) -> bool:
        self._advance()
        return any(work.is_prompt for work in self.all)

    def add(self, work: Work) -> None:
        self._advance()
        self._own[work] = None

    def remove(self, work: Work) -> None:
        self._advance()
        self._own.pop(work, None)

    def entered(self, request_id: str) -> None:
        """Notes a call for this request that begins."""
        self.open_ids.add(request_id)

    def left(self, request_id: str) -> None:
        self.open_ids.discard(request_id)
        self._ended_ids[request_id] = None
        if len(self._ended_ids) > _MAX_ENDED:
            del self._ended_ids[next(iter(self._ended_ids))]

    def shrink(self, work: Work, num_places: int, num_tokens: int) -> None:
        """Sets the places of a work, and removes this many prompt tokens from it."""
        self._advance()
        work.num_places = num_places
        if work.is_prompt:
            work.stop = max(work.stop - num_tokens, math.floor(work.start) + 1)

    def computed(self, work: Work) -> None:
        """Ends the prompt of a work."""
        self._advance()
        work.start = work.stop

    def report(self, load: PodLoad, prompts: Sequence[common_pb2.PromptWork], num_foreign: int) -> None:
        """Applies a report. `num_foreign`: number of other gateways' requests on the pod."""
        self._advance()
        self.load = load
        now, foreign = self._advanced_at, []
        own = {work.placed.request.request_id: work for work in self._own if work.placed is not None}
        for prompt in prompts:
            if prompt.request_id in own:
                work = own[prompt.request_id]
                if work.is_prompt and work.placed is not None and not work.placed.other_tokens:
                    work.start = min(max(work.start, prompt.start), work.stop - 1)
            elif prompt.request_id not in self.open_ids and prompt.request_id not in self._ended_ids:
                due = now + prompt.due_seconds
                num_tokens = _FOREIGN_TOKENS if self._decodes else 1
                foreign.append(Work(due, prompt.start, prompt.stop, num_tokens, prompt.stop))
        texts = max(num_foreign - len(foreign), 0) * self._decodes
        foreign += [Work(-math.inf, 0, 0, _FOREIGN_TOKENS, _FOREIGN_CONTEXT) for _ in range(texts)]
        self._foreign = foreign

    def _advance(self) -> None:
        """Advances the prompts by the time since the last call, the earliest deadline first."""
        now = time.monotonic()
        passed_s, self._advanced_at = now - self._advanced_at, now
        while passed_s > 0:
            works = [work for work in self.all if work.is_prompt]
            if not works:
                return
            work = min(works, key=lambda one: one.due)
            left_s = self._prompt_s(work)
            if left_s > passed_s or work.placed is not None:
                # The last token counts as computed only when the first output token arrives.
                tokens = (work.stop - work.start) * passed_s / left_s
                work.start = min(work.start + tokens, work.stop - 1)
                return
            work.start = work.stop
            if not self._decodes:
                self._foreign.remove(work)
            passed_s -= left_s

    def _prompt_s(self, work: Work) -> float:
        """Seconds that the rest of a prompt takes while the pod's other sequences decode."""
        model = self.load.model
        texts = [one for one in self.all if not one.is_prompt]
        num_texts = min(sum([one.num_places for one in texts]), model.max_batch)
        size = model.enough_prompt_tokens if texts else model.chunk_size
        num_tokens = work.stop - work.start
        beside_s = model.decode_seconds(0, num_texts, work.context) * num_tokens / size if texts else 0.0
        return model.prefill.prompt_seconds(int(work.start), work.stop, size) + beside_s

    # -- prediction -----------------------------------------------------------------------------------

    def num_sequences(self) -> int:
        """Number of decoding sequences that this gateway knows of."""
        return sum([work.num_places for work in self.all if not work.is_prompt])

    def prompts_s(self, due: float) -> float:
        """Seconds to compute the prompts with deadlines before `due`."""
        self._advance()
        works = [w for w in self.all if w.is_prompt and w.due < due]
        return sum([self.load.model.prompt_seconds(int(work.start), work.stop) for work in works])

    def jobs(self, ready_s: Mapping[Work, float]) -> dict[Work, Job]:
        """The works as jobs of the pod model. `ready_s`: seconds until the KV of a work arrives."""
        self._advance()
        return {
            work: Job(
                work.due if work.placed is None else work.placed.due(self._advanced_at),
                int(work.start),
                work.stop,
                work.num_tokens if work.placed is None else work.placed.tokens_left(work),
                work.context,
                work.num_places,
                ready_s.get(work, -math.inf),
            )
            for work in self.all
        }

    def times(self, jobs: Mapping[Work, Job], coming: Sequence[Job] = ()) -> dict[Job, Times]:
        """The timeline of the pod's jobs together with the `coming` ones."""
        return timeline(self.load.model, [*jobs.values(), *coming], step_share=_STEP_SHARE)


@dataclass
class Track:
    """A predicted time of a request, predicted again when another request changes it."""

    #: Monotonic seconds of the first prediction, and of the last change.
    since: float
    changed_at: float
    #: Predicted seconds from `changed_at` on.
    left_s: float
    #: Predicted seconds up to `changed_at`.
    done_s: float = 0.0

    def change(self, now: float, before_s: float, after_s: float) -> None:
        """Records the arrival of another request: the rest takes `after_s` seconds instead of `before_s`."""
        self.done_s += self.left_s - before_s
        self.changed_at, self.left_s = now, after_s

    @property
    def model_s(self) -> float:
        """The whole predicted time, including the effect of all later requests."""
        return self.done_s + self.left_s


@dataclass(eq=False)
class Placed:
    """A request that has places, and its works on its pods."""

    request: TokenizedRequest
    num_places: int = 1
    #: Tokens of the call's other prompts, which are computed before its own.
    other_tokens: int = 0
    #: None: no decode pod was available yet.
    route: Route | None = None
    #: Output tokens so far, including those of a resumed answer.
    num_tokens: int = field(init=False)
    #: Monotonic seconds of the first token; None before it.
    first_at: float | None = None
    #: Predictions of the first token and of the end.
    first: Track | None = None
    end: Track | None = None
    _works: list[tuple[PodWorks, Work]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_tokens = len(self.request.output_token_ids)

    def move(self, route: Route) -> None:
        """Moves the request to the pods of this route."""
        self.leave()
        self.route = route
        for works, work in route.works(self):
            works.add(work)
            self._works.append((works, work))

    def leave(self) -> None:
        """Removes the request's works from its pods."""
        for works, work in self._works:
            works.remove(work)
        self._works.clear()

    def part(self, request: TokenizedRequest) -> Placed:
        """Splits off another choice of the call, which begins now. It gets its own works; until now its
        places, and its prompt if that differs, were part of this request's, which keeps its own places."""
        beams = request.sampling.beam_search
        part = Placed(request, 1 if beams is None else beams.width)
        # A call may have more choices than places: later ones take over those of choices that have ended.
        self.num_places = max(self.num_places - part.num_places, part.num_places)
        is_other = request.prompt_token_ids != self.request.prompt_token_ids
        num_tokens = min(len(request.prompt_token_ids), self.other_tokens) if is_other else 0
        self.other_tokens -= num_tokens
        for works, work in self._works:
            works.shrink(work, min(work.num_places, self.num_places), num_tokens)
        return part

    def computed(self) -> None:
        """Ends the prompt on its pod, once; later calls do nothing."""
        if self.prompt_work is None:
            return
        for works, work in self._works:
            works.computed(work)
        # A prefill pod has nothing more to do.
        for works, work in self._works[1:]:
            works.remove(work)
        del self._works[1:]

    def gained(self, num_tokens: int, now: float) -> None:
        """Sets the number of tokens of the answer."""
        self.num_tokens = max(self.num_tokens, num_tokens)
        if self.first_at is None:
            self.first_at = now

    @property
    def answer_work(self) -> Work | None:
        """The work on the decode pod; None: no pod was chosen."""
        return self._works[0][1] if self._works else None

    @property
    def prompt_work(self) -> Work | None:
        """The work on the pod that computes the prompt; None: the prompt is computed, or no pod was
        chosen."""
        work = self._works[-1][1] if self._works else None
        return work if work is not None and work.is_prompt else None

    def tokens_left(self, work: Work) -> float:
        """Expected output tokens that a pod still has to compute."""
        assert self.route is not None
        num_left = self.route.tokens_left(self.num_tokens)
        if len(self._works) > 1:
            # The prefill pod computes the next token.
            return 1 if work is self._works[1][1] else max(num_left - 1, 1)
        return num_left

    def due(self, now: float) -> float:
        """The deadline by which its pods order it, in monotonic seconds: late answers are put off."""
        is_late = self.first_at is not None and self.request.late_at <= now
        return now + DEFAULT_DUE_S if is_late else self.request.due

    @property
    def starts_by(self) -> float:
        """Monotonic seconds by which the first token must come; inf: it has come, or has no objective."""
        slo = self.request.promised
        is_open = slo.ttft_s and self.first_at is None
        return self.request.arrived + slo.ttft_s if is_open else math.inf

    def ends_by(self, now: float) -> float:
        """Monotonic seconds by which the last token must come for E2E and TPOT; inf: no such objective."""
        assert self.route is not None
        slo, by = self.request.promised, math.inf
        if slo.e2e_s:
            by = self.request.arrived + slo.e2e_s
        if slo.tpot_s:
            first_at = self.first_at or max(now, self.first.since + self.first.model_s if self.first else now)
            num_tokens = self.num_tokens + self.route.tokens_left(self.num_tokens)
            by = min(by, first_at + slo.tpot_s * (num_tokens - 1))
        return by
