"""Speculation modes beside each other on one running fleet: `tandem bench serve --speculation off,local,...`

    for each workload and load
        round 1    off     local   chain   global     the same prompts for each mode
        round 2    local   chain   global  off        the next prompts, another order
        ...

The modes of a round follow each other closely, so that a machine's moods meet all of them; a ratio is formed
within its round, and the median of the rounds is told with their range. Answers are compared with the
first mode's: drafts do not change them where results do not depend on the batch.

What one mode computes would serve the next one: its prompts' KV, and its answers' text. So give each mode a
tenant, that is a key, of its own (`--api-key bench-{speculation}`); with one tenant for all the caches are
warm for every mode but a round's first, and `chain` and `global` find their answers in the others' texts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from tandem_gateway.request import SloTarget

from tandem_cli.bench.loadgen import run_load
from tandem_cli.bench.record import RequestRecord
from tandem_cli.bench.run import BenchConfig, BenchError, make_prompts, make_transport
from tandem_cli.bench.stats import DraftFigures, Summary, draft_figures, summarise
from tandem_cli.bench.workload import Prompt


@dataclass(frozen=True)
class ComparisonConfig:
    """`base` says everything but what is varied. `loads`: concurrencies; empty: the base's rate."""

    base: BenchConfig
    modes: tuple[str, ...]
    workloads: tuple[str, ...]
    loads: tuple[int, ...]
    rounds: int

    def points(self) -> Iterator[BenchConfig]:
        """One configuration for each row block of the table."""
        for workload in self.workloads:
            for load in self.loads or (None,):
                yield replace(self.base, workload=workload, concurrency=load)


@dataclass(frozen=True)
class Heat:
    """One mode's part of one round."""

    workload: str
    #: None: requests left at the run's rate.
    concurrency: int | None
    round: int
    mode: str
    summary: Summary
    records: tuple[RequestRecord, ...]


@dataclass(frozen=True)
class Ratio:
    """To the first mode, formed within each round."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Row:
    """One mode at one load: medians over rounds, but for what drafts were worth, which is over all requests.

    Times in seconds. None: nothing to tell.
    """

    workload: str
    concurrency: int | None
    mode: str
    num_ok: int
    num_sent: int
    #: Answers with the same text as the first mode's to the same prompt.
    num_same: int
    ttft_s: float | None
    tpot_s: float | None
    drafts: DraftFigures | None
    #: Accepted guesses per step, by source.
    accepted_per_step: dict[str, float]
    output_tokens_per_s: float
    goodput_tokens_per_s: float
    tpot_ratio: Ratio | None
    goodput_ratio: Ratio | None


async def run_comparison(
    config: ComparisonConfig, api_key: str | None, on_heat: Callable[[Heat], None]
) -> list[Heat]:
    """Every heat, in the order in which they ran. Raises BenchError before the first request."""
    slo = config.base.slo()
    prompts: dict[BenchConfig, list[list[Prompt]]] = {}
    for number, point in enumerate(config.points()):
        # No mode meets a prompt twice, or its forest would know the answer.
        start = number * config.rounds
        prompts[point] = [
            make_prompts(point, first=(start + n) * point.num_requests) for n in range(config.rounds)
        ]
    await _warm_up(config, api_key)
    heats = []
    for point, rounds in prompts.items():
        for n, asked in enumerate(rounds):
            shift = n % len(config.modes)
            for mode in config.modes[shift:] + config.modes[:shift]:
                heat = await _heat(replace(point, speculation=mode), n, asked, slo, api_key)
                on_heat(heat)
                heats.append(heat)
    return heats


async def _heat(
    config: BenchConfig, number: int, prompts: Sequence[Prompt], slo: SloTarget, api_key: str | None
) -> Heat:
    transport = make_transport(config, key_for(config.speculation, api_key))
    try:
        records = await run_load(
            transport, prompts, config.schedule(), timeout_s=config.timeout_s, on_done=lambda _: None
        )
    finally:
        await transport.close()
    summary = summarise(records, slo)
    return Heat(config.workload, config.concurrency, number, config.speculation, summary, tuple(records))


async def _warm_up(config: ComparisonConfig, api_key: str | None) -> None:
    """A short request of each mode: its tenant's mirror is opened, and nobody meets a cold pod. Raises
    BenchError for a mode that the gateway refuses."""
    point = replace(next(config.points()), rate=None, concurrency=1, num_requests=1, max_tokens=8)
    prompts = [replace(prompt, messages=prompt.messages[-1:]) for prompt in make_prompts(point)]
    for mode in config.modes:
        heat = await _heat(replace(point, speculation=mode), 0, prompts, point.slo(), api_key)
        (record,) = heat.records
        if not record.is_ok:
            raise BenchError(
                f"a first request with speculation {mode} failed: {record.status}: {record.error}"
            )
    # The mirrors' streams come up beside the requests.
    await asyncio.sleep(0.5)


def key_for(mode: str, api_key: str | None) -> str | None:
    """The key of a mode: `{speculation}` in it stands for the mode's name."""
    return api_key.replace("{speculation}", mode) if api_key else None


