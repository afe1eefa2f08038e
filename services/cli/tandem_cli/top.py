"""`tandem top`: a gateway's dashboard in the terminal, from the same samples as the page."""

from __future__ import annotations

import itertools
import ssl
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text
from tandem_gateway.dashboard.history import MAX_SAMPLES
from tandem_gateway.dashboard.rows import ClassRow, EndedRow, OpenRow, PodRow, Sample, TtftRow
from tandem_gateway.dashboard.sampler import INTERVAL_S

from tandem_cli.targets import unreachable

_TIMEOUT_S = 5.0
_MINUTE_S, _FIVE_MINUTES_S, _HALF_HOUR_S, _FLOW_S = 60.0, 300.0, 1800.0, 10.0
_MAX_REQUESTS = 10
_KV_WIDTH = 16
#: Width below which a terminal hides the widest column; width of the other columns of requests.
_NARROW, _REQUEST_COLUMNS = 105, 66
_MAX_BAR_WIDTH = 80
#: Width of text that is not for a terminal.
_FILE_WIDTH = 120
#: Stages differ in characters too, for readers who cannot distinguish the colours.
_STAGES = (
    ("queue_s", "·", "bright_black"),
    ("prefill_s", "▒", "yellow"),
    ("transfer_s", "░", "magenta"),
    ("decode_s", "█", "blue"),
    ("failover_s", "╳", "red"),
)

RowT = TypeVar("RowT", ClassRow, PodRow, OpenRow, EndedRow, TtftRow)


class TopError(Exception):
    """The gateway cannot be read; the message is for the user."""


class RefusedError(TopError):
    """The key is missing, unknown or not an operator's; do not retry."""


class SeveralGatewaysError(TopError):
    """Several gateways answer at one address; their sample numbers conflict."""


class Feed:
    """Samples of one gateway, for the period that the gateway keeps."""

    def __init__(self, url: str, api_key: str | None = None, ca_file: Path | None = None) -> None:
        self._url = url
        self._client = httpx.Client(
            base_url=self._url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=_TIMEOUT_S,
            verify=True if ca_file is None else ssl.create_default_context(cafile=str(ca_file)),
            trust_env=False,
        )
        self._next = 0
        #: Start time of the last gateway, and the number of consecutive changes of the answering gateway.
        self._start = ""
        self._num_changes = 0
        self.about: Mapping[str, Any] = {}
        self.samples: deque[Sample] = deque(maxlen=MAX_SAMPLES)

    def poll(self) -> None:
        """Reads all new samples. Raises TopError."""
        while True:
            body = self._get()
            if self._is_another(body["about"]["start"]):
                # A restarted gateway counts from zero.
                self.samples.clear()
                self._next = 0
                if self._num_changes > 1:
                    raise SeveralGatewaysError(
                        f"several gateways answer at {self._url}; give the address of one with --target"
                    )
                time.sleep(INTERVAL_S)
                continue
            self.about, self._next = body["about"], body["next"]
            columns = self.about["columns"]
            self.samples.extend(_unpacked(sample, columns) for sample in body["samples"])
            if body["next"] > body["newest"]:
                return

    def _is_another(self, start: str) -> bool:
        """Whether another gateway answers than before: a restarted one, or one of several at the address."""
        is_another = self._start not in ("", start)
        self._start = start
        self._num_changes = self._num_changes + 1 if is_another else 0
        return is_another

    def _get(self) -> Mapping[str, Any]:
        try:
            answer = self._client.get("/dashboard/data", params={"since": self._next})
            body: Mapping[str, Any] = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise TopError(unreachable(self._url, str(error))) from error
        if answer.status_code in (401, 403):
            raise RefusedError(f"{body['error']['message']} (--api-key, or TANDEM_API_KEY)")
        if answer.status_code != 200:
            raise TopError(f"{self._url}: {body.get('error', {}).get('message', answer.status_code)}")
        return body

    def before(self, seconds: float) -> Sample:
        """The sample `seconds` before the newest one, or else the oldest one."""
        at = self.samples[-1]["time"] - seconds + INTERVAL_S / 2
        return self.samples[max(bisect_right(self.samples, at, key=lambda sample: sample["time"]) - 1, 0)]


def _unpacked(sample: Mapping[str, Any], columns: Mapping[str, list[str]]) -> Sample:
    """Converts arrays to rows; ignores columns that this version does not know."""

    def row(kind: type[RowT], name: str, values: Iterable[Any]) -> RowT:
        known = dict(zip(columns[name], values, strict=True))
        return kind(**{field: known[field] for field in kind._fields})

    return cast(
        Sample,
        {
            **sample,
            "classes": {name: row(ClassRow, "classes", values) for name, values in sample["classes"].items()},
            "pods": [row(PodRow, "pods", values) for values in sample["pods"]],
            "open": [row(OpenRow, "open", values) for values in sample["open"]],
            "requests": [row(EndedRow, "requests", values) for values in sample["requests"]],
            "ttft": None if sample["ttft"] is None else row(TtftRow, "ttft", sample["ttft"]),
        },
    )


