"""All text of one namespace: what its requests generated, and which of it is shared.

    raw runs     what each request generated (and its prompt, where the tenant wants that); stays here
    stretches    parts of raw runs that `promotion_requests` distinct requests hold; go to the pods

The guarantee: pods get stretches and nothing else. Each is, as a whole, text that k = `promotion_requests`
distinct requests of this namespace generated (or were given, where prompts are shared); so is every n-gram
within one. A request's prompt and its output count as one request. Requests are told apart, not people: what
one person generates twice, or finds in k prompts of one conversation, is shared. Imported text was generated
by k requests elsewhere.

The same spans in the same order give the same stretches; a replica that begins with a snapshot may cut
some of them elsewhere, under other names.

What is given up when there are more than `max_bytes`: of the text that nobody has repeated so far, the
oldest; of the other, what is worth least, every use being worth 2^(-age / half-life). Each kind may take the
whole room while the other does not need its half. Time is the stream's, so that replicas agree.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import xxhash
from tandem_drafting import native
from tandem_drafting.promoter import Promoter, Stretch
from tandem_drafting.spans import AcceptedSpan
from tandem_drafting.text_store import TextStore

#: What a token and a run take in memory, about; counted rather than measured, so that replicas agree.
BYTES_PER_TOKEN = 32
BYTES_PER_RUN = 900
#: After giving up text there is room for this share of the cap.
_ROOM = 1 / 8


@dataclass(frozen=True)
class TextPolicy:
    """What is shared and what is kept."""

    promotion_requests: int = 2
    max_bytes: int = 64 << 20
    half_life_s: float = 86_400.0


@dataclass
class RawRun:
    """Consecutive tokens of a request's output or prompt, or an imported run; the promoter holds them."""

    number: int
    name: str
    is_prompt: bool
    is_imported: bool
    #: In the output or prompt, of the first token.
    offset: int
    num_tokens: int = 0
    #: Begin -> end, in the order of their ends.
    stretches: dict[int, int] = field(default_factory=dict)
    #: Somebody else generated some of it too.
    is_used: bool = False
    #: log2 of the uses' worth, at a time at which it cancels out.
    worth: float = -math.inf

    @property
    def end(self) -> int:
        return self.offset + self.num_tokens

    @property
    def num_bytes(self) -> int:
        return BYTES_PER_RUN + BYTES_PER_TOKEN * self.num_tokens

    @property
    def request(self) -> int:
        """Of which request it is, as a number."""
        return xxhash.xxh3_64_intdigest(self.name.encode())

    @property
    def last_stretch(self) -> Stretch | None:
        if not self.stretches:
            return None
        begin = next(reversed(self.stretches))
        return Stretch(begin, self.stretches[begin])


