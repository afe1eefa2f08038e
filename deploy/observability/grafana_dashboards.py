"""The Grafana dashboards: a compact description of the panels, and how it becomes Grafana's JSON.

Names come from the table of metrics, so a renamed metric is renamed here. Run generate.py after a change.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from alert_rules import miss_ratio
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.builders import heatmap, prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common, dashboard
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from tandem_core.slo import ATTAINMENT_OBJECTIVE
from tandem_service import metric_table as t
from tandem_service.metric_rows import HistogramRow, Row, Unit

_SOURCE = dashboard.DataSourceRef(type_val="prometheus", uid="${datasource}")
#: A dashboard is 24 columns wide.
_WIDTH, _HEIGHT = 8, 7
_UNITS = {Unit.SECONDS: "s", Unit.BYTES: "bytes", Unit.RATIO: "percentunit"}
#: Rates over this many seconds; Grafana chooses it by the scrape interval.
_RATE = "$__rate_interval"


@dataclass(frozen=True)
class Query:
    expr: str
    #: Name of each series; {{label}} is replaced.
    legend: str = ""


@dataclass(frozen=True)
class Panel:
    title: str
    queries: tuple[Query, ...]
    #: Grafana's unit: s, bytes, Bps, percentunit, reqps, short.
    unit: str = "short"
    #: "lines", "stacked", "heatmap" or "number".
    shape: str = "lines"
    description: str = ""
    max_value: float | None = None


@dataclass(frozen=True)
class Section:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Board:
    uid: str
    title: str
    description: str
    sections: tuple[Section, ...]
    #: Variable -> the row whose label of this name gives its values.
    variables: dict[str, Row] = field(default_factory=dict)

    def panels(self) -> Iterator[Panel]:
        for section in self.sections:
            yield from section.panels


# -- queries ------------------------------------------------------------------------------------------


def total(row: Row, *by: str, where: str = "") -> str:
    """The value now, added up."""
    return f"sum{_by(by)}({row.name}{_braces(where)})"


def rate(row: Row, *by: str, where: str = "", suffix: str = "") -> str:
    """Per second."""
    return f"sum{_by(by)}(rate({row.name}{suffix}{_braces(where)}[{_RATE}]))"


def quantile(q: float, row: HistogramRow, *by: str, where: str = "") -> str:
    return f"histogram_quantile({q}, {rate(row, 'le', *by, where=where, suffix='_bucket')})"


def mean(row: HistogramRow, *by: str, where: str = "") -> str:
    return f"{rate(row, *by, where=where, suffix='_sum')} / {rate(row, *by, where=where, suffix='_count')}"


def _by(labels: tuple[str, ...]) -> str:
    return f" by ({', '.join(labels)}) " if labels else " "


def _braces(where: str) -> str:
    return f"{{{where}}}" if where else ""


def _quantiles(title: str, row: HistogramRow, *by: str, where: str = "", target: str = "") -> Panel:
    """p50, p90 and p99; `target`: the objective to draw beside them."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by)
    queries = [
        Query(quantile(q, row, *by, where=where), f"p{round(q * 100)} {legend}".strip())
        for q in (0.5, 0.9, 0.99)
    ]
    if target:
        of_class = f'objective="{target}"' + (f", {where}" if where else "")
        queries.append(Query(f"max({t.SLO_TARGET_SECONDS.name}{{{of_class}}}) or vector(0)", "objective"))
    return Panel(title, tuple(queries), _UNITS.get(row.unit, "short"))


def _rates(title: str, row: Row, label: str, unit: str, *, where: str = "", shape: str = "stacked") -> Panel:
    return Panel(
        title,
        (Query(rate(row, label, where=where), f"{{{{{label}}}}}"),),
        unit,
        shape,
        description=f"{row.help}.",
    )


# -- boards -------------------------------------------------------------------------------------------

_ENDED = f"({rate(t.SLO_MET, 'slo_class')} + {rate(t.SLO_MISSES, 'slo_class')})"

