"""When the sequences of a decode pod begin and end, if more are there than it computes at once.

The pod computes `max_batch` sequences. Those that are due earliest have a place, the others wait until one
ends; so who is due late delays nobody who is due earlier, and its prompt is not computed meanwhile.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from operator import attrgetter

from tandem_gateway.fleet.pods import Pod


@dataclass(frozen=True, eq=False)
class Turn:
    """What one request needs. Each is its own, also one that needs the same as another."""

    #: Monotonic seconds.
    due: float
    num_places: int
    #: To compute its prompt there; 0 if it is computed already, or elsewhere.
    prompt_s: float
    #: Of the answer, expected.
    num_tokens: float


class BatchPlan:
    """Of one pod, from now."""

    def __init__(self, pod: Pod, turns: Iterable[Turn], context: int) -> None:
        """`context`: cached tokens of a sequence, about."""
        self._turns = sorted(turns, key=attrgetter("due"))
        num_own, most = sum([turn.num_places for turn in self._turns]), pod.load.max_batch
        #: What sequences of other gateways leave, of which is not known here when they are due; if all are
        #: more than the places, a part of these.
        share = round(most * num_own / max(num_own + pod.num_foreign, 1))
        self.num_places = max(most - pod.num_foreign, share, 1)
        self.is_full = num_own > self.num_places
        #: Seconds until each begins and ends.
        self._times: dict[Turn, tuple[float, float]] = {}
        #: When prompts begin, in order; and how many seconds of work begin before each.
        self._begins: list[float] = []
        self._seconds: list[float] = [0.0]
        if self.is_full:
            self._pace = pod.load.pace(self.num_places, context)
            # First without the prompts that begin while an answer runs, which the first result tells.
            for _ in range(2):
                self._arrange()

    def _arrange(self) -> None:
        times: dict[Turn, tuple[float, float]] = {}
        ends: list[float] = []
        for turn in self._turns:
            begin = 0.0
            while ends and len(ends) + turn.num_places > self.num_places:
                begin = heappop(ends)
            prompts = self.prompts(*self._times[turn]) if turn in self._times else (0, 0.0)
            end = begin + turn.prompt_s + self._pace.seconds(turn.num_tokens, *prompts)
            times[turn] = begin, end
            for _ in range(turn.num_places):
                heappush(ends, end)
        self._times = times
        ordered = sorted([(begin, turn.prompt_s) for turn, (begin, _) in times.items() if turn.prompt_s])
        self._begins = [begin for begin, _ in ordered]
        self._seconds = [0.0, *accumulate([seconds for _, seconds in ordered])]

    def times(self, turn: Turn) -> tuple[float, float]:
        """Seconds until it begins, and until it ends. Of a full pod."""
        return self._times[turn]

    def prompts(self, begin_s: float, end_s: float) -> tuple[int, float]:
        """Those that begin in between, and their seconds of work."""
        first, last = bisect_left(self._begins, begin_s), bisect_left(self._begins, end_s)
        return last - first, self._seconds[last] - self._seconds[first]
