"""Overload, predictions and fairness: attainment of admitted requests, and goodput.

    python benchmarks/slo.py --out FILE.md --records FILE.jsonl --plot FILE.png
    python benchmarks/slo.py --from FILE.jsonl --out FILE.md       the page again, from the records

Each configuration of the gateway is started as `tandem up` with other flags (CONFIGURATIONS, or repeated
`--config NAME=FLAGS`), one at a time. They take turns: every part is measured on all of them, beginning with
another one each time. These are the parts, all with three classes (MIX) and three tenants:

    capacity   requests/s of a closed loop of class batch, on the first configuration; the unit of loads
    poisson    Poisson arrivals at each load
    bursts     gamma-distributed gaps with a coefficient of variation of 2
    trace      arrivals and lengths of a recorded trace at each load
    retry      Poisson at twice the capacity; refused requests are sent again when the gateway says, once
    alone      two tenants that send their shares of 1.2 times the capacity, a third of it each
    fair       these requests, and a third tenant with its share: the machine is full
    noisy      these requests, and the third tenant sends four times its share
    fresh      clients of class interactive that wait for their answers, and come back twice if they are
               refused, after each of several starts without a warm-up

In poisson, bursts and trace, an eighth or less of the requests that the first configuration refuses are sent
again at once as class batch, which has the lowest priority and is never refused. One that then meets the
objectives of its own class was refused wrongly.

Each part but `fresh` begins with a fresh start and a warm-up that is not measured (none with --no-warm-up),
and no prompt is used in two runs of a configuration.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import math
import re
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import fixed_gate
from peers import BATCH, Peer, PeerUnavailableError, Server, say, tandem_peer
from slo_report import FRESH, PROBE, SHAPES, finish
from tandem_cli.bench.arrivals import ClosedLoop, OpenLoop, Replay, Schedule
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.options import BenchError, BenchOptions, Point
from tandem_cli.bench.prompts import Prompt
from tandem_cli.bench.record import OK, Recorder, RequestRecord
from tandem_cli.bench.records_file import RecordsWriter, read_runs
from tandem_cli.bench.requests import Request, Tenant, plain_requests
from tandem_cli.bench.stats import Run, summarise
from tandem_cli.bench.traces import TraceEntry, mean_rate, read_trace
from tandem_cli.bench.transports import GrpcTransport, SendError, Transport
from tandem_cli.bench.workload import RequestMaker
from tandem_engine import model_loader

T = TypeVar("T")

#: Name -> flags of `tandem up`, and the order of a fixed gate (`fixed_gate.py`). The first one is ours, on
#: which the capacity is measured.
CONFIGURATIONS = {
    "ours": "",
    "FCFS": "--fixed-gate fcfs",
    "FCFS limit": "--fixed-gate fcfs --set gateway.max-in-flight=8 --set gateway.max-queue=16",
    "EDF limit": "--fixed-gate edf --set gateway.max-in-flight=8",
}
MIX = "interactive=.5,chat=.3,batch=.2"
PARTS = (*SHAPES, "retry", "fairness", FRESH)
TENANTS = ("a", "b", "c")
#: Shape of the gaps' gamma distribution in bursts; their coefficient of variation is 2.
BURSTINESS = 0.25
#: Saturates the machine: with 8 the capacity was a third of what open loops reached, with 32 nine tenths.
CAPACITY_CONCURRENCY = 64
#: Load, in multiples of the capacity, of refused clients that come back.
RETRY_LOAD = 2.0
#: Load of each of three tenants. Together they fill the machine, also if drafts make it a fifth faster than
#: the measured capacity; otherwise a noisy tenant would use free capacity.
SHARE_LOAD = 0.4
#: A noisy tenant sends this multiple of its share.
NOISE = 4
#: Starts, clients, requests of each start, and tokens of their prompts: a load that the default model serves
#: in time on two cores, so that refusals are wrong.
FRESH_STARTS, FRESH_CLIENTS, FRESH_REQUESTS, FRESH_INPUT_TOKENS = 6, 8, 100, 128
#: Refused requests are sent again as often as OpenAI's clients do, when the gateway says.
FRESH_RETRIES = 2
#: Answers before each part, from which drafts are learnt: after a start the machine serves half as many
#: requests per second as after these (7 and 13 with the default model on two cores), so loads would be
#: multiples of a capacity that it soon exceeds.
LEARNING_REQUESTS = 384
#: After them, at half of the capacity and with all classes, because each class is predicted from its own
#: measurements.
WARM_UP_S, WARM_UP_LOAD = 15.0, 0.5
#: One of this many refused requests is sent again to judge its refusal; in large runs about 32 in all. More
#: would change the load: an eighth at four times the capacity was 15 % of all served requests.
PROBED_EVERY, MOST_PROBED = 8, 32
#: Arrivals of the first 24 s of Mooncake's conversation trace (kvcache-ai/Mooncake, FAST25 release): the
#: lengths of the prompts that came at 0, 3, 6, ... s. Their ratios are used, for a mean of --input-tokens.
MOONCAKE_BIN_S = 3.0
MOONCAKE_PROMPTS = (
    (6758, 7322, 7236, 2290, 6760, 4834, 23141, 26888, 10498, 17450),
    (13544, 87169, 6324, 2012, 7324, 9418, 915, 12846, 20506, 16609, 26353, 6059, 5954, 11339, 15172, 45922),
    (1053, 5710, 7238),
    (10355, 1477, 15366, 3806, 8772, 26156, 16635, 2293, 1110),
    (3628, 2038, 1902, 14041, 12095, 1066, 9615, 19976),
    (6525, 898, 5391, 23631, 38383, 7543, 8974, 24246, 15761, 27701, 11041, 4836, 2350, 934, 14081),
    (7935, 13886, 898, 19694),
    (3184, 2651, 23143, 5922, 8429, 8352),
)


class System(Protocol):
    """A configuration that runs."""

    def transport(self, options: BenchOptions) -> Transport: ...

    def run(self, main: Coroutine[Any, Any, T]) -> T: ...


#: Starts a configuration, given its name and flags.
Start: TypeAlias = Callable[[str, str], AbstractContextManager[System]]


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    options: BenchOptions
    configurations: dict[str, str]
    parts: tuple[str, ...]
    #: In multiples of the capacity.
    loads: tuple[float, ...]
    #: Of each run; the number of requests follows from the rate.
    seconds: float
    #: Requests per second; None: it is measured.
    capacity: float | None
    #: None: Mooncake's, above.
    trace: Path | None = None
    learning_requests: int = LEARNING_REQUESTS
    warm_up_s: float = WARM_UP_S
    fresh_starts: int = FRESH_STARTS


@dataclass(frozen=True)
class Case:
    """A run to be made on each configuration."""

    part: str
    rate: float
    requests: Sequence[Request]
    schedule: Schedule
    max_retries: int = 0


class Benchmark:
    """Measures the parts of a plan on every configuration in turn."""

    def __init__(self, plan: Plan, start: Start, keys: dict[str, str], writer: RecordsWriter | None) -> None:
        self._plan = plan
        self._start = start
        self._keys = keys
        self._writer = writer
        self._capacity = plan.capacity or 0.0
        #: Number of the next prompt: none is used in two parts.
        self._next_prompt = 0
        self.runs: list[Run] = []

    def measure(self) -> list[Run]:
        plan = self._plan
        names = list(plan.configurations)
        if plan.capacity is None:
            with self._started(names[0]) as system:
                self._measure_capacity(system, names[0])
        for turn, part in enumerate(plan.parts):
            if part == FRESH:
                self._measure_fresh_starts()
                continue
            cases = list(self._cases(part))
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                self._measure_part(name, cases, is_first=name == names[0])
        return self.runs

    def _measure_fresh_starts(self) -> None:
        """The same requests for each start and configuration; the configurations take turns."""
        options = replace(
            self._options(FRESH_REQUESTS, TENANTS[:1]), mix="interactive=1", input_tokens=FRESH_INPUT_TOKENS
        )
        requests = RequestMaker(options).make("retail", self._take(FRESH_REQUESTS))
        for trial in range(self._plan.fresh_starts):
            for name, flags in self._plan.configurations.items():
                with self._start(name, flags) as system:
                    records, _ = self._send_probing(
                        system, requests, ClosedLoop(FRESH_CLIENTS), max_retries=FRESH_RETRIES
                    )
                self._note(Run(Point(FRESH, FRESH_CLIENTS), trial, name, summarise(records), tuple(records)))

    def _measure_part(self, name: str, cases: Sequence[Case], *, is_first: bool) -> None:
        with self._started(name) as system:
            for case in cases:
                every = probed_every(len(case.requests)) if is_first and case.part in SHAPES else 0
                self._run(system, name, case, every)

    @contextlib.contextmanager
    def _started(self, name: str) -> Iterator[System]:
        with self._start(name, self._plan.configurations[name]) as system:
            if self._plan.learning_requests:
                self._send_batch(system, self._plan.learning_requests)
            if self._plan.warm_up_s:
                rate = WARM_UP_LOAD * (self._capacity or 1.0)
                count = math.ceil(rate * self._plan.warm_up_s)
                options = replace(self._options(count, TENANTS), mix=MIX)
                requests = RequestMaker(options).make("retail", self._take(count))
                self._send(system, requests, OpenLoop(rate, self._plan.options.seed))
            yield system

    def _measure_capacity(self, system: System, name: str) -> None:
        records = self._send_batch(system, 4 * CAPACITY_CONCURRENCY)
        self._note(Run(Point("capacity", CAPACITY_CONCURRENCY), 0, name, summarise(records), tuple(records)))
        self._capacity = self.runs[-1].summary.requests_per_s
        if not self._capacity:
            raise BenchError(f"no request of the capacity run succeeded: {records[0].error}")

    def _send_batch(self, system: System, count: int) -> list[RequestRecord]:
        """Sends `count` requests without objectives, as fast as they are answered."""
        options = replace(self._options(count, TENANTS), mix="batch=1")
        requests = RequestMaker(options).make("retail", self._take(count))
        return self._send(system, requests, ClosedLoop(CAPACITY_CONCURRENCY))

    def _cases(self, part: str) -> Iterator[Case]:
        """The cases of a part, with equal requests for every configuration."""
        if part in SHAPES:
            for load in self._plan.loads:
                yield self._open_loop(part, load)
        elif part == "retry":
            yield replace(self._open_loop("poisson", RETRY_LOAD), part="retry", max_retries=1)
        elif part == "fairness":
            yield from self._neighbours()
        else:
            raise BenchError(f"--parts {part!r} is unknown; use {', '.join(PARTS)}")

    def _open_loop(self, shape: str, load: float, tenants: Sequence[str] = TENANTS) -> Case:
        rate = load * self._capacity
        count = max(2, math.ceil(rate * self._plan.seconds))
        options = replace(self._options(count, tenants), mix=MIX)
        trace, recorded_rate = self._trace(count) if shape == "trace" else ([], 0.0)
        if trace:
            # It is the mean length; here it would limit each prompt.
            options = replace(options, input_tokens=None)
        requests = RequestMaker(options, trace).make("retail", self._take(count))
        seed = self._plan.options.seed
        schedule: Schedule = OpenLoop(rate, seed, BURSTINESS if shape == "bursts" else 1.0)
        if trace:
            schedule = Replay(tuple(entry.arrival_s for entry in trace), rate / recorded_rate)
        return Case(shape, rate, requests, schedule)

    def _neighbours(self) -> Iterator[Case]:
        """Two tenants alone, and again with a third one that sends its share, and more."""
        *quiet, third = TENANTS
        alone = self._open_loop("poisson", len(quiet) * SHARE_LOAD, quiet)
        alone_s = alone.schedule.departures_s(len(alone.requests))
        yield replace(alone, part="alone", schedule=Replay(tuple(alone_s)))
        for part, load in (("fair", SHARE_LOAD), ("noisy", NOISE * SHARE_LOAD)):
            other = self._open_loop("poisson", load, (third,))
            # Its own times: the same seed would begin both at the same ones.
            own = OpenLoop(load * self._capacity, self._plan.options.seed + 1)
            other_s = own.departures_s(len(other.requests))
            merged = sorted(
                zip([*alone_s, *other_s], [*alone.requests, *other.requests], strict=True),
                key=lambda pair: pair[0],
            )
            requests = [replace(request, index=index) for index, (_, request) in enumerate(merged)]
            schedule = Replay(tuple(time_s for time_s, _ in merged))
            yield Case(part, alone.rate + other.rate, requests, schedule)

    def _trace(self, count: int) -> tuple[list[TraceEntry], float]:
        """So many entries, the trace repeated if it is shorter, with prompts of the options' mean length; and
        the mean rate of the whole."""
        recorded = mooncake_entries() if self._plan.trace is None else read_trace(self._plan.trace, count)
        # A mean gap follows the last one.
        whole_s = len(recorded) / mean_rate(recorded) if mean_rate(recorded) else 1.0
        repeated = [
            replace(entry, arrival_s=entry.arrival_s + again * whole_s, output_tokens=None, blocks=())
            for again in range(math.ceil(count / len(recorded)))
            for entry in recorded
        ][:count]
        mean = self._plan.options.input_tokens or 512
        lengths = scaled_to_mean([entry.prompt_tokens or mean for entry in repeated], mean)
        pairs = zip(repeated, lengths, strict=True)
        scaled = [replace(entry, prompt_tokens=length) for entry, length in pairs]
        return scaled, len(recorded) / whole_s

    def _options(self, count: int, tenants: Sequence[str]) -> BenchOptions:
        named = ",".join(f"{tenant}={self._keys[tenant]}" for tenant in tenants)
        return replace(self._plan.options, num_requests=count, tenants=named)

    def _take(self, count: int) -> int:
        first, self._next_prompt = self._next_prompt, self._next_prompt + count
        return first

    def _run(self, system: System, name: str, case: Case, probed_every: int = 0) -> None:
        records, probes = self._send_probing(
            system, case.requests, case.schedule, case.max_retries, probed_every
        )
        rate = round(case.rate, 4)
        self._note(Run(Point(case.part, rate=rate), 0, name, summarise(records), tuple(records)))
        if probes:
            point = Point(f"{PROBE}{case.part}", rate=rate)
            self._note(Run(point, 0, name, summarise(probes), tuple(probes)))

    def _note(self, run: Run) -> None:
        self.runs.append(run)
        if self._writer is not None:
            self._writer.add(run)
        summary = run.summary
        say(
            f"{run.point.workload}, {run.point.load()}, {run.system}: sent {summary.num_sent}, refused "
            f"{summary.num_refused}, in time {summary.num_met}, {summary.duration_s:.0f} s"
        )

    def _send(self, system: System, requests: Sequence[Request], schedule: Schedule) -> list[RequestRecord]:
        return self._send_probing(system, requests, schedule)[0]

    def _send_probing(
        self,
        system: System,
        requests: Sequence[Request],
        schedule: Schedule,
        max_retries: int = 0,
        probed_every: int = 0,
    ) -> tuple[list[RequestRecord], list[RequestRecord]]:
        options = self._plan.options

        async def sending() -> tuple[list[RequestRecord], list[RequestRecord]]:
            transport = RefusalProbe(system.transport(options), probed_every)
            try:
                records = await run_load(
                    transport, requests, schedule, timeout_s=options.timeout, max_retries=max_retries
                )
                return records, await transport.probes()
            finally:
                await transport.close()

        return system.run(sending())


def probed_every(num_requests: int) -> int:
    """In a run of this size, one of how many refused requests is sent again."""
    return max(PROBED_EVERY, num_requests // MOST_PROBED)


class RefusalProbe(Transport):
    """Sends some of the refused requests again at once, at lowest priority (a class without objectives). If
    one then meets the objectives of its own class, its refusal was wrong."""

    def __init__(self, transport: Transport, every: int) -> None:
        self._transport = transport
        #: 0: none is sent again.
        self._every = every
        self._num_refused = 0
        self._probes: set[asyncio.Task[RequestRecord]] = set()

    async def send(self, request: Request, recorder: Recorder) -> None:
        try:
            await self._transport.send(request, recorder)
        except SendError as error:
            if error.retry_after_s is not None and self._every:
                self._num_refused += 1
                if self._num_refused % self._every == 1:
                    self._probes.add(asyncio.create_task(self._probe(request)))
            raise

    async def _probe(self, request: Request) -> RequestRecord:
        recorder = Recorder(request, time.perf_counter())
        try:
            await self._transport.send(replace(request, slo=BATCH, sends_objectives=False), recorder)
        except SendError as error:
            return recorder.finish(error.status, str(error))
        return recorder.finish(OK)

    async def probes(self) -> list[RequestRecord]:
        return await asyncio.gather(*self._probes)

    async def close(self) -> None:
        await self._transport.close()


@dataclass(frozen=True)
class Served:
    """A `tandem up`, by its gateway's gRPC address."""

    target: str

    def transport(self, options: BenchOptions) -> Transport:
        return GrpcTransport(self.target, options)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        return asyncio.run(main)