FLEET = Board(
    "tandem-fleet",
    "Tandem / Fleet",
    "Traffic, latency, stages and pods of one system.",
    (
        Section(
            "Traffic",
            (
                _rates("Requests by outcome", t.REQUESTS, "outcome", "reqps"),
                Panel(
                    "Output and prompt tokens",
                    (Query(rate(t.OUTPUT_TOKENS), "output"), Query(rate(t.PROMPT_TOKENS), "prompt")),
                    description="Per second; prompts count when their request is finished.",
                ),
                Panel(
                    "Queue and places",
                    (
                        Query(total(t.QUEUE_LENGTH), "waiting at the gateway"),
                        Query(total(t.IN_FLIGHT), "in flight"),
                        Query(total(t.ADMISSION_LIMIT), "limit"),
                    ),
                ),
                _quantiles("Time to first token", t.TTFT_SECONDS),
                _quantiles("Time per output token", t.TPOT_SECONDS),
                _quantiles("End to end", t.E2E_SECONDS),
            ),
        ),
        Section(
            "Stages: gateway, prefill, transfer, decode",
            (
                Panel(
                    "Mean time by stage",
                    (Query(mean(t.STAGE_SECONDS, "stage"), "{{stage}}"),),
                    "s",
                    "stacked",
                    "Of finished requests. Queue includes the wait at the gateway and in pods.",
                ),
                Panel(
                    "Prompts on their way from prefill pods",
                    (Query(total(t.HANDOFF_QUEUE, "state"), "{{state}}"),),
                    shape="stacked",
                    description=f"{t.HANDOFF_QUEUE.help}.",
                ),
                Panel(
                    "Requests in pods",
                    (Query(total(t.POD_REQUESTS, "job", "instance", "state"), "{{instance}} {{state}}"),),
                    shape="stacked",
                    description=f"{t.POD_REQUESTS.help}.",
                ),
            ),
        ),
        Section(
            "Pods",
            (
                Panel(
                    "Pods that serve",
                    (
                        Query(f"max by (role) ({t.HEALTHY_PODS.name})", "{{role}}"),
                        Query(f"max by (role) ({t.LISTED_PODS.name})", "{{role}} listed"),
                    ),
                ),
                Panel(
                    "Age of pods' reports",
                    (Query(f"max by (role, pod_id) ({t.REPORT_AGE.name})", "{{pod_id}}"),),
                    "s",
                    description=f"{t.REPORT_AGE.help}.",
                ),
                Panel(
                    "KV use and saturation",
                    (
                        Query(f"max by (role) ({t.FLEET_KV_USAGE.name})", "KV, {{role}}"),
                        Query(f"max({t.SATURATION.name})", "saturation"),
                    ),
                    "percentunit",
                    max_value=1.0,
                ),
                _rates("Requests moved to another decode pod", t.FAILOVERS, "cause", "ops"),
                _rates("Handoffs by outcome", t.HANDOFFS, "outcome", "ops"),
                Panel(
                    "Broken invariants",
                    (Query(total(t.VIOLATIONS, "instance"), "{{instance}}"),),
                    description=f"{t.VIOLATIONS.help}. Anything but 0 is a bug.",
                ),
                Panel(
                    "CPU",
                    (Query(f"rate(process_cpu_seconds_total[{_RATE}])", "{{job}} {{instance}}"),),
                    description="Seconds of CPU per second: the number of cores used.",
                ),
                Panel("Memory", (Query("process_resident_memory_bytes", "{{job}} {{instance}}"),), "bytes"),
                _rates("gRPC calls by status", t.GRPC_CALLS, "code", "ops"),
            ),
        ),
    ),
)

