"""Load on a fleet, faults by seed, and what must hold after each.

    reference     each case alone: its answer
    calm          all cases at once without faults: the same answers; the pauses to compare with
    round         clients ask cases without end; one fault after another, each when the streams that the one
                  before stopped have moved on
    end of round  the load ends: within `settle_s` nothing is held, then every process is back

An answer must equal its reference, whatever happened. A client whose gateway is lost resumes at another one
after the last event that it got, or begins anew if that is not known there.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from pod_usage import held
from tandem_cli.up.options import PodFlag
from tandem_core.model.manifest import ModelManifest
from tandem_service.interceptors import RETRY_AFTER_KEY

from tandem_chaos.faults import PROCESS_KINDS, ROLES, Fault, FaultKind, Injector
from tandem_chaos.growth import Growth
from tandem_chaos.load import Answer, Case, Client, Stream, make_cases, references
from tandem_chaos.report import ChaosReport
from tandem_chaos.system import BACK_LIMIT_S, ChaosSystem, ChaosSystemOptions, running_system
from tandem_chaos.violations import Violations

_LOOK_S = 0.01
#: Longest time between a client's requests. Without it the load would take the cores that restarts need.
_THINK_S = 0.4
_BLOCK_SIZE = 64
#: Longest answer and some drafts.
_ANSWER_ROOM = 512
#: A gateway that was harmed may lose calls for this long.
_GATEWAY_BACK_S = 10.0
#: With `full`: places of a gateway, in flight and in the queue, and requests that come at once.
_IN_FLIGHT, _QUEUE, _BURST = 16, 8, 64
#: Silence after which a stream must have left its pod: twice the gateway's limit.
_SILENCE_LIMIT_S = 2.0
#: Until everybody has noticed a death, and a silence.
_DEATH_S, _SILENCE_S = 0.3, 1.5


@dataclass(frozen=True)
class ChaosOptions:
    model: Path
    #: The processes' output and the data of Redis.
    folder: Path
    seed: int
    num_faults: int
    kinds: tuple[FaultKind, ...] = PROCESS_KINDS
    roles: tuple[str, ...] = ROLES
    num_prefill: int = 2
    num_decode: int = 3
    num_gateways: int = 2
    #: Clients.
    concurrency: int = 6
    #: Tokens of the prompts.
    contexts: tuple[int, ...] = (60, 500, 4000)
    num_cases: int = 36
    faults_per_round: int = 20
    #: No new round begins after this time.
    longest_s: float = float("inf")
    settle_s: float = 1.0
    forks: bool = True

    def pod_flags(self) -> tuple[PodFlag, ...]:
        # Room for every client at its longest, and no more: caches must evict.
        is_full = FaultKind.FULL in self.kinds
        clients = max(1, self.concurrency // 2) if is_full else self.concurrency
        blocks = clients * -(-(max(self.contexts) + _ANSWER_ROOM) // _BLOCK_SIZE)
        flags = {
            "decode": {"num-blocks": blocks, "local-prefill-tokens": 128, "idle-prefill-tokens": 128},
            "prefill": {"num-blocks": blocks},
        }
        if is_full:
            flags["gateway"] = {"max-in-flight": _IN_FLIGHT, "max-queue": _QUEUE}
        return tuple(
            PodFlag(role, flag, str(value))
            for role, values in flags.items()
            for flag, value in values.items()
        )


async def run_chaos(
    options: ChaosOptions, violations: Violations, show: Callable[[str], None]
) -> ChaosReport:
    """Raises StartupError when the fleet does not start."""
    fleet_options = ChaosSystemOptions(
        model=options.model,
        folder=options.folder,
        num_prefill=options.num_prefill,
        num_decode=options.num_decode,
        num_gateways=options.num_gateways,
        forks=options.forks,
        cuts=any(kind.is_of_link for kind in options.kinds),
        clocks=FaultKind.CLOCK in options.kinds,
        pod_flags=options.pod_flags(),
    )
    async with running_system(fleet_options) as fleet:
        clients = [Client(name, target) for name, target in fleet.gateways.items()]
        try:
            everyone = {"decode": options.num_decode, "prefill": options.num_prefill}
            await fleet.until_serving(clients, everyone)
            return await _Run(options, fleet, clients, violations, show).run()
        finally:
            for client in clients:
                await client.close()


class _Load:
    """Clients that ask one case after another, and compare."""

    def __init__(
        self,
        fleet: ChaosSystem,
        clients: Sequence[Client],
        cases: Sequence[Case],
        answers: Sequence[Answer],
        violations: Violations,
        report: ChaosReport,
    ) -> None:
        self._fleet = fleet
        self._clients = clients
        self._cases = cases
        self._answers = answers
        self._violations = violations
        self._report = report
        self.active: set[Stream] = set()
        #: Faults of this round and shortly before it, newest last.
        self.faults: list[Fault] = []
        self.is_ending = False
        self._num_calls = 0

    async def ask(self, index: int) -> Stream:
        """The stream that brought the answer, or was told of an error."""
        stream = Stream(self._cases[index])
        self.active.add(stream)
        try:
            while True:
                client = await self._ready_gateway()
                called_at = time.monotonic()
                try:
                    answer = await client.ask(stream)
                    break
                except grpc.aio.AioRpcError as error:
                    if not self._may_fail(client, called_at, stream, error):
                        stream.ended_at = time.monotonic()
                        self._violations.add(
                            f"case {index} ({stream.case.name}, context {stream.case.context}) failed after "
                            f"{self.last_fault()}: {error.code().name}: {error.details()}"
                        )
                        return stream
                    await asyncio.sleep(self._retry_after_s(error) or _LOOK_S)
        finally:
            self.active.discard(stream)
        report, reference = self._report, self._answers[index]
        report.num_answers += 1
        report.num_tokens += len(answer.token_ids)
        report.num_continued += stream.receipt.decode_retries > 0
        report.num_prefilled_again += stream.receipt.prefill_retries > 0
        if answer != reference:
            self._violations.add(
                f"case {index} ({stream.case.name}, context {stream.case.context}) has another answer after "
                f"{self.last_fault()}: {answer.difference(reference)}"
            )
        elif stream.receipt.output_tokens != len(answer.token_ids):
            self._violations.add(
                f"case {index}: the receipt counts {stream.receipt.output_tokens} tokens of "
                f"{len(answer.token_ids)}"
            )
        return stream

    async def burst(self, rng: random.Random) -> None:
        """More requests at once than there are places and blocks for, sent again until they are taken."""
        indices = [rng.randrange(len(self._cases)) for _ in range(_BURST)]
        await asyncio.gather(*(self.ask(index) for index in indices))

    async def clients(self, number: int, rng: random.Random) -> list[Stream]:
        """Asks until `is_ending`; returns all streams."""
        streams: list[Stream] = []

        async def one() -> None:
            while not self.is_ending:
                streams.append(await self.ask(rng.randrange(len(self._cases))))
                await asyncio.sleep(rng.uniform(0.0, _THINK_S))

        await asyncio.gather(*(one() for _ in range(number)))
        return streams

    async def _ready_gateway(self) -> Client:
        """One after another."""
        ready: list[Client] = []

        async def is_ready() -> bool:
            names = {child.spec.name for child in self._fleet.of_role("gateway") if child.ready.is_set()}
            ready[:] = [client for client in self._clients if client.name in names]
            return bool(ready)

        await self._fleet.until("a gateway", is_ready)
        self._num_calls += 1
        return ready[self._num_calls % len(ready)]

    def _may_fail(
        self, client: Client, called_at: float, stream: Stream, error: grpc.aio.AioRpcError
    ) -> bool:
        """Whether its gateway was lost, or full; the stream is ready to go on."""
        if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and self._retry_after_s(error):
            self._report.num_refused += 1
            return any(fault.kind is FaultKind.FULL for fault in self.faults)
        if stream.event_id and error.code() is grpc.StatusCode.NOT_FOUND:
            # Only Redis may lose an answer, or a gateway that had it while Redis was away.
            stream.begin_anew()
            self._report.num_anew += 1
            return any(fault.role in ("redis", "gateway") for fault in self.faults)
        # A call that was not accepted lost nothing.
        if stream.chunks_at and stream.chunks_at[-1] > called_at:
            self._report.num_resumed += 1
        # A gateway that Redis has not heard of for a second may lose an answer to the other one.
        return any(
            (fault.name == client.name or fault.role == "redis") and fault.at > called_at - _GATEWAY_BACK_S
            for fault in self.faults
        )

    def _retry_after_s(self, error: grpc.aio.AioRpcError) -> float:
        """When to send the request again; 0: it does not say."""
        metadata: dict[str, str] = dict(error.trailing_metadata() or ())  # type: ignore[arg-type]  # pairs
        return float(metadata.get(RETRY_AFTER_KEY, 0)) / 1000

    def last_fault(self) -> str:
        """With those of the seconds before it."""
        return ", ".join(fault.what for fault in self.recent_faults()[-4:]) or "no fault"

    def recent_faults(self) -> list[Fault]:
        return [fault for fault in self.faults if fault.at > time.monotonic() - _GATEWAY_BACK_S]


class _Run:
    def __init__(
        self,
        options: ChaosOptions,
        fleet: ChaosSystem,
        clients: Sequence[Client],
        violations: Violations,
        show: Callable[[str], None],
    ) -> None:
        self._options = options
        self._fleet = fleet
        self._clients = clients
        self._violations = violations
        self._show = show
        self._rng = random.Random(options.seed)
        self._report = ChaosReport()
        self._growth = Growth(violations)

    async def run(self) -> ChaosReport:
        options, report = self._options, self._report
        vocab_size = ModelManifest.read(options.model).vocab_size
        cases = make_cases(options.seed, options.contexts, vocab_size, options.num_cases)
        cases, answers = await references(self._clients[0], cases)
        self._show(f"{len(cases)} cases have their references")
        load = _Load(self._fleet, self._clients, cases, answers, self._violations, report)
        injector = Injector(
            self._fleet, self._rng, options.kinds, options.roles, lambda: load.burst(self._rng)
        )
        await self._calm(load, len(cases))
        started = time.monotonic()
        while (
            report.num_faults < options.num_faults
            and report.seconds < options.longest_s
            and not self._violations.sentences
        ):
            load.is_ending = False
            # The last ones may last: a hung process is killed after five seconds.
            load.faults[:] = load.recent_faults()
            clients = asyncio.create_task(load.clients(options.concurrency, self._rng))
            try:
                num_left = options.num_faults - report.num_faults
                for _ in range(min(options.faults_per_round, num_left)):
                    await self._one_fault(load, injector)
                load.is_ending = True
                async with asyncio.timeout(BACK_LIMIT_S):
                    streams = await clients
                    await injector.settle()
            except TimeoutError as error:
                waiting = ", ".join(f"{s.case.name}/{s.case.context}" for s in load.active)
                self._violations.add(
                    f"after {load.last_fault()}: {error or 'streams do not end'} ({waiting})"
                )
                break
            finally:
                clients.cancel()
            self._look_at(streams, load.faults)
            await self._end_of_round()
            report.num_rounds += 1
            report.seconds = time.monotonic() - started
            self._show(
                f"{report.num_faults} faults in {report.seconds:.0f} s, {report.num_answers} answers, "
                f"{report.num_continued} continued"
            )
        report.most_memory_mib = self._growth.most_memory_mib
        report.most_descriptors = self._growth.most_descriptors
        report.violations = self._violations.sentences
        return report

    async def _calm(self, load: _Load, num_cases: int) -> None:
        left = list(range(num_cases))

        async def one() -> None:
            while left:
                self._report.gaps.add(await load.ask(left.pop()), None)

        await asyncio.gather(*(one() for _ in range(self._options.concurrency)))

    async def _one_fault(self, load: _Load, injector: Injector) -> None:
        fault = injector.draw()
        # One pod more than must be left; a decode pod can do without prefill pods.
        least = {"decode": 1 + (fault.role == "decode"), "prefill": int(fault.role == "prefill")}
        await self._fleet.until_serving(self._clients, least)

        async def is_streaming() -> bool:
            return any(stream.chunks_at for stream in load.active)

        await self._fleet.until("a stream", is_streaming)
        await asyncio.sleep(self._rng.uniform(0.0, 0.2))
        await injector.inject(fault)
        load.faults.append(fault)
        self._report.faults[fault.cause] += 1

        # By now a stream that moves comes from another pod, and a new one does not meet the harmed pod.
        noticed_at = fault.at + (_DEATH_S if fault.kind is FaultKind.KILL else _SILENCE_S)

        async def have_moved() -> bool:
            return all(
                stream.has_moved_since(noticed_at) or stream.started_at > noticed_at for stream in load.active
            )

        await self._fleet.until(f"all streams go on after {fault.what}", have_moved)

    def _look_at(self, streams: Sequence[Stream], faults: Sequence[Fault]) -> None:
        for stream in streams:
            if stream.ended_at is None:
                continue
            met = [fault for fault in faults if stream.started_at < fault.at < stream.ended_at]
            for fault in met:
                if _has_waited(stream, fault) and not any(_may_resume(other) for other in met):
                    self._violations.add(
                        f"a stream ({stream.case.name}, context {stream.case.context}) stayed with its pod: "
                        f"{fault.what}"
                    )
                # With two of a role the receipt does not show which of them concerned the stream.
                if sum(other.role == fault.role for other in met) == 1:
                    self._report.gaps.add(stream, fault)

    async def _end_of_round(self) -> None:
        ended = time.monotonic()
        kept: dict[str, object] = {}
        while True:
            kept = {name: held(usage) for name, usage in (await self._fleet.usages()).items() if held(usage)}
            for client in self._clients:
                with contextlib.suppress(grpc.aio.AioRpcError):  # it restarts
                    view = await client.fleet()
                    if num_requests := view.requests_running + view.requests_queued:
                        kept[client.name] = num_requests
            if not kept:
                break
            if time.monotonic() - ended > self._options.settle_s:
                faults = f"{self._options.settle_s:g} s after the last answer"
                self._violations.add(f"{faults} there is still held: {kept}")
                break
            await asyncio.sleep(_LOOK_S)
        everyone = {"decode": self._options.num_decode, "prefill": self._options.num_prefill}
        try:
            await self._fleet.until_serving(self._clients, everyone)
        except TimeoutError as error:
            self._violations.add(f"not every process came back: {error}")
        self._growth.look(self._fleet.pids())


def _may_resume(fault: Fault) -> bool:
    """Whether streams may begin anew or resume after it, so that their receipts show the last part only."""
    return fault.role in ("gateway", "redis") or fault.kind.is_of_link


def _has_waited(stream: Stream, fault: Fault) -> bool:
    """Whether its pod was silent for longer than the limit, and it stayed there."""
    return (
        fault.role == "decode"
        and fault.lasts_s > _SILENCE_LIMIT_S
        and stream.receipt.decode_pod == fault.name
        and stream.receipt.decode_retries == 0
        and bool(stream.chunks_at)
        and stream.chunks_at[0] < fault.at
        and stream.chunks_at[-1] > fault.at + fault.lasts_s
    )