def mooncake_entries() -> list[TraceEntry]:
    return [
        TraceEntry(number * MOONCAKE_BIN_S, tokens)
        for number, prompts in enumerate(MOONCAKE_PROMPTS)
        for tokens in prompts
    ]


def scaled_to_mean(lengths: Sequence[int], mean: int) -> list[int]:
    """Prompt lengths with this mean and about the same ratios; none shorter than a sixteenth of the mean or
    longer than four times the mean, so that all fit into the context."""
    scale = mean * len(lengths) / sum(lengths)
    for _ in range(8):  # limiting changes the mean
        limited = [min(max(length * scale, mean / 16), 4 * mean) for length in lengths]
        scale *= mean * len(lengths) / sum(limited)
    return [max(16, round(length)) for length in limited]


def make_keys(folder: Path) -> tuple[Path, dict[str, str]]:
    """A keys file for the gateway, and the key of each tenant."""
    keys = {tenant: f"bench-key-of-{tenant}" for tenant in TENANTS}
    lines = [
        json.dumps({"key_sha256": hashlib.sha256(key.encode()).hexdigest(), "tenant": tenant})
        for tenant, key in keys.items()
    ]
    path = folder / "keys.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path, keys


def tandem_starter(model_dir: Path, keys_file: Path, tenant: Tenant, common: str) -> Start:
    """Starts `tandem up` with the common flags and those of the configuration."""
    (hello,) = plain_requests([Prompt("hello", (Turn("user", "Say hello."),))], BATCH, 8, tenant)

    @contextlib.contextmanager
    def start(name: str, flags: str) -> Iterator[Served]:
        order, flags = fixed_order(flags)
        with tempfile.TemporaryDirectory() as folder:
            venv = fixed_gate.environment(order, Path(folder) / order) if order else Path(sys.prefix)
            up = f"--api-keys-file {shlex.quote(str(keys_file))} {common} {flags}"
            with serving(tandem_peer(name, model_dir, up, venv), hello) as target:
                yield Served(target)

    return start