# -- display -------------------------------------------------------------------------------------------------


def render(feed: Feed, width: int, trouble: str = "") -> RenderableType:
    """The dashboard for a terminal of `width` columns. `trouble`: why there is no newer sample, or ""."""
    if not feed.samples:
        return Text(trouble or "the gateway has no sample yet")
    about = feed.about
    at = time.strftime("%H:%M:%S", time.localtime(feed.samples[-1]["time"]))
    head = Text.assemble((f"gateway {about['gateway']}", "bold"), f"  {about['model']}  {at}")
    if trouble:
        head.append(f"  {trouble}; trying again", "bold red")
    tables = (
        _classes(feed, with_objectives=width > _NARROW),
        Group(*_lines(feed)),
        _pods(feed),
        _drafts(feed),
        _requests(feed, width),
    )
    return Group(head, *(part for table in tables for part in (Text(), table)))


def _classes(feed: Feed, *, with_objectives: bool) -> Table:
    now = feed.samples[-1]
    minute, half_hour = feed.before(_MINUTE_S), feed.before(_HALF_HOUR_S)
    budget = 1 - feed.about["attainment_objective"]
    titles = (">requests/s", ">tokens/s", ">goodput/s", ">attained", ">burn 5m", ">30m", ">missed")
    table = _table("class", *(("objectives",) if with_objectives else ()), *titles)
    for name, row in now["classes"].items():

        def per_second(field: str, name: str = name) -> str:
            return _per_second(minute, now, lambda sample: getattr(sample["classes"][name], field))

        share = _attainment(minute, now, name)
        burns = [_attainment(feed.before(seconds), now, name) for seconds in (_FIVE_MINUTES_S, _HALF_HOUR_S)]
        limits = feed.about["objectives"][name]
        objectives = []
        for kind in ("ttft", "tpot", "e2e"):
            limit_s, slowdown = limits[f"{kind}_s"], limits[f"{kind}_slowdown"]
            given = [_duration(limit_s)] * bool(limit_s) + [f"{slowdown:g}x"] * bool(slowdown)
            if given:
                objectives.append(f"{kind.upper()} {' or '.join(given)}")
        table.add_row(
            name,
            *((", ".join(objectives) or "none",) if with_objectives else ()),
            per_second("received"),
            per_second("output_tokens"),
            per_second("goodput_tokens"),
            Text(_percent(share), "bold red" if share is not None and 1 - share > budget else ""),
            *("–" if value is None else f"{(1 - value) / budget:.1f}" for value in burns),
            f"{row.missed - half_hour['classes'][name].missed:,}",
        )
    return table


def _lines(feed: Feed) -> list[Text]:
    now, minute, flow = feed.samples[-1], feed.before(_MINUTE_S), feed.before(_FLOW_S)
    half_hour = feed.before(_HALF_HOUR_S)

    def arrived(sample: Sample) -> int:
        return sum(row.received for row in sample["classes"].values())

    transfers = sum(pod.transfers for pod in now["pods"] if pod.role == "decode" and not pod.trouble)
    stages = (
        f"stages     {_per_second(flow, now, arrived)}/s → queued {now['queued']} → "
        f"{_per_second(flow, now, lambda sample: sample['admitted'])}/s → prefill {now['prefill']} → "
        f"{_per_second(flow, now, lambda sample: sample['begun'])}/s → decode {now['decode']} → "
        f"{_per_second(flow, now, lambda sample: sample['ended'])}/s; KV transfers of all pods {transfers}"
    )
    predicted = now["predictions"] - minute["predictions"]
    held = (now["predictions_held"] - minute["predictions_held"]) / predicted if predicted else None
    newest = next((sample["ttft"] for sample in reversed(feed.samples) if sample["ttft"]), None)
    ttft = (
        "TTFT       no prediction yet"
        if newest is None
        else f"TTFT       newest {_duration(newest.actual_s)}, predicted p50 {_duration(newest.p50_s)}, p90 "
        f"{_duration(newest.p90_s)}; within p90 in the last minute: {_percent(held)}"
    )
    moved = {cause: count - half_hour["failovers"].get(cause, 0) for cause, count in now["failovers"].items()}
    causes = ", ".join(f"{cause} {count}" for cause, count in moved.items() if count)
    failovers = (
        f"failovers  decode {sum(moved.values())}{f' ({causes})' if causes else ''}, prefill "
        f"{now['prefill_retries'] - half_hour['prefill_retries']} in the last 30 minutes"
    )
    return [Text(stages), Text(ttft), Text(failovers)]


