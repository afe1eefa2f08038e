"""What a pod has to do, as the gateway knows it: from the pod's last report, and from the requests that this
gateway has sent since.

All times are monotonic seconds of this process.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from tandem_core.codec import step_cost_from_proto, tokens_per_step_from_proto
from tandem_core.step_cost import UNKNOWN_COST, StepCost, tokens_gained
from tandem_proto.v1 import common_pb2

#: Own prompts that were computed are remembered, since a report may be older than that.
_MAX_COMPUTED = 1024
#: Costs of a pod that has not computed anything yet.
_UNKNOWN_PREFILL = StepCost(per_token=0.001)
_UNKNOWN_DECODE = StepCost(per_step=0.02, per_token=0.002)


@dataclass(frozen=True)
class Pace:
    """How fast each sequence of a batch gains tokens."""

    #: Per token in steps without prompts.
    token_s: float
    #: Tokens in a step.
    gained: float
    #: What the sequences add to the step of a prompt.
    beside_s: float

    def seconds(self, num_tokens: float, num_prompts: float, prompts_s: float) -> float:
        """As `PodLoad.answer_seconds`."""
        steps_s = prompts_s + num_prompts * self.beside_s
        gained = num_prompts * self.gained
        if gained >= num_tokens:
            return steps_s * num_tokens / max(gained, 1.0)
        return steps_s + (num_tokens - gained) * self.token_s


@dataclass(frozen=True)
class PodLoad:
    """The part of a pod's last report that routing and prediction use."""

    #: Free or cached; cached blocks are evicted when a request needs them.
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    #: Waiting and running.
    num_requests: int = 0
    chunk_size: int = 512
    #: The most prompt tokens of a step in which sequences decode.
    chunk_beside_texts: int = 512
    max_batch: int = 32
    prefill_cost: StepCost = UNKNOWN_COST
    decode_cost: StepCost = UNKNOWN_COST
    #: Tokens that a sequence gains in a decode step, see tokens_gained.
    tokens_per_step: tuple[float, ...] = (1.0,)
    #: A decode pod computes prompts with fewer uncached tokens itself; the second limit is an idle pod's.
    local_prefill_tokens: int = 0
    idle_prefill_tokens: int = 0

    @classmethod
    def of(cls, report: common_pb2.PodStatus) -> PodLoad:
        usage, chunk_size = report.usage, report.chunk_size or cls.chunk_size
        return cls(
            free_blocks=usage.blocks_free + usage.blocks_cached,
            total_blocks=usage.blocks_total,
            block_size=report.block_size,
            num_requests=usage.requests_waiting + usage.requests_running,
            chunk_size=chunk_size,
            chunk_beside_texts=min(chunk_size, report.enough_prompt_tokens or chunk_size),
            max_batch=report.max_batch or cls.max_batch,
            prefill_cost=step_cost_from_proto(report.prefill_cost),
            decode_cost=step_cost_from_proto(report.decode_cost),
            tokens_per_step=tokens_per_step_from_proto(report),
            local_prefill_tokens=report.local_prefill_tokens,
            idle_prefill_tokens=report.idle_prefill_tokens,
        )

    def prompt_seconds(self, start: int, stop: int) -> float:
        """To compute prompt tokens [start, stop), while nothing else runs."""
        cost = self.prefill_cost if self.prefill_cost.is_known else _UNKNOWN_PREFILL
        return cost.prompt_seconds(start, stop, self.chunk_size)

    @property
    def chunk_seconds(self) -> float:
        """The longest step of a prompt."""
        return self.prompt_seconds(0, self.chunk_size)

    def token_seconds(self, num_sequences: float, context: int) -> float:
        """Per output token of each of so many sequences, which have so many cached tokens on average."""
        together = min(num_sequences, self.max_batch)
        step_s = self.decode_seconds(1, together, context)
        # Those that do not fit take turns.
        return step_s / self.gained(num_sequences) * num_sequences / together

    def gained(self, num_sequences: float) -> float:
        """Tokens of each of so many sequences in a step."""
        return tokens_gained(self.tokens_per_step, min(num_sequences, self.max_batch))

    def answer_seconds(
        self, num_tokens: float, num_sequences: float, context: int, num_prompts: float, prompts_s: float
    ) -> float:
        """Of so many output tokens of each of so many sequences, while the pod computes prompts, which take
        `prompts_s` alone: the sequences decode in the same steps."""
        return self.pace(num_sequences, context).seconds(num_tokens, num_prompts, prompts_s)

    def pace(self, num_sequences: float, context: int) -> Pace:
        """Of each of so many sequences."""
        return Pace(
            self.token_seconds(num_sequences, context),
            self.gained(num_sequences),
            self.decode_seconds(0, num_sequences, context),
        )

    def decode_seconds(self, num_steps: float, num_sequences: float, context: int) -> float:
        """Of steps in which so many sequences decode; 0 steps: what they add to a step of a prompt."""
        cost = self.decode_cost if self.decode_cost.is_known else _UNKNOWN_DECODE
        return cost.seconds(num_steps, num_sequences, num_sequences * context)


