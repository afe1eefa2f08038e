"""The alert rules and the recorded ratios that they share. Run generate.py after a change.

The error budget's burn is alerted on as the Google SRE workbook recommends (chapter 5, multi-window,
multi-burn-rate): a long window, so that few misses do not wake anybody, and a short one, so that an alert
ends soon after its cause.

Sums are by namespace, so that one Prometheus alerts on each of several systems by itself. Outside of
Kubernetes series have no such label, and all of them are one system.
"""

from __future__ import annotations

from dataclasses import dataclass

import yaml
from tandem_core.slo import ATTAINMENT_OBJECTIVE
from tandem_service import metric_table as t

#: Misses in the long window below which nothing is alerted: with few requests one miss is a large share.
_MIN_MISSES = 5

_BY_CLASS = "namespace, slo_class"

#: Severity -> (burn rate, long window, short window). A burn of 1 uses the budget of 30 days in 30 days;
#: 14.4 uses 2 % of it in an hour, 6 uses 5 % in six, 3 uses 10 % in a day.
BURNS = {
    "page": ((14.4, "1h", "5m"), (6.0, "6h", "30m")),
    "ticket": ((3.0, "1d", "2h"), (1.0, "3d", "6h")),
}


@dataclass(frozen=True)
class Alert:
    name: str
    expr: str
    severity: str
    #: How long the expression holds before the alert fires.
    for_: str
    summary: str
    #: What an operator does.
    action: str


def recorded_name(window: str) -> str:
    return f"namespace_slo_class:tandem_slo_miss_ratio:rate{window}"


def miss_ratio(window: str) -> str:
    """Misses per request that ended, by class."""
    misses = f"sum by ({_BY_CLASS}) (rate({t.SLO_MISSES.name}[{window}]))"
    met = f"sum by ({_BY_CLASS}) (rate({t.SLO_MET.name}[{window}]))"
    return f"{misses} / ({misses} + {met})"


def _burn(severity: str) -> Alert:
    """Fires for each class that is served, the operator's too."""
    budget = 1 - ATTAINMENT_OBJECTIVE
    terms = [
        f"({recorded_name(long)} > {burn * budget:g}"
        f" and {recorded_name(short)} > {burn * budget:g}"
        f" and sum by ({_BY_CLASS}) (increase({t.SLO_MISSES.name}[{long}])) >= {_MIN_MISSES})"
        for burn, long, short in BURNS[severity]
    ]
    windows = ", or ".join(f"{burn:g} times over {long} and {short}" for burn, long, short in BURNS[severity])
    return Alert(
        f"TandemErrorBudgetBurn{severity.capitalize()}",
        " or ".join(terms),
        severity,
        "0m" if severity == "ticket" else "1m",
        "Requests of class {{ $labels.slo_class }}{{ with $labels.namespace }} in {{ . }}{{ end }} miss "
        "their SLO faster than the objective of "
        f"{ATTAINMENT_OBJECTIVE:.0%} allows "
        f"({windows}).",
        "Open the SLO dashboard: *Misses by cause* shows whether requests are refused, fail or are slow, "
        "*p90 by stage* shows the slow stage. Refused or queued: add pods of the role whose stage grows "
        "(prefill for TTFT, decode for TPOT), or lower the load. Failed: see the fleet dashboard.",
    )