SLO = Board(
    "tandem-slo",
    "Tandem / SLO",
    f"Attainment, goodput and error budget by class and tenant; the objective is {ATTAINMENT_OBJECTIVE:.0%}.",
    (
        Section(
            "Now",
            (
                Panel(
                    "Attainment by class",
                    (
                        Query(
                            f"sum by (slo_class) (increase({t.SLO_MET.name}[$__range])) / (sum by "
                            f"(slo_class) "
                            f"(increase({t.SLO_MET.name}[$__range])) + sum by (slo_class) "
                            f"(increase({t.SLO_MISSES.name}[$__range])))",
                            "{{slo_class}}",
                        ),
                    ),
                    "percentunit",
                    "number",
                    "Share of the well-formed requests of the range that met every objective; refused and "
                    "failed ones are misses.",
                    max_value=1.0,
                ),
                Panel(
                    "Error budget left",
                    (
                        Query(
                            f"1 - sum by (slo_class) (increase({t.SLO_MISSES.name}[$__range])) / "
                            f"({1 - ATTAINMENT_OBJECTIVE:g} * (sum by (slo_class) "
                            f"(increase({t.SLO_MET.name}[$__range])) + "
                            f"sum by (slo_class) (increase({t.SLO_MISSES.name}[$__range]))))",
                            "{{slo_class}}",
                        ),
                    ),
                    "percentunit",
                    "number",
                    "Of the range: 1 is untouched, 0 is used up, below 0 the objective is missed.",
                ),
                Panel(
                    "Objectives",
                    (
                        Query(
                            f"max by (slo_class, objective) ({t.SLO_TARGET_SECONDS.name})",
                            "{{slo_class}} {{objective}}",
                        ),
                    ),
                    "s",
                    "number",
                ),
            ),
        ),
        Section(
            "Over time",
            (
                Panel(
                    "Attainment",
                    (Query(f"{rate(t.SLO_MET, 'slo_class')} / {_ENDED}", "{{slo_class}}"),),
                    "percentunit",
                    max_value=1.0,
                ),
                Panel(
                    "Goodput",
                    (
                        Query(rate(t.GOODPUT_TOKENS, "slo_class"), "{{slo_class}}"),
                        Query(rate(t.OUTPUT_TOKENS), "all output"),
                    ),
                    description="Output tokens per second of requests that met their SLO, beside all.",
                ),
                Panel(
                    "Error budget burn",
                    tuple(
                        Query(
                            f"{miss_ratio(window)} / {1 - ATTAINMENT_OBJECTIVE:g}",
                            f"{{{{slo_class}}}} {window}",
                        )
                        for window in ("5m", "1h", "6h")
                    ),
                    description="1 uses the whole budget of a period in the period; the alerts fire at 14.4, "
                    "6, 3 and 1.",
                ),
                Panel(
                    "Misses by cause",
                    (Query(rate(t.SLO_MISSES, "slo_class", "cause"), "{{slo_class}} {{cause}}"),),
                    "reqps",
                    "stacked",
                    f"{t.SLO_MISSES.help}.",
                ),
                _rates("Refusals by reason", t.REFUSED, "reason", "reqps"),
                Panel(
                    "Share of requests with widened objectives",
                    (Query(f"{rate(t.SLO_WIDENED, 'slo_class')} / {_ENDED}", "{{slo_class}}"),),
                    "percentunit",
                    description=f"{t.SLO_WIDENED.help}.",
                    max_value=1.0,
                ),
                Panel(
                    "Predicted time to first token",
                    (
                        Query(f"max({t.PREDICTED_TTFT.name})", "of a prompt of 4096 tokens"),
                        Query(quantile(0.5, t.TTFT_SECONDS), "p50 of requests"),
                    ),
                    "s",
                ),
                Panel(
                    "Predictions that held",
                    (
                        Query(
                            f"{rate(t.PREDICTIONS_HELD, 'slo_class', 'time')} / "
                            f"{rate(t.PREDICTIONS, 'slo_class', 'time')}",
                            "{{slo_class}} {{time}}",
                        ),
                    ),
                    "percentunit",
                    description="Share of requests that took at most the 90th percentile predicted at their "
                    "admission; 90 % if predictions are calibrated.",
                    max_value=1.0,
                ),
            ),
        ),
        Section(
            "Tenants",
            (
                Panel(
                    "Attainment by tenant",
                    (
                        Query(
                            f"{rate(t.SLO_MET, 'tenant')} / ({rate(t.SLO_MET, 'tenant')} + "
                            f"{rate(t.SLO_MISSES, 'tenant')})",
                            "{{tenant}}",
                        ),
                    ),
                    "percentunit",
                    max_value=1.0,
                ),
                _rates("Goodput by tenant", t.GOODPUT_TOKENS, "tenant", "short"),
                _rates("Requests received by tenant", t.SLO_RECEIVED, "tenant", "reqps"),
            ),
        ),
    ),
)

_CLASS = 'slo_class="$slo_class"'