def fixed_order(flags: str) -> tuple[str, str]:
    """The order of the fixed gate in these flags, or "", and the other flags."""
    found = re.search(r"--fixed-gate (\w+)", flags)
    return (found[1], flags.replace(found[0], "")) if found else ("", flags)


@contextlib.contextmanager
def serving(peer: Peer, hello: Request) -> Iterator[str]:
    """Starts a `tandem up` and waits until it answers the request; yields the gateway's gRPC address."""
    server = Server(peer)
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    target = f"{host}:{int(port) + 1}"

    def ask() -> RequestRecord:
        (record,) = send_to(target, BenchOptions(model=""), [hello], ClosedLoop(1), timeout_s=60.0)
        return record

    try:
        server.wait_until(ask)
        yield target
    finally:
        server.close()


def send_to(
    target: str,
    options: BenchOptions,
    requests: Sequence[Request],
    schedule: Schedule,
    *,
    timeout_s: float,
    max_retries: int = 0,
) -> list[RequestRecord]:
    async def sending() -> list[RequestRecord]:
        transport = GrpcTransport(target, options)
        try:
            return await run_load(transport, requests, schedule, timeout_s=timeout_s, max_retries=max_retries)
        finally:
            await transport.close()

    return asyncio.run(sending())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, required=True, help="the page, as Markdown")
    add("--records", type=Path, help="write every request here, as JSON lines")
    add("--from", type=Path, dest="source", metavar="FILE", help="measure nothing; read such a file")
    add("--plot", type=Path, help="PNG of the curves over the rate")
    add("--config", action="append", metavar="NAME=FLAGS", help="repeatable; default: CONFIGURATIONS")
    add("--up", default="", metavar="FLAGS", help="flags of `tandem up` for all configurations")
    add("--parts", default=",".join(PARTS), help=f"default: {','.join(PARTS)}")
    add("--loads", default=".5,1,2,4", help="multiples of the capacity")
    add("--seconds", type=float, default=60.0, help="of arrivals in each run")
    add("--capacity", type=float, help="requests/s, instead of measuring it")
    add("--model", default="smollm2-135m-instruct", help="a name, folder or GGUF file")
    add("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    add("--policy", type=Path, help="text of the system prompt; default: the sample's")
    add("--trace", type=Path, help="instead of the head of Mooncake's conversation trace")
    add("--input-tokens", type=int, default=512, help="of prompts; in the trace their mean")
    add("--max-tokens", type=int, default=48)
    add("--no-warm-up", action="store_true", help="send the first load right after the start")
    add("--seed", type=int, default=0)
    add("--timeout", type=float, default=600.0, help="seconds for a run")


def plan_of(given: argparse.Namespace) -> Plan:
    configurations = dict(CONFIGURATIONS)
    if given.config:
        configurations = {name: flags for name, _, flags in (text.partition("=") for text in given.config)}
    options = BenchOptions(
        # Any load: the parts have their own.
        rate=1.0,
        model=given.model,
        dataset=given.dataset,
        policy=given.policy,
        input_tokens=given.input_tokens,
        max_tokens=given.max_tokens,
        ignore_eos=True,
        seed=given.seed,
        timeout=given.timeout,
    )
    plan = Plan(
        options,
        configurations,
        tuple(given.parts.split(",")),
        tuple(float(load) for load in given.loads.split(",")),
        given.seconds,
        given.capacity,
        given.trace,
    )
    return replace(plan, learning_requests=0, warm_up_s=0.0) if given.no_warm_up else plan


def writer_of(given: argparse.Namespace, plan: Plan) -> RecordsWriter | None:
    return None if given.records is None else RecordsWriter(given.records, plan.options.described())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add_arguments(parser)
    given = parser.parse_args()
    if given.source is not None:
        finish(read_runs(given.source), given.out, given.plot)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a terminated benchmark ends its fleet too
    plan = plan_of(given)
    with tempfile.TemporaryDirectory() as folder:
        keys_file, keys = make_keys(Path(folder))
        first = Tenant(TENANTS[0], keys[TENANTS[0]])
        start = tandem_starter(model_loader.pull(given.model), keys_file, first, given.up)
        benchmark = Benchmark(plan, start, keys, writer_of(given, plan))
        try:
            benchmark.measure()
        except PeerUnavailableError as error:
            sys.exit(f"error: {error}")
        finally:
            # What was measured before a failure is worth having.
            if benchmark.runs:
                finish(benchmark.runs, given.out, given.plot)


if __name__ == "__main__":
    main()
