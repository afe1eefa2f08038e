"""Makes the requests of a run and their schedule, from the options or from a trace.

A trace determines arrivals, lengths of prompts and answers and, in Tandem's format, class and tenant. Options
determine the rest. A prompt of a trace with block ids consists of a text for each id, so that requests share
blocks as in the recording; other prompts are those of the workload, with the trace's length.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import replace

from tandem_core.model import registry

from tandem_cli.bench import dataset as dialogues
from tandem_cli.bench.arrivals import ClosedLoop, OpenLoop, Replay, Schedule
from tandem_cli.bench.dataset import Turn
from tandem_cli.bench.options import BenchError, BenchOptions, Point
from tandem_cli.bench.prompts import (
    WORKLOADS,
    Material,
    Prompt,
    estimate_tokens,
    tokenizer_counter,
)
from tandem_cli.bench.requests import NO_TENANT, Request, Tenant, draw
from tandem_cli.bench.traces import BLOCK_TOKENS, TraceEntry, mean_rate, read_trace

_DEFAULT_NUM_REQUESTS = 32
#: Length of the shortest prompt of a workload.
_MIN_PROMPT_TOKENS = 16
#: Longest trace that is replayed without --num-requests: longer ones take hours and gigabytes.
_MAX_TRACE = 100_000


def load_material(options: BenchOptions) -> Material:
    """The input of the workloads. Counts tokens with the model's tokenizer if it is on this machine. Raises
    BenchError."""
    conversations = dialogues.load_dialogues(options.dataset)
    try:
        policy = options.policy.read_text(encoding="utf-8") if options.policy else dialogues.sample_policy()
    except (OSError, UnicodeDecodeError) as error:
        raise BenchError(f"--policy {options.policy} cannot be read: {error}") from error
    folder = registry.find(options.model) if options.model else None
    return Material(
        conversations,
        policy,
        input_tokens=options.input_tokens,
        count=tokenizer_counter(folder) if folder is not None else estimate_tokens,
        seed=options.seed,
    )


class RequestMaker:
    """Draws requests. Raises BenchError."""

    def __init__(self, options: BenchOptions, trace: Sequence[TraceEntry] | None = None) -> None:
        self._options = options
        self._material = load_material(options)
        self._classes = options.class_weights()
        tenants = options.tenant_weights()
        self._tenants = {tenant.name: tenant for tenant in tenants}
        self._tenant_weights = {tenant.name: weight for tenant, weight in tenants.items()}
        self._trace = load_trace(options) if trace is None else list(trace)
        for entry in self._trace:
            if entry.slo_class:
                options.objectives(entry.slo_class)
            if entry.tenant and self._tenants and entry.tenant not in self._tenants:
                raise BenchError(f"the --trace has tenant {entry.tenant!r}; add it to --tenants with its key")
        self.num_requests = len(self._trace) or options.num_requests or _DEFAULT_NUM_REQUESTS
        #: Entries of the trace that are shortened to the options' lengths.
        self.num_cut = sum(
            (entry.output_tokens or 0) > options.max_tokens
            or (options.input_tokens is not None and (entry.prompt_tokens or 0) > options.input_tokens)
            for entry in self._trace
        )

    def schedule(self, point: Point) -> Schedule:
        if point.concurrency is not None:
            return ClosedLoop(point.concurrency)
        options = self._options
        if not self._trace:
            return OpenLoop(point.rate or 1.0, options.seed, options.burstiness)
        times_s = tuple(entry.arrival_s for entry in self._trace)
        if point.rate is None:
            return Replay(times_s, options.rate_scale or 1.0)
        recorded = mean_rate(self._trace)
        return Replay(times_s, point.rate / recorded if recorded else 1.0)

    def make(self, workload: str, first: int = 0) -> list[Request]:
        """The requests of a run; `first` is the number of the first prompt, which may differ between runs."""
        return [self._make(workload, index, first) for index in range(self.num_requests)]

    def _make(self, workload: str, index: int, first: int) -> Request:
        options = self._options
        entry = self._trace[index] if self._trace else TraceEntry(0.0)
        # Class and tenant depend on the index alone, so that all rates have the same mix.
        slo_class = entry.slo_class or draw("class", self._classes, options.seed, index)
        tenant = NO_TENANT
        if name := entry.tenant or (
            draw("tenant", self._tenant_weights, options.seed, index) if self._tenants else ""
        ):
            tenant = self._tenants.get(name, Tenant(name))
        return Request(
            index,
            self._prompt(workload, entry, index, first),
            options.objectives(slo_class),
            min(entry.output_tokens or options.max_tokens, options.max_tokens),
            tenant,
            sends_objectives=options.has_objectives,
        )

    def _prompt(self, workload: str, entry: TraceEntry, index: int, first: int) -> Prompt:
        material, number = self._material, first + index
        if entry.prompt_tokens is None:
            return WORKLOADS[workload](material, number)
        num_tokens = min(entry.prompt_tokens, material.input_tokens or entry.prompt_tokens)
        if entry.blocks:
            text = self._prompt_of_blocks(entry, num_tokens, first)
            return Prompt(f"trace-{number}", (Turn("user", text),))
        length = max(num_tokens, _MIN_PROMPT_TOKENS)
        return WORKLOADS[workload](replace(material, input_tokens=length), number)

    def _prompt_of_blocks(self, entry: TraceEntry, num_tokens: int, first: int) -> str:
        # Estimates the length, because counting the tokens of each text takes longer than some runs.
        size = round(BLOCK_TOKENS * self._characters_per_token)
        full, rest = divmod(num_tokens, BLOCK_TOKENS)
        texts = [self._block(block, first, size) for block in entry.blocks[:full]]
        if rest:
            last = self._block(entry.blocks[full], first, size)
            texts.append(last[: round(rest * self._characters_per_token)])
        return "".join(texts)

    def _block(self, block: int, first: int, size: int) -> str:
        """Text of the dialogues; deterministic."""
        generator = random.Random(f"block/{self._material.seed}/{first}/{block}")
        text = f"[{block}] "
        while len(text) < size:
            text += generator.choice(self._material.dialogues).as_text() + "\n\n"
        return text[:size]

    @functools.cached_property
    def _characters_per_token(self) -> float:
        sample = "\n\n".join(dialogue.as_text() for dialogue in self._material.dialogues[:8])
        return len(sample) / max(1, self._material.count(sample))


def load_trace(options: BenchOptions) -> list[TraceEntry]:
    """Entries of the options' trace that are sent before the run ends; none without a trace. Raises
    BenchError."""
    if options.trace is None:
        return []
    entries = read_trace(options.trace, options.num_requests or _MAX_TRACE + 1)
    if options.num_requests is None and len(entries) > _MAX_TRACE:
        raise BenchError(
            f"--trace {options.trace} has more than {_MAX_TRACE} requests; limit them with --num-requests"
        )
    recorded = mean_rate(entries)
    speed = options.rate / recorded if options.rate and recorded else options.rate_scale or 1.0
    return [entry for entry in entries if entry.arrival_s / speed < options.timeout]