REQUEST_CLASS = Board(
    "tandem-request-class",
    "Tandem / Request class",
    "Latency, stages, lengths and misses of one SLO class.",
    (
        Section(
            "Latency",
            (
                Panel(
                    "Time to first token, all requests",
                    (
                        Query(
                            f"sum by (le) (increase({t.TTFT_SECONDS.name}_bucket{{{_CLASS}}}[{_RATE}]))",
                            "{{le}}",
                        ),
                    ),
                    "s",
                    "heatmap",
                ),
                _quantiles("Time to first token", t.TTFT_SECONDS, where=_CLASS, target="ttft"),
                _quantiles("Time per output token", t.TPOT_SECONDS, where=_CLASS, target="tpot"),
                _quantiles("Time between messages of tokens", t.ITL_SECONDS, where=_CLASS),
                _quantiles("End to end", t.E2E_SECONDS, where=_CLASS, target="e2e"),
                _quantiles("Wait for admission", t.QUEUE_SECONDS, where=_CLASS),
            ),
        ),
        Section(
            "Stages and lengths",
            (
                Panel(
                    "p90 by stage",
                    (Query(quantile(0.9, t.STAGE_SECONDS, "stage", where=_CLASS), "{{stage}}"),),
                    "s",
                ),
                _quantiles("Prompt tokens", t.REQUEST_PROMPT_TOKENS, where=_CLASS),
                _quantiles("Output tokens", t.REQUEST_OUTPUT_TOKENS, where=_CLASS),
            ),
        ),
        Section(
            "Requests",
            (
                Panel(
                    "Received, met",
                    (
                        Query(rate(t.SLO_RECEIVED, where=_CLASS), "received"),
                        Query(rate(t.SLO_MET, where=_CLASS), "met"),
                    ),
                    "reqps",
                ),
                _rates("Misses by cause", t.SLO_MISSES, "cause", "reqps", where=_CLASS),
                Panel(
                    "Share of prompt tokens found in a prefix cache",
                    (
                        Query(
                            f"{rate(t.CACHED_PROMPT_TOKENS, where=_CLASS)} / "
                            f"{rate(t.PROMPT_TOKENS, where=_CLASS)}",
                            "cached",
                        ),
                    ),
                    "percentunit",
                    max_value=1.0,
                ),
            ),
        ),
    ),
    {"slo_class": t.SLO_RECEIVED},
)