class Backlog:
    """Prompts that a pod has yet to compute, each with its deadline and its seconds of work.

    The pod serves the earliest deadline first, so that a new request waits for those before its own, and for
    the end of the step that runs.
    """

    def __init__(self) -> None:
        #: This gateway's own, by request id.
        self._own: dict[str, tuple[float, float]] = {}
        #: When their first tokens are late.
        self._limits: dict[str, float] = {}
        #: Ids of the last ones that were computed, the oldest first.
        self._computed: dict[str, None] = {}
        #: The one that the pod computes, and since when.
        self._current = ""
        self._begun = 0.0
        #: Those that others sent, at the last report.
        self._reported_at = 0.0
        self._others = _Sums([])

    @property
    def is_empty(self) -> bool:
        return not self._own and self._foreign(math.inf) <= 0

    def add(self, request_id: str, due: float, seconds: float, *, limit: float = math.inf) -> None:
        """A prompt; `due` is its place in the order, `limit` when its first token is late."""
        self._own[request_id] = (due, seconds)
        self._limits[request_id] = limit
        if not self._current:
            self._begin_next()

    def remove(self, request_id: str) -> None:
        """The prompt is computed, or its request has ended; unknown ids are ignored."""
        if self._own.pop(request_id, None) is not None:
            del self._limits[request_id]
            self._computed[request_id] = None
            if len(self._computed) > _MAX_COMPUTED:
                del self._computed[next(iter(self._computed))]
            self._begin_next()

    def _begin_next(self) -> None:
        self._current = min(self._own, key=self._own.__getitem__, default="")
        self._begun = time.monotonic()

    def report(self, prompts: Sequence[tuple[str, float, float]]) -> None:
        """What the pod says it has yet to compute, from all gateways: id, deadline and seconds of each."""
        self._reported_at = time.monotonic()
        self._others = _Sums(
            [
                (due, seconds)
                for request_id, due, seconds in prompts
                if request_id not in self._own and request_id not in self._computed
            ]
        )

    def seconds(self, due: float, step_s: float = 0.0) -> float:
        """Until a request with this deadline is the first. `step_s`: the longest step of a prompt; one that
        runs is ended, whatever its deadline."""
        step_left_s = 0.0
        if self._current and self._own[self._current][0] >= due:
            left_s = self._own[self._current][1] - self._done()
            # Of a longer prompt it is not known how far its step is.
            step_left_s = left_s if left_s < step_s else step_s / 2
        return step_left_s + self._present(due)

    def num_before(self, due: float) -> int:
        """Own prompts with earlier deadlines."""
        return sum([theirs < due for theirs, _ in self._own.values()])

    @property
    def num_own(self) -> int:
        return len(self._own)

    @property
    def present_s(self) -> float:
        """Of all prompts that are here."""
        return self._present(math.inf)

    def _present(self, due: float) -> float:
        before_s = _before(self._own.values(), due)
        if self._current and self._own[self._current][0] < due:
            before_s -= self._done()
        return max(before_s, 0.0) + max(self._foreign(due), 0.0)

    def _done(self) -> float:
        """Of the own prompt that the pod computes: at most all, or it would have been removed."""
        _, seconds = self._own.get(self._current, (0.0, 0.0))
        return min(time.monotonic() - self._begun, seconds)

    def _foreign(self, due: float) -> float:
        """Of other gateways; negative where the pod has had time for more than it had reported."""
        return self._others.before(due) - (time.monotonic() - self._reported_at)

    def slack(self, due: float, beside_s: float = 0.0) -> float:
        """The most work with this deadline that makes no later prompt late; those that will be late anyway do
        not count. `beside_s`: what sequences that decode add to the step of each prompt."""
        now, done, least = time.monotonic(), self._done(), math.inf
        own = 0.0  # what comes before it, and itself
        for (theirs, seconds), limit in sorted(
            (one, self._limits[request_id]) for request_id, one in self._own.items()
        ):
            own += seconds + beside_s
            if theirs > due:
                before = max(own - done, 0.0) + max(self._foreign(theirs), 0.0)
                if before <= limit - now:
                    least = min(least, limit - now - before)
        return least


class _Sums:
    """Seconds of work by deadline."""

    def __init__(self, work: Iterable[tuple[float, float]]) -> None:
        ordered = sorted(work)
        self._dues = [due for due, _ in ordered]
        self._sums = [0.0, *accumulate(seconds for _, seconds in ordered)]

    def before(self, due: float) -> float:
        return self._sums[bisect_left(self._dues, due)]


def _before(work: Iterable[tuple[float, float]], due: float) -> float:
    return sum([seconds for theirs, seconds in work if theirs < due])