class NamespaceText:
    """Not for several threads at once. Where the drafter was not compiled it holds and shares nothing."""

    def __init__(self, policy: TextPolicy) -> None:
        self.policy = policy
        self._promoter = Promoter(policy.promotion_requests) if native.LIBRARY is not None else None
        self._runs: dict[int, RawRun] = {}
        #: By name and kind, the run that further tokens go on with.
        self._open: dict[tuple[str, bool], int] = {}
        self._next_number = 0
        #: At most this much is held, as `num_bytes` counts.
        self.max_bytes = policy.max_bytes
        self.num_bytes = 0
        #: Tokens held, and those of them in stretches, once per stretch.
        self.num_tokens = 0
        self.num_shared_tokens = 0

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    def runs(self) -> Iterator[RawRun]:
        """All that is held, in the order in which it was first heard of."""
        return iter(self._runs.values())

    def tokens(self, run: RawRun) -> Sequence[int]:
        return self._promoter.read(run.number, 0, run.num_tokens) if self._promoter is not None else ()

    def add(self, spans: Iterable[AcceptedSpan], time_s: float) -> tuple[int, list[AcceptedSpan]]:
        """Takes what requests generated; how many tokens were new, and what is to be shared now.

        Repetitions count once. Behind a gap a request's run begins anew.
        """
        num_new = 0
        shared: list[AcceptedSpan] = []
        if self._promoter is None:
            return 0, shared
        for span in spans:
            run = self._run_for(span, is_imported=False)
            new = span.token_ids[run.end - span.offset :]
            if not new:
                continue
            found = self._promoter.append(run.number, run.request, new)
            self._count(run, len(new))
            num_new += len(new)
            self._touch(run, time_s, is_shared=bool(found))
            for stretch in found:
                shared.append(self._share(run, stretch))
                if stretch.supporter is not None:
                    self._use(self._runs[stretch.supporter], time_s)
            if self.num_bytes > self.max_bytes:
                self._give_up(keep=run)
        return num_new, shared

    def add_shared(self, spans: Iterable[AcceptedSpan], time_s: float) -> tuple[int, list[AcceptedSpan]]:
        """The same for text that is to be shared as it is: it comes from another cluster's pods."""
        num_new = 0
        shared: list[AcceptedSpan] = []
        if self._promoter is None:
            return 0, shared
        for span in spans:
            run = self._run_for(span, is_imported=True)
            new = span.token_ids[run.end - span.offset :]
            if not new:
                continue
            self._promoter.restore(run.number, run.request, new, None)
            self._count(run, len(new))
            num_new += len(new)
            self._touch(run, time_s, is_shared=True)
            shared.append(self._share(run, Stretch(0, run.num_tokens)))
            if self.num_bytes > self.max_bytes:
                self._give_up(keep=run)
        return num_new, shared

    def shared(self) -> TextStore:
        """What pods may hold, what is worth most last."""
        store = TextStore(max_tokens=2**62)
        for run in sorted(self._runs.values(), key=lambda run: (run.worth, run.number)):
            for begin, end in run.stretches.items():
                store.add(self._span(run, begin, begin, end))
        return store

    def restore(self, run: RawRun, tokens: Sequence[int], *, keeps_stretches: bool) -> None:
        """Adds a run of an earlier life, whose number is made anew; its stretches too if they still hold."""
        if self._promoter is None:
            return
        run.number = self._next_number
        self._next_number += 1
        self._runs[run.number] = run
        self._open[run.name, run.is_prompt] = run.number
        if keeps_stretches or run.is_imported:
            self._promoter.restore(run.number, run.request, tokens, run.last_stretch)
        else:
            run.stretches.clear()
            for stretch in self._promoter.append(run.number, run.request, tokens):
                run.stretches[stretch.begin] = stretch.end
        self.num_tokens += run.num_tokens
        self.num_bytes += run.num_bytes
        self.num_shared_tokens += sum(end - begin for begin, end in run.stretches.items())

    def trim(self) -> None:
        """Gives up what is over the cap, which may have become smaller."""
        if self.num_bytes > self.max_bytes:
            self._give_up(keep=None)

    def _run_for(self, span: AcceptedSpan, *, is_imported: bool) -> RawRun:
        """The run that the span goes on with, or a new one where there is none or a gap."""
        key = (span.run, span.is_prompt)
        number = self._open.get(key)
        if number is not None and span.offset <= self._runs[number].end:
            return self._runs[number]
        run = RawRun(self._next_number, span.run, span.is_prompt, is_imported, span.offset)
        self._next_number += 1
        self._runs[run.number] = run
        self._open[key] = run.number
        self.num_bytes += run.num_bytes
        return run

    def _count(self, run: RawRun, num_new: int) -> None:
        run.num_tokens += num_new
        self.num_tokens += num_new
        self.num_bytes += BYTES_PER_TOKEN * num_new

    def _share(self, run: RawRun, stretch: Stretch) -> AcceptedSpan:
        """What of a stretch has not been shared yet; it is from now on."""
        already = run.stretches.get(stretch.begin, stretch.begin)
        run.stretches[stretch.begin] = stretch.end
        self.num_shared_tokens += stretch.end - already
        return self._span(run, stretch.begin, already, stretch.end)

    def _span(self, run: RawRun, stretch_begin: int, begin: int, end: int) -> AcceptedSpan:
        assert self._promoter is not None
        tokens = tuple(self._promoter.read(run.number, begin, end))
        return AcceptedSpan(self._shared_name(run, stretch_begin), begin - stretch_begin, tokens)

    def _shared_name(self, run: RawRun, begin: int) -> str:
        """Shared at once, a request's output goes by the request's name, so that its pod knows it. Else names
        do not even tell which stretches are of one request.
        """
        if run.is_imported:
            return run.name
        if self.policy.promotion_requests == 1 and not run.is_prompt and run.offset == 0:
            return run.name
        place = f"{run.name}/{run.is_prompt:d}/{run.offset + begin}"
        return xxhash.xxh3_64_hexdigest(place.encode())

    def _touch(self, run: RawRun, time_s: float, *, is_shared: bool) -> None:
        """The run has grown: to be generated is its first use."""
        run.is_used = run.is_used or is_shared
        run.worth = max(run.worth, time_s / self.policy.half_life_s)

    def _use(self, run: RawRun, time_s: float) -> None:
        """Another request has begun to say the same: adds up 2^(time / half-life), as a logarithm."""
        now = time_s / self.policy.half_life_s
        run.is_used = True
        apart = abs(run.worth - now)
        run.worth = max(run.worth, now) + (math.log2(1 + 2**-apart) if apart < 60 else 0.0)

    def _give_up(self, keep: RawRun | None) -> None:
        """Drops runs, what is worth least first, until there is room again."""
        target = int(self.max_bytes * (1 - _ROOM))
        waiting, used = _Pile(), _Pile()
        for run in self._runs.values():
            if run is not keep:
                (used if run.is_used else waiting).add(run)
        waiting.sort()
        used.sort()
        while self.num_bytes > target and (waiting.runs or used.runs):
            takes_waiting = waiting.num_bytes > target // 2 or not used.runs
            self._drop((waiting if takes_waiting and waiting.runs else used).pop())

    def _drop(self, run: RawRun) -> None:
        assert self._promoter is not None
        self._promoter.drop(run.number)
        del self._runs[run.number]
        if self._open.get((run.name, run.is_prompt)) == run.number:
            del self._open[run.name, run.is_prompt]
        self.num_tokens -= run.num_tokens
        self.num_bytes -= run.num_bytes
        self.num_shared_tokens -= sum(end - begin for begin, end in run.stretches.items())


class _Pile:
    """Runs of one kind, to be dropped from the end."""

    def __init__(self) -> None:
        self.runs: list[RawRun] = []
        self.num_bytes = 0

    def add(self, run: RawRun) -> None:
        self.runs.append(run)
        self.num_bytes += run.num_bytes

    def sort(self) -> None:
        self.runs.sort(key=lambda run: (run.worth, run.number), reverse=True)

    def pop(self) -> RawRun:
        run = self.runs.pop()
        self.num_bytes -= run.num_bytes
        return run