SPECULATION = Board(
    "tandem-speculation",
    "Tandem / Speculation",
    "What drafts are worth, by source and position, and the lookahead service.",
    (
        Section(
            "Drafts",
            (
                Panel(
                    "Tokens per step",
                    (
                        Query(
                            f"1 + ({rate(t.ACCEPTED_TOKENS)} or vector(0)) / {rate(t.DECODE_STEPS)}",
                            "tokens per step",
                        ),
                    ),
                    description="Output tokens per verification pass of a sequence; 1 without drafts.",
                ),
                Panel(
                    "Share of guesses accepted",
                    (
                        Query(
                            f"{rate(t.ACCEPTED_TOKENS, 'source')} / {rate(t.DRAFTED_TOKENS, 'source')}",
                            "{{source}}",
                        ),
                        Query(f"{rate(t.ACCEPTED_TOKENS)} / {rate(t.DRAFTED_TOKENS)}", "all"),
                    ),
                    "percentunit",
                    max_value=1.0,
                ),
                Panel(
                    "Share of steps with a draft",
                    (Query(f"{rate(t.DRAFTS)} / {rate(t.DECODE_STEPS)}", "with a draft"),),
                    "percentunit",
                    max_value=1.0,
                ),
                _rates("Guesses verified by source", t.DRAFTED_TOKENS, "source", "short"),
                _rates("Guesses accepted by source", t.ACCEPTED_TOKENS, "source", "short"),
                Panel(
                    "Accepted per draft by position",
                    (
                        Query(
                            f"{rate(t.ACCEPTED_AT, 'position')} / on () group_left () {rate(t.DRAFTS)}",
                            "{{position}}",
                        ),
                    ),
                    "percentunit",
                    description="Share of the drafts of which the guess at this position was accepted.",
                    max_value=1.0,
                ),
                _rates("Guesses verified by position", t.DRAFTED_AT, "position", "short"),
                Panel(
                    "Predicted and realised acceptance",
                    (
                        Query(
                            f"{rate(t.GUESSES_PREDICTED)} / {rate(t.GUESSES_SENT)}",
                            "predicted",
                        ),
                        Query(
                            f"{rate(t.GUESSES_ACCEPTED)} / {rate(t.GUESSES_SENT)}",
                            "accepted",
                        ),
                    ),
                    "percentunit",
                    max_value=1.0,
                ),
                Panel(
                    "Acceptance by tenth of the prediction",
                    (
                        Query(
                            f"{rate(t.GUESSES_ACCEPTED, 'tenth')} / {rate(t.GUESSES_SENT, 'tenth')}",
                            "{{tenth}}",
                        ),
                    ),
                    "percentunit",
                    description="A calibrated drafter has the line of 0.3 between 30 and 40 %.",
                    max_value=1.0,
                ),
            ),
        ),
        Section(
            "Lookahead service",
            (
                Panel(
                    "Streams and Redis",
                    (
                        Query(total(t.STREAMS_OPEN), "streams of decode pods"),
                        Query(total(t.LOOKAHEAD_CONNECTED), "streams, as pods count them"),
                        Query(f"min({t.REDIS_CONNECTED.name})", "Redis answers"),
                    ),
                ),
                Panel(
                    "Corpus",
                    (
                        Query(total(t.CORPUS_TOKENS), "tokens held"),
                        Query(total(t.CORPUS_SHARED_TOKENS), "tokens shared with pods"),
                    ),
                ),
                Panel("Corpus memory", (Query(total(t.CORPUS_MEMORY_BYTES), "bytes"),), "bytes"),
                Panel(
                    "Spans",
                    (
                        Query(rate(t.SPANS_RECEIVED), "received"),
                        Query(rate(t.SPANS_DROPPED), "dropped by the service"),
                        Query(rate(t.LOOKAHEAD_DROPPED_SPANS), "dropped by pods"),
                        Query(rate(t.PROMPTS_REFUSED), "prompts that are not shared"),
                    ),
                    "ops",
                ),
                Panel(
                    "Faults",
                    (
                        Query(rate(t.REDIS_FAILURES), "Redis lost"),
                        Query(rate(t.REDIS_FULL), "Redis full"),
                        Query(rate(t.ENTRIES_DAMAGED), "entries damaged"),
                        Query(rate(t.SNAPSHOTS_REJECTED), "snapshots damaged"),
                        Query(rate(t.STREAMS_LAGGING), "streams closed"),
                    ),
                    "ops",
                ),
                Panel(
                    "Backlog",
                    (
                        Query(total(t.BACKLOG_SPANS), "spans that wait for Redis"),
                        Query(total(t.NAMESPACES), "namespaces"),
                    ),
                ),
            ),
        ),
    ),
)

KV_PLANE = Board(
    "tandem-kv-plane",
    "Tandem / KV plane",
    "KV memory of both roles, handoffs and transfers, prefix caches.",
    (
        Section(
            "KV memory",
            (
                Panel(
                    "KV blocks by state",
                    (Query(total(t.KV_BLOCKS, "job", "state"), "{{job}} {{state}}"),),
                    shape="stacked",
                    description=f"{t.KV_BLOCKS.help}.",
                ),
                Panel(
                    "KV use by pod",
                    (
                        Query(
                            f'sum by (job, instance) ({t.KV_BLOCKS.name}{{state="used"}}) / '
                            f"sum by (job, instance) ({t.KV_BLOCKS.name})",
                            "{{job}} {{instance}}",
                        ),
                    ),
                    "percentunit",
                    max_value=1.0,
                ),
                Panel(
                    "Preemptions",
                    (
                        Query(rate(t.DECODE_PREEMPTIONS), "decode"),
                        Query(rate(t.PREFILL_PREEMPTIONS), "prefill"),
                    ),
                    "ops",
                ),
            ),
        ),
        Section(
            "Handoffs and transfers",
            (
                _rates("Handoffs by outcome", t.HANDOFFS, "outcome", "ops"),
                Panel(
                    "Prompts on their way",
                    (Query(total(t.HANDOFF_QUEUE, "state"), "{{state}}"),),
                    shape="stacked",
                    description=f"{t.HANDOFF_QUEUE.help}.",
                ),
                _quantiles("Transfer after the first token", t.TRANSFER_SECONDS),
                Panel(
                    "KV bytes",
                    (
                        Query(rate(t.KV_SENT_BYTES), "sent"),
                        Query(rate(t.KV_RECEIVED_BYTES), "received"),
                    ),
                    "Bps",
                    description="Counted when a request ends.",
                ),
                _rates("Dropped frames by cause", t.KV_DROPPED_FRAMES, "cause", "ops"),
                _rates("Prompts computed on decode pods", t.LOCAL_PREFILLS, "reason", "reqps"),
            ),
        ),
        Section(
            "Prefill",
            (
                _rates("Prompts by outcome", t.PREFILL_REQUESTS, "outcome", "reqps"),
                _quantiles("Wait for the first step", t.PREFILL_QUEUE_SECONDS),
                _quantiles("First step to first token", t.PREFILL_SECONDS),
                Panel(
                    "Prompt tokens",
                    (
                        Query(rate(t.PREFILL_PROMPT_TOKENS), "computed or cached"),
                        Query(rate(t.PREFILL_CACHED_TOKENS), "cached"),
                    ),
                ),
                Panel(
                    "Share of prompt tokens found in a prefix cache",
                    (Query(f"{rate(t.CACHED_PROMPT_TOKENS)} / {rate(t.PROMPT_TOKENS)}", "cached"),),
                    "percentunit",
                    description="Of either pod, over finished requests.",
                    max_value=1.0,
                ),
                Panel(
                    "Age of the engine's state",
                    (Query(f"max by (job, instance) ({t.STATUS_AGE.name})", "{{job}} {{instance}}"),),
                    "s",
                    description=f"{t.STATUS_AGE.help}.",
                ),
            ),
        ),
    ),
)