ALERTS = (
    *(_burn(severity) for severity in BURNS),
    Alert(
        "TandemNoDecodePod",
        f'{t.HEALTHY_PODS.name}{{role="decode"}} == 0',
        "page",
        "1m",
        "Gateway {{ $labels.instance }} has no decode pod that serves; requests fail.",
        "Check whether decode pods run, and their last log lines (memory, model folder, certificates). If "
        "they run and serve, the gateway's log lines `pod is not usable` name the cause.",
    ),
    Alert(
        "TandemNoPrefillPod",
        f'{t.HEALTHY_PODS.name}{{role="prefill"}} == 0 and on (instance) '
        f'max_over_time({t.LISTED_PODS.name}{{role="prefill"}}[1h]) > 0',
        "ticket",
        "2m",
        "Gateway {{ $labels.instance }} has no prefill pod that serves; decode pods compute the prompts.",
        "Requests are served, but long prompts slow down running answers. Check the prefill pods as for "
        "TandemNoDecodePod. If you removed the role, the alert ends an hour after the last pod was listed.",
    ),
    Alert(
        "TandemPodUnhealthy",
        f"{t.HEALTHY_PODS.name} < on (instance, role) {t.LISTED_PODS.name}",
        "ticket",
        "5m",
        "A {{ $labels.role }} pod that gateway {{ $labels.instance }} lists does not serve.",
        "`tandem up` and Kubernetes restart pods that end. A pod that stays unhealthy fails at start, serves "
        "another model revision, or cannot be reached: see the gateway's log.",
    ),
    Alert(
        "TandemGatewayAbsent",
        f"absent({t.IN_FLIGHT.name})",
        "page",
        "2m",
        "No gateway is scraped.",
        "Start the gateway, or fix the scrape configuration. Until then no other alert about requests can "
        "fire.",
    ),
    Alert(
        "TandemScrapeFailed",
        'up{job=~"tandem.*"} == 0',
        "ticket",
        "2m",
        "{{ $labels.job }} {{ $labels.instance }} does not answer scrapes.",
        "The process is gone, or its metrics port is closed or blocked by a network policy.",
    ),
    Alert(
        "TandemReportsStale",
        f"max by (namespace, role, pod_id) ({t.REPORT_AGE.name}) > 30",
        "ticket",
        "1m",
        "The last report of {{ $labels.role }} pod {{ $labels.pod_id }} is {{ $value | humanizeDuration "
        "}} old.",
        "The pod is dead, cannot be reached, or computes one very long step. If its process uses no CPU and "
        "its status age grows, the engine hangs: the pod ends itself after a while, otherwise restart it. "
        "Its requests move to other pods.",
    ),
    Alert(
        "TandemInvariantBroken",
        f"{t.VIOLATIONS.name} > 0",
        "page",
        "0m",
        "{{ $labels.job }} {{ $labels.instance }} found {{ $value }} broken invariants in its blocks or "
        "queues.",
        "This is a bug. Keep the pod's log and `GET /fleet` of a gateway, which names the violations. "
        "Restart the pod. Report both.",
    ),
    Alert(
        "TandemFailovers",
        f'sum by (namespace, cause) (increase({t.FAILOVERS.name}{{cause!="draining"}}[15m])) > 3',
        "ticket",
        "0m",
        "{{ $value | humanize }} answers moved to another decode pod in 15 minutes ({{ $labels.cause }}).",
        "Clients see a pause at most. Check the decode pods' restarts and last log lines. `silent` and "
        "`unreachable` without restarts point to the network.",
    ),
    Alert(
        "TandemHandoffsFail",
        f'sum by (namespace, outcome) (increase({t.HANDOFFS.name}{{outcome!="ok"}}[15m])) > 3 '
        f'and on (namespace) sum by (namespace) (rate({t.HANDOFFS.name}{{outcome!="ok"}}[15m])) '
        f"/ sum by (namespace) (rate({t.HANDOFFS.name}[15m])) > 0.05",
        "ticket",
        "0m",
        "More than 5 % of the attempts to get KV from a prefill pod fail ({{ $labels.outcome }}).",
        "Requests are served, more slowly. `no frames`: the KV ports of decode pods (`--kv-port`) are "
        "blocked. `crashed`, `engine hangs`: see the prefill pod's log. `refused`: the roles differ in model "
        "or KV layout.",
    ),
    Alert(
        "TandemSaturated",
        f"avg_over_time({t.SATURATION.name}[10m]) > 0.95",
        "ticket",
        "10m",
        "Gateway {{ $labels.instance }} is full: places for requests, KV memory of the decode pods, or spare "
        "time of the objectives.",
        "The fleet dashboard shows which. Refusals by prediction: add pods of the role whose stage grows. KV "
        "memory: add decode pods. Places: raise `--max-in-flight`.",
    ),
    Alert(
        "TandemKVFramesDamaged",
        f'sum by (namespace, cause) (increase({t.KV_DROPPED_FRAMES.name}{{cause=~"bad_.*|malformed"}}[15m]))'
        " > 0",
        "ticket",
        "0m",
        "Decode pods dropped damaged KV frames ({{ $labels.cause }}).",
        "No wrong text results: the blocks are recomputed. Repeated damage points to faulty memory or "
        "network hardware, or to pods of different versions.",
    ),
    Alert(
        "TandemRedisLost",
        f"{t.REDIS_CONNECTED.name} == 0",
        "ticket",
        "2m",
        "Redis does not answer {{ $labels.instance }}; replicas of the lookahead service do not share text.",
        "Requests are served, without newly shared text and without resumption through another gateway. "
        "Start Redis, or fix `--redis-url`.",
    ),
    Alert(
        "TandemRedisFull",
        f"increase({t.REDIS_FULL.name}[1h]) > 0",
        "ticket",
        "0m",
        "Redis was at its maxmemory, and {{ $labels.instance }} halved the streams of shared text.",
        "Requests are served; pods that start later get less shared text. Raise Redis' `maxmemory`, or lower "
        "`--stream-bytes` or `--max-bytes` of the lookahead service.",
    ),
    Alert(
        "TandemGatewayRedisLost",
        f"{t.GATEWAY_REDIS_CONNECTED.name} == 0",
        "ticket",
        "2m",
        "Redis does not answer gateway {{ $labels.instance }}; no other gateway can resume its answers.",
        "Requests are served. Start Redis, or fix `--redis-url`; the gateway's log has the reason.",
    ),
)


def to_yaml() -> str:
    """As Prometheus reads it."""
    windows = sorted({window for burns in BURNS.values() for _, *pair in burns for window in pair})
    groups = [
        {
            "name": "tandem-slo",
            "interval": "30s",
            "rules": [{"record": recorded_name(window), "expr": miss_ratio(window)} for window in windows],
        },
        {
            "name": "tandem",
            "rules": [
                {
                    "alert": alert.name,
                    "expr": alert.expr,
                    "for": alert.for_,
                    "labels": {"severity": alert.severity},
                    "annotations": {"summary": alert.summary, "action": alert.action},
                }
                for alert in ALERTS
            ],
        },
    ]
    head = "# Generated by deploy/observability/generate.py from alert_rules.py; do not edit.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=110)
