"""Scrapes of gateways and pods, and the snapshot of the fleet that is computed from them.

    gateways      requests received, refused and finished, lengths, kept TTFT and TPOT; objectives
    prefill pods  computed prompts, step costs, seconds of queued prompts
    decode pods   step costs, tokens per step, KV, sequences

Lengths and costs stay known while there are no requests and no pods.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean

from tandem_core.contracts import RefusalReason
from tandem_core.step_cost import UNKNOWN_COST, StepCost
from tandem_service import metric_table as table

from tandem_cli.scaler.exposition import Exposition
from tandem_cli.scaler.law import DecodeLoad, Kept, Pods, PrefillLoad, Snapshot, Traffic
from tandem_cli.scaler.totals import Totals

#: Arrivals are counted over the first, and compared with the second to see whether they grow.
RECENT_S, BEFORE_S = 30.0, 120.0
#: Lengths are means over this time.
_LENGTHS_S = 300.0
#: Refusals that more prefill pods would prevent, and those that more decode pods would.
_BY_TTFT = (RefusalReason.TTFT, RefusalReason.OTHERS, RefusalReason.QUEUE_FULL)
_BY_TPOT = (RefusalReason.TPOT, RefusalReason.E2E, RefusalReason.POD_FULL)


@dataclass(frozen=True)
class Scrapes:
    """Metrics of the processes by target, and whether all processes answered."""

    gateways: Mapping[str, Exposition]
    prefill: Mapping[str, Exposition]
    decode: Mapping[str, Exposition]
    is_complete: bool


@dataclass(frozen=True)
class _Known:
    """Values learnt from earlier requests."""

    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    work_s: float = 0.0
    local_prompt_s: float = 0.0
    prefill_cost: StepCost = UNKNOWN_COST
    decode_cost: StepCost = UNKNOWN_COST
    tokens_per_step: float = 1.0
    chunk: int = 512
    max_batch: int = 1
    kv_tokens: float = 0.0


class Readings:
    """Accumulates scrapes and computes snapshots. `window_s`: window of the shares of kept objectives."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._totals = Totals(max(_LENGTHS_S, BEFORE_S, window_s))
        self._known = _Known()
        self._scrapes = Scrapes({}, {}, {}, is_complete=False)
        self._targets: dict[tuple[str, str], float] = {}

    @property
    def is_known(self) -> bool:
        """Whether gateways were scraped twice, which the rate of arrivals needs."""
        return self._totals.covered(RECENT_S) > 0

    def add(self, now: float, scrapes: Scrapes) -> None:
        """Adds scrapes; at least one gateway must have answered."""
        for gateway in scrapes.gateways.values():
            for name in gateway.by_label(table.SLO_TARGET_SECONDS, "slo_class"):
                limits = gateway.by_label(table.SLO_TARGET_SECONDS, "objective", slo_class=name)
                self._targets |= {(name, objective): limit for objective, limit in limits.items()}
        counters = {f"gateway {target}": self._of_gateway(one) for target, one in scrapes.gateways.items()}
        counters |= {f"prefill {target}": _of_prefill(one) for target, one in scrapes.prefill.items()}
        if scrapes.is_complete:
            self._totals.forget(self._totals.targets() - counters.keys())
        self._totals.add(now, counters)
        self._scrapes = scrapes
        self._learn()

    def snapshot(self, now: float, prefill: Pods, decode: Pods) -> Snapshot:
        known, scrapes = self._known, self._scrapes
        pods = scrapes.decode.values()
        blocks = {
            state: sum(pod.sum(table.KV_BLOCKS, state=state) for pod in pods)
            for state in ("free", "cached", "used")
        }
        total = sum(blocks.values())
        return Snapshot(
            now,
            self._traffic(),
            PrefillLoad(
                prefill,
                known.work_s,
                sum(pod.sum(table.PROMPT_BACKLOG) for pod in scrapes.prefill.values()),
            ),
            DecodeLoad(
                decode,
                known.decode_cost,
                known.tokens_per_step,
                known.max_batch,
                known.kv_tokens,
                blocks["used"] / total if total else 0.0,
                int(
                    sum(
                        pod.sum(table.POD_REQUESTS, state=state)
                        for pod in pods
                        for state in ("waiting", "running")
                    )
                ),
                known.local_prompt_s,
            ),
        )

    # -- gateways ----------------------------------------------------------------------------------

    def _of_gateway(self, gateway: Exposition) -> dict[str, float]:
        """The counters that the law uses, by internal names."""
        refused = gateway.by_label(table.REFUSED, "reason")
        found = {
            "prompt tokens": gateway.total(table.REQUEST_PROMPT_TOKENS),
            "output tokens": gateway.total(table.REQUEST_OUTPUT_TOKENS),
            "finished": gateway.count(table.REQUEST_OUTPUT_TOKENS),
            "cached tokens": gateway.sum(table.CACHED_PROMPT_TOKENS),
            "refused ttft": sum(refused.get(reason.value, 0.0) for reason in _BY_TTFT),
            "refused tpot": sum(refused.get(reason.value, 0.0) for reason in _BY_TPOT),
        }
        for name, received in gateway.by_label(table.SLO_RECEIVED, "slo_class").items():
            found[f"received {name}"] = received
            where = {"slo_class": name}
            found[f"finished {name}"] = gateway.count(table.REQUEST_OUTPUT_TOKENS, **where)
            found[f"output tokens {name}"] = gateway.total(table.REQUEST_OUTPUT_TOKENS, **where)
            for objective, row in (
                ("ttft", table.TTFT_SECONDS),
                ("tpot", table.TPOT_SECONDS),
                ("e2e", table.E2E_SECONDS),
            ):
                found[f"{objective} ended {name}"] = gateway.count(row, **where)
                if limit := self._targets.get((name, objective)):
                    found[f"{objective} kept {name}"] = gateway.at_most(row, limit, **where)
        found["received"] = gateway.sum(table.SLO_RECEIVED)
        return found

    def _traffic(self) -> Traffic:
        gateways = self._scrapes.gateways.values()
        classes = {name for name, _ in self._targets if self._recent(f"received {name}") > 0}
        token_limits = {name: self._token_limit(name) for name in classes}
        return Traffic(
            received_per_s=self._totals.rate("received", RECENT_S),
            received_per_s_before=self._totals.rate("received", BEFORE_S),
            seconds_between=(self._totals.covered(BEFORE_S) - self._totals.covered(RECENT_S)) / 2,
            held=int(sum(one.sum(table.QUEUE_LENGTH) + one.sum(table.IN_FLIGHT) for one in gateways)),
            prompt_tokens=self._known.prompt_tokens,
            output_tokens=self._known.output_tokens,
            ttft_s=min(
                (limit for name in classes if (limit := self._targets.get((name, "ttft"), 0.0))), default=0.0
            ),
            tpot_s=min((limit for limit in token_limits.values() if limit), default=0.0),
            ttft_kept=self._ttft_kept(classes),
            tpot_kept=self._tpot_kept(classes),
        )

    def _recent(self, name: str) -> float:
        return self._totals.increase(name, self._window_s)

    def _token_limit(self, name: str) -> float:
        """TPOT objective of a class, or the time per token that its E2E objective leaves; 0: none."""
        if limit := self._targets.get((name, "tpot"), 0.0):
            return limit
        whole = self._targets.get((name, "e2e"), 0.0)
        finished = self._totals.increase(f"finished {name}", _LENGTHS_S)
        tokens = self._totals.increase(f"output tokens {name}", _LENGTHS_S)
        if not whole or tokens <= finished or not finished:
            return 0.0
        left_s = max(whole - self._targets.get((name, "ttft"), 0.0), 0.0)
        return left_s / (tokens / finished - 1)

    def _ttft_kept(self, classes: set[str]) -> Kept:
        limited = [name for name in classes if (name, "ttft") in self._targets]
        ended = sum(self._recent(f"ttft ended {name}") for name in limited)
        kept = sum(self._recent(f"ttft kept {name}") for name in limited)
        return Kept(round(ended + self._recent("refused ttft")), round(kept))

    def _tpot_kept(self, classes: set[str]) -> Kept:
        """Requests that kept TPOT. An answer that misses E2E but not TTFT counts as a miss of TPOT."""
        ended, kept = self._recent("refused tpot"), 0.0
        for name in classes:
            if (name, "tpot") in self._targets:
                of, kept_of = self._recent(f"tpot ended {name}"), self._recent(f"tpot kept {name}")
            elif (name, "e2e") in self._targets:
                of = self._recent(f"e2e ended {name}")
                late = max(self._recent(f"ttft ended {name}") - self._recent(f"ttft kept {name}"), 0.0)
                late = late if (name, "ttft") in self._targets else 0.0
                kept_of = min(self._recent(f"e2e kept {name}") + late, of)
            else:
                continue
            ended, kept = ended + of, kept + kept_of
        return Kept(round(ended), round(kept))

    # -- lengths and costs -------------------------------------------------------------------------

    def _learn(self) -> None:
        known, scrapes = self._known, self._scrapes
        prefill, decode = list(scrapes.prefill.values()), list(scrapes.decode.values())
        prefill_cost = _mean_cost(prefill or decode, "prefill") or known.prefill_cost
        decode_cost = _mean_cost(decode, "decode") or known.decode_cost
        known = replace(known, prefill_cost=prefill_cost, decode_cost=decode_cost)
        if decode:
            per_step = [one for pod in decode if (one := pod.sum(table.TOKENS_PER_STEP)) > 0]
            known = replace(
                known,
                tokens_per_step=fmean(per_step) if per_step else known.tokens_per_step,
                max_batch=round(fmean(pod.sum(table.STEP_LIMIT, of="batch") for pod in decode)),
                kv_tokens=fmean(pod.sum(table.KV_BLOCKS) * pod.sum(table.KV_BLOCK_TOKENS) for pod in decode)
                or known.kv_tokens,
            )
        if prefill or decode:
            chunks = [pod.sum(table.STEP_LIMIT, of="chunk") for pod in prefill or decode]
            known = replace(known, chunk=max(round(fmean(chunks)), 1))
        finished = self._totals.increase("finished", _LENGTHS_S)
        if finished >= 1:
            known = self._with_lengths(known, finished)
        self._known = known

    def _with_lengths(self, known: _Known, finished: float) -> _Known:
        def mean(name: str) -> float:
            return self._totals.increase(name, _LENGTHS_S) / finished

        prompts, tokens = mean("prefill prompts"), mean("prefill tokens")
        each = round(tokens / prompts) if prompts else 0
        local = max(mean("prompt tokens") - mean("cached tokens") - tokens, 0.0)
        return replace(
            known,
            prompt_tokens=mean("prompt tokens"),
            output_tokens=mean("output tokens"),
            work_s=prompts * known.prefill_cost.prompt_seconds(0, each, known.chunk) or known.work_s,
            local_prompt_s=known.prefill_cost.prompt_seconds(0, round(local), known.chunk),
        )


def _of_prefill(pod: Exposition) -> dict[str, float]:
    computed = pod.sum(table.PREFILL_PROMPT_TOKENS) - pod.sum(table.PREFILL_CACHED_TOKENS)
    return {"prefill prompts": pod.sum(table.PREFILL_REQUESTS), "prefill tokens": computed}


def _mean_cost(pods: list[Exposition], steps: str) -> StepCost | None:
    """Mean step cost of the pods that report one; None if no pod does."""
    costs = [pod.by_label(table.STEP_COST, "per", steps=steps) for pod in pods]
    costs = [cost for cost in costs if sum(cost.values()) > 0]
    if not costs:
        return None
    return StepCost(*(fmean(cost.get(per, 0.0) for cost in costs) for per in ("step", "token", "pair")))