BOARDS = (FLEET, SLO, REQUEST_CLASS, SPECULATION, KV_PLANE)


# -- Grafana's JSON -----------------------------------------------------------------------------------


def to_json(board: Board) -> str:
    """As Grafana imports and exports it."""
    made = (
        builders.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(["tandem"])
        .timezone("browser")
        .refresh("10s")
        .time("now-1h", "now")
        .tooltip(dashboard.DashboardCursorSync.CROSSHAIR)
        .with_variable(builders.DatasourceVariable("datasource").label("Data source").type("prometheus"))
        .link(builders.DashboardLink("Tandem").type(dashboard.DashboardLinkType.DASHBOARDS).tags(["tandem"]))
    )
    for name, row in board.variables.items():
        made.with_variable(
            builders.QueryVariable(name)
            .label(name)
            .datasource(_SOURCE)
            .query(f"label_values({row.name}, {name})")
            .refresh(dashboard.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(dashboard.VariableSort.ALPHABETICAL_ASC)
        )
    ids = itertools.count(1)
    for section in board.sections:
        made.with_row(builders.Row(section.title).id(next(ids)))
        for panel in section.panels:
            made.with_panel(_panel(panel).id(next(ids)))
    model = made.build()
    return json.dumps(model, cls=JSONEncoder, indent=2, sort_keys=True) + "\n"


def _panel(panel: Panel) -> Any:
    builder: Any
    match panel.shape:
        case "lines" | "stacked":
            builder = timeseries.Panel().legend(
                VizLegendOptions()
                .display_mode(common.LegendDisplayMode.LIST)
                .placement(common.LegendPlacement.BOTTOM)
                .show_legend(True)
            )
            if panel.shape == "stacked":
                builder.stacking(StackingConfig().mode(common.StackingMode.NORMAL)).fill_opacity(25)
        case "heatmap":
            builder = heatmap.Panel().calculate(False).cell_gap(1)
            builder.y_axis(heatmap.YAxisConfig().unit(panel.unit))
        case "number":
            builder = stat.Panel()
        case _:
            raise ValueError(f"{panel.title}: no shape {panel.shape!r}")
    builder.title(panel.title).description(panel.description).datasource(_SOURCE).unit(panel.unit)
    builder.span(_WIDTH).height(_HEIGHT).min(0)
    if panel.max_value is not None:
        builder.max(panel.max_value)
    for index, query in enumerate(panel.queries):
        target = (
            prometheus.Dataquery()
            .expr(query.expr)
            .legend_format(query.legend)
            .ref_id(chr(ord("A") + index))
            .datasource(_SOURCE)
            .range()
        )
        if panel.shape == "heatmap":
            target.format(PromQueryFormat.HEATMAP)
        builder.with_target(target)
    return builder