def tabulate(heats: Sequence[Heat]) -> list[Row]:
    """A row for each mode at each load, in the order of the first round."""
    points = dict.fromkeys((heat.workload, heat.concurrency) for heat in heats)
    rows = []
    for point in points:
        here = [heat for heat in heats if (heat.workload, heat.concurrency) == point]
        modes = [heat.mode for heat in here if heat.round == 0]
        first = {heat.round: heat for heat in here if heat.mode == modes[0]}
        rows += [_row([heat for heat in here if heat.mode == mode], first) for mode in modes]
    return rows


def _row(heats: Sequence[Heat], first: dict[int, Heat]) -> Row:
    summaries = [heat.summary for heat in heats]
    good = [record for heat in heats for record in heat.records if record.is_ok]
    drafts = draft_figures(good)
    steps = sum(record.speculation.decode_steps for record in good if record.speculation is not None)
    return Row(
        workload=heats[0].workload,
        concurrency=heats[0].concurrency,
        mode=heats[0].mode,
        num_ok=sum(summary.num_ok for summary in summaries),
        num_sent=sum(summary.num_sent for summary in summaries),
        num_same=sum(_num_same(heat, first[heat.round]) for heat in heats),
        ttft_s=_median(summary.ttft_s.p50 if summary.ttft_s else None for summary in summaries),
        tpot_s=_median(tpot_of(summary) for summary in summaries),
        drafts=drafts,
        accepted_per_step={}
        if drafts is None
        else {name: count / steps for name, count in drafts.accepted_by_source.items()},
        output_tokens_per_s=median(summary.output_tokens_per_s for summary in summaries),
        goodput_tokens_per_s=median(summary.goodput_tokens_per_s for summary in summaries),
        tpot_ratio=_ratio(heats, first, tpot_of),
        goodput_ratio=_ratio(heats, first, lambda summary: summary.goodput_tokens_per_s),
    )


def tpot_of(summary: Summary) -> float | None:
    """The median request's time per output token."""
    return summary.tpot_s.p50 if summary.tpot_s else None


def _num_same(heat: Heat, first: Heat) -> int:
    texts = {record.index: record.text for record in first.records if record.is_ok}
    return sum(record.is_ok and texts.get(record.index) == record.text for record in heat.records)


def _median(values: Iterator[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _ratio(
    heats: Sequence[Heat], first: dict[int, Heat], figure: Callable[[Summary], float | None]
) -> Ratio | None:
    """None where a round has nothing to divide, or to divide by."""
    ratios = []
    for heat in heats:
        mine, base = figure(heat.summary), figure(first[heat.round].summary)
        if mine is not None and base:
            ratios.append(mine / base)
    return Ratio(median(ratios), min(ratios), max(ratios)) if ratios else None