def _pods(feed: Feed) -> Table:
    table = _table("pod", "state", "KV █ used ▒ cached", ">used", ">waiting", ">running", ">KV transfers")
    for pod in feed.samples[-1]["pods"]:
        if pod.trouble:
            table.add_row(pod.pod_id, Text("lost", "bold red"), Text(pod.trouble, no_wrap=True), *["–"] * 4)
            continue
        used = pod.kv_used / max(pod.kv_blocks, 1)
        num_used = round(_KV_WIDTH * used)
        num_cached = round(_KV_WIDTH * (pod.kv_used + pod.kv_cached) / max(pod.kv_blocks, 1)) - num_used
        bar = ("█" * num_used + "▒" * num_cached).ljust(_KV_WIDTH, "·")
        counts = (pod.waiting, pod.running, pod.transfers)
        table.add_row(pod.pod_id, "healthy", bar, _percent(used), *(f"{count:,}" for count in counts))
    return table


def _drafts(feed: Feed) -> Table:
    now, minute = feed.samples[-1], feed.before(_MINUTE_S)
    table = _table("drafts, last minute", ">drafted", ">accepted", ">share")
    for source in sorted(now["drafted"]):
        drafted = now["drafted"][source] - minute["drafted"].get(source, 0)
        accepted = now["accepted"].get(source, 0) - minute["accepted"].get(source, 0)
        share = _percent(accepted / drafted if drafted else None)
        table.add_row(source, f"{drafted:,}", f"{accepted:,}", share)
    return table


def _requests(feed: Feed, width: int) -> Table:
    stages = "queue · prefill ▒ transfer ░ decode █ failover ╳" if width > _NARROW else "stages"
    table = _table("ended", "request", "class", ">TTFT", ">E2E", "SLO", stages)
    newest = (
        (sample["time"], request) for sample in reversed(feed.samples) for request in sample["requests"]
    )
    shown = list(itertools.islice(newest, _MAX_REQUESTS))
    bar_width = min(max(width - _REQUEST_COLUMNS, 10), _MAX_BAR_WIDTH)
    longest = max([request.e2e_s for _, request in shown], default=0.0) or 1.0
    for at, request in shown:
        bar = Text()
        for field, character, style in _STAGES:
            bar.append(character * round(bar_width * getattr(request, field) / longest), style)
        table.add_row(
            time.strftime("%H:%M:%S", time.localtime(at)),
            request.request_id[:12],
            request.slo_class,
            _duration(request.ttft_s) if request.decode_pod else "–",
            _duration(request.e2e_s),
            Text(request.cause, "bold red") if request.cause else "met" + " (wider)" * request.is_widened,
            bar,
        )
    return table


def _table(*titles: str) -> Table:
    """A table. Titles that begin with > are those of numeric columns."""
    table = Table(box=None, header_style="bright_black", pad_edge=False)
    for title in titles:
        is_number = title.startswith(">")
        table.add_column(title.removeprefix(">"), justify="right" if is_number else "left", no_wrap=True)
    return table


def _attainment(before: Sample, now: Sample, name: str) -> float | None:
    """Attainment of the requests that ended between two samples; None if none ended."""
    first, last = before["classes"][name], now["classes"][name]
    met = last.met - first.met
    ended = met + last.missed - first.missed
    return met / ended if ended else None


def _per_second(before: Sample, now: Sample, count: Callable[[Sample], int]) -> str:
    seconds = now["time"] - before["time"]
    rate = (count(now) - count(before)) / seconds if seconds > 0 else 0.0
    return f"{rate:,.1f}" if rate < 10 else f"{rate:,.0f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}".replace("%", " %")


def _duration(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.2f} s"


# -- the command ---------------------------------------------------------------------------------------------


def show(feed: Feed, console: Console, *, once: bool) -> None:
    """Runs until Ctrl-C, or once. Raises TopError if the first read fails or the key is refused."""
    feed.poll()
    if once:
        if not console.is_terminal:
            console.width = _FILE_WIDTH
        console.print(render(feed, console.width))
        return
    trouble = ""
    with Live(render(feed, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(INTERVAL_S)
            try:
                feed.poll()
                trouble = ""
            except RefusedError:
                raise
            except SeveralGatewaysError as error:
                trouble = str(error)
            except TopError:
                trouble = "the gateway does not answer"
            live.update(render(feed, console.width, trouble), refresh=True)
