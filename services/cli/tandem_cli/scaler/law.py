"""The scaling law: computes from a fleet's reports how many pods each role should have.

Pure: `decide(snapshot, memory, policy)` returns a decision and the memory of the next one.

    load       a = requests per second x seconds per request (on a prefill pod, or as a sequence in a batch)
    need       the smallest number of pods that keeps the share of objectives at that load:
                 prefill   in an M/M/c queue (Erlang C) at most 1 - share wait longer than the objective
                 decode    pods x (sequences of a batch within TPOT and KV) >= a + z sqrt(a),
                           because the number of sequences varies like a Poisson variable
    backlog    queued work that remains when a new pod is ready adds to the load
    bias       correction of the load model, learnt from missed objectives
    less       only if fewer pods were enough during all of `settle_s`, at a load higher by `margin`

Requests include refused ones, because a fleet that is too small refuses. Starting pods count as pods; while
pods start, missed objectives do not change the bias.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from tandem_core.slo import ATTAINMENT_OBJECTIVE
from tandem_core.step_cost import UNKNOWN_COST, StepCost

#: 99 % quantile of the normal distribution.
_Z = 2.33
#: Largest bias, and largest factor of one change of the bias.
_MAX_BIAS, _BIAS_STEP = 3.0, 1.2
#: While objectives are kept, the bias decays towards 1 with this time constant.
_BIAS_MEMORY_S = 3600.0
#: Time to drain a queue if no class has an objective for TTFT.
_DRAIN_S = 10.0
#: Arrivals are not extrapolated to more than this multiple.
_MAX_GROWTH = 2.0
#: Upper limit of the computation; the policy has the operator's bounds.
_MAX_PODS = 100_000


@dataclass(frozen=True)
class Bounds:
    """Bounds of a role's replicas."""

    least: int
    most: int

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(f"replicas from {self.least} to {self.most}: expected 0 <= least <= most")

    def clamp(self, count: int) -> int:
        return min(max(count, self.least), self.most)


@dataclass(frozen=True)
class Policy:
    """The operator's choices."""

    prefill: Bounds
    decode: Bounds
    #: Share of requests that should keep their objectives.
    share: float = ATTAINMENT_OBJECTIVE
    #: Time for which fewer pods must have been enough; decisions are at most a tenth of it apart.
    settle_s: float = 300.0
    #: Spare capacity, as a share of the load, that must remain after a pod is removed.
    margin: float = 0.15
    #: Share of KV blocks that may be used.
    kv_target: float = 0.85
    #: Window of the shares of kept objectives.
    window_s: float = 60.0


@dataclass(frozen=True)
class Kept:
    """Requests that ended in the last `window_s`, and the number that kept an objective."""

    ended: int = 0
    kept: int = 0

    def is_missed(self, share: float) -> bool:
        """Whether significantly fewer than `share` kept it."""
        allowed = self.ended * (1 - share)
        return self.ended - self.kept > allowed + 2 * math.sqrt(allowed)

    def __str__(self) -> str:
        return f"{self.kept} of {self.ended}"


@dataclass(frozen=True)
class Traffic:
    """Requests as gateways count them."""

    #: Well-formed requests per second, including refused ones: recently, and over a longer window, the middle
    #: of which is `seconds_between` earlier.
    received_per_s: float
    received_per_s_before: float
    seconds_between: float
    #: Requests that wait or run at gateways.
    held: int
    #: Means of recently finished requests; prompts with their cached tokens.
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    #: The tightest objectives among classes with traffic; 0: none.
    ttft_s: float = 0.0
    tpot_s: float = 0.0
    #: Recent requests that kept them.
    ttft_kept: Kept = Kept()
    tpot_kept: Kept = Kept()

    @property
    def is_idle(self) -> bool:
        return not (self.received_per_s or self.received_per_s_before or self.held)

    def ahead(self, seconds: float) -> float:
        """Predicted requests per second after `seconds`: extrapolates growth, but no decline."""
        if self.seconds_between <= 0:
            return self.received_per_s
        slope = (self.received_per_s - self.received_per_s_before) / self.seconds_between
        return min(self.received_per_s + max(slope, 0.0) * seconds, _MAX_GROWTH * self.received_per_s)


@dataclass(frozen=True)
class Pods:
    """Pods of a role. Wanted pods that do not report yet are starting."""

    wanted: int
    ready: int
    #: Time from being wanted to the first report.
    start_s: float = 60.0

    @property
    def starting(self) -> int:
        return max(self.wanted - self.ready, 0)


@dataclass(frozen=True)
class PrefillLoad:
    pods: Pods
    #: Mean seconds of a pod per request; 0: unknown.
    work_s: float = 0.0
    #: Seconds of queued work at all pods.
    queue_s: float = 0.0


@dataclass(frozen=True)
class DecodeLoad:
    pods: Pods
    #: Cost of a step that only decodes; its "pairs" are cached tokens.
    cost: StepCost = UNKNOWN_COST
    tokens_per_step: float = 1.0
    max_batch: int = 1
    #: Tokens of KV that a pod holds.
    kv_tokens: float = 0.0
    #: Used share of the ready pods' KV.
    kv_use: float = 0.0
    #: Sequences that run or wait on the pods.
    sequences: int = 0
    #: Seconds of a decode pod per request for prompts that it computes itself.
    local_prompt_s: float = 0.0


@dataclass(frozen=True)
class Snapshot:
    """The state of a fleet at a time (monotonic seconds)."""

    now: float
    traffic: Traffic
    prefill: PrefillLoad
    decode: DecodeLoad


@dataclass(frozen=True)
class RoleMemory:
    """History of a role's decisions."""

    bias: float = 1.0
    #: Times and the pods that were enough then, margin included; not older than `settle_s`.
    enough: tuple[tuple[float, int], ...] = ()
    #: When pods last started, or a decision changed their number.
    changed_at: float = -math.inf
    decided_at: float | None = None


@dataclass(frozen=True)
class Memory:
    prefill: RoleMemory = field(default_factory=RoleMemory)
    decode: RoleMemory = field(default_factory=RoleMemory)


@dataclass(frozen=True)
class RoleDecision:
    wanted: int
    #: One sentence.
    reason: str


@dataclass(frozen=True)
class Decision:
    prefill: RoleDecision
    decode: RoleDecision


def decide(snapshot: Snapshot, memory: Memory, policy: Policy) -> tuple[Decision, Memory]:
    """The number of pods that each role should have, and the memory for the next decision."""
    traffic = snapshot.traffic
    prefill, prefill_memory = _decide_role(
        _PrefillNeed(snapshot, policy), snapshot, traffic.ttft_kept, policy, policy.prefill, memory.prefill
    )
    decode, decode_memory = _decide_role(
        _DecodeNeed(snapshot, policy), snapshot, traffic.tpot_kept, policy, policy.decode, memory.decode
    )
    return Decision(prefill, decode), Memory(prefill_memory, decode_memory)


class _PrefillNeed:
    """Computes how many prefill pods a load needs."""

    objective = "TTFT"

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self._load, self._traffic, self._share = snapshot.prefill, snapshot.traffic, policy.share
        self.pods = self._load.pods
        self.is_known = self._load.work_s > 0
        self._rate = self._traffic.ahead(self.pods.start_s)

    def count(self, factor: float) -> int:
        """Pods for `factor` times the load."""
        load = factor * self._rate * self._load.work_s
        has_limit = self._traffic.ttft_s and self.can_be_kept
        slack_s = self._traffic.ttft_s - self._load.work_s if has_limit else _DRAIN_S
        count = queue_servers(load, self._load.work_s, slack_s, 1 - self._share)
        # Running pods drain the queue while new ones start.
        left_s = self._load.queue_s - max(self.pods.wanted - load, 0.0) * self.pods.start_s
        if left_s > 0:
            count += math.ceil(left_s / (self._traffic.ttft_s or _DRAIN_S))
        return count

    def least(self) -> int:
        """Pods needed while their speed is unknown."""
        return 1 if not self._traffic.is_idle else 0

    @property
    def can_be_kept(self) -> bool:
        return not self._traffic.ttft_s or self._load.work_s < self._traffic.ttft_s

    def why(self) -> str:
        objective = f", TTFT {self._traffic.ttft_s:g} s" if self._traffic.ttft_s else ""
        queue = f", {self._load.queue_s:.1f} s wait" if self._load.queue_s >= 0.05 else ""
        return f"{self._rate:.2f} requests/s of {self._load.work_s:.2f} s{queue}{objective}"


class _DecodeNeed:
    """Computes how many decode pods a load needs."""

    objective = "TPOT"

    def __init__(self, snapshot: Snapshot, policy: Policy) -> None:
        self._load, self._traffic = snapshot.decode, snapshot.traffic
        self._kv_target = policy.kv_target
        self.pods = self._load.pods
        self.is_known = self._load.cost.is_known and self._traffic.output_tokens > 0
        self._rate = self._traffic.ahead(self.pods.start_s)
        self._context = self._traffic.prompt_tokens + self._traffic.output_tokens / 2
        self._together = self._most_together() if self.is_known else 1

    def _token_s(self, together: int) -> float:
        return self._load.cost.seconds(1, together, together * self._context) / self._load.tokens_per_step

    def _most_together(self) -> int:
        """Sequences of a pod that keep TPOT and fit in its KV; at least 1."""
        low, high = 1, max(self._load.max_batch, 1)
        if self._load.kv_tokens:
            fit = self._kv_target * self._load.kv_tokens / max(self._context, 1.0)
            high = max(min(high, int(fit)), 1)
        while low < high:
            middle = (low + high + 1) // 2
            is_kept = not self._traffic.tpot_s or self._token_s(middle) <= self._traffic.tpot_s
            low, high = (middle, high) if is_kept else (low, middle - 1)
        return low

    def count(self, factor: float) -> int:
        """Pods for `factor` times the load."""
        rate = factor * self._rate
        sequences = rate * self._traffic.output_tokens * self._token_s(self._together)
        pods = (sequences + _Z * math.sqrt(sequences)) / self._together + rate * self._load.local_prompt_s
        # After a burst there are more sequences than the rate explains.
        pods = max(pods, self._load.sequences / self._together)
        return max(math.ceil(pods - 1e-9), self.least())

    def least(self) -> int:
        by_kv = math.ceil(self._load.kv_use * self.pods.ready / self._kv_target - 1e-9)
        return max(by_kv, 0 if self._traffic.is_idle else 1)

    @property
    def can_be_kept(self) -> bool:
        return not self._traffic.tpot_s or self._token_s(1) <= self._traffic.tpot_s

    def why(self) -> str:
        objective = f", TPOT {1e3 * self._traffic.tpot_s:.0f} ms" if self._traffic.tpot_s else ""
        return (
            f"{self._rate:.2f} requests/s of {self._traffic.output_tokens:.0f} tokens, {self._together} "
            f"sequences a pod, KV {self._load.kv_use:.0%} used{objective}"
        )


def _decide_role(
    need: _PrefillNeed | _DecodeNeed,
    snapshot: Snapshot,
    kept: Kept,
    policy: Policy,
    bounds: Bounds,
    memory: RoleMemory,
) -> tuple[RoleDecision, RoleMemory]:
    now, pods = snapshot.now, need.pods
    if pods.starting:
        memory = replace(memory, changed_at=now)
    is_missed = kept.is_missed(policy.share)
    if kept.ended and not is_missed and memory.decided_at is not None:
        faded = math.exp(-(now - memory.decided_at) / _BIAS_MEMORY_S)
        memory = replace(memory, bias=1 + (memory.bias - 1) * faded)
    memory = replace(memory, decided_at=now)

    if snapshot.traffic.is_idle:
        enough, up, why = bounds.least, bounds.least, "no requests"
    elif need.is_known:
        up = bounds.clamp(need.count(memory.bias))
        enough = max(bounds.clamp(need.count(memory.bias * (1 + policy.margin))), up)
        why = need.why()
    else:
        # The cost of a request is unknown until the role's pods have computed some.
        up = bounds.clamp(need.least())
        enough = max(up, bounds.clamp(pods.wanted))
        why = "the cost of a request is not known yet"
    since = now - policy.settle_s
    seen = (*(one for one in memory.enough if one[0] > since), (now, enough))
    is_settled = seen[0][0] <= since + policy.settle_s / 10
    memory = replace(memory, enough=seen)

    if pods.wanted != bounds.clamp(pods.wanted):
        wanted = bounds.clamp(pods.wanted)
        return _changed(wanted, f"{pods.wanted} are outside {bounds.least} to {bounds.most}", memory, now)
    if up > pods.wanted:
        return _changed(up, f"{up} are needed: {why}", memory, now)
    # Requests that end now must have begun with these pods.
    is_quiet = not pods.starting and now - memory.changed_at >= 2 * policy.window_s
    if is_missed and is_quiet and need.is_known:
        if not need.can_be_kept:
            return RoleDecision(
                pods.wanted, f"a request alone misses {need.objective}, more pods do not help: {why}"
            ), memory
        is_near = pods.wanted + 1 <= _MAX_BIAS * max(up, 1)
        if pods.wanted < bounds.most and is_near:
            reason = f"{need.objective} was kept by {kept} requests with {pods.wanted} pods: {why}"
            bias = min(memory.bias * min((pods.wanted + 1) / max(up, 1), _BIAS_STEP), _MAX_BIAS)
            # Fewer pods were not enough, regardless of the model.
            learnt = replace(memory, bias=bias, enough=(*seen[:-1], (now, pods.wanted + 1)))
            return _changed(pods.wanted + 1, reason, learnt, now)
    rest = max(count for _, count in memory.enough)
    # Also removes pods that never start because no machine has room for them.
    if rest < pods.wanted and is_settled:
        if not is_missed:
            reason = (
                f"{rest} were enough for {policy.settle_s:.0f} s, with {policy.margin:.0%} to spare: {why}"
            )
            return _changed(rest, reason, memory, now)
        return RoleDecision(pods.wanted, f"{need.objective} was kept by {kept} requests only: {why}"), memory
    starting = f", {pods.starting} of them starting" if pods.starting else ""
    return RoleDecision(pods.wanted, f"{pods.wanted} are enough{starting}: {why}"), memory


def _changed(wanted: int, reason: str, memory: RoleMemory, now: float) -> tuple[RoleDecision, RoleMemory]:
    return RoleDecision(wanted, reason), replace(memory, changed_at=now)


def queue_servers(load: float, service_s: float, slack_s: float, miss: float) -> int:
    """The smallest M/M/c queue in which at most the share `miss` waits longer than `slack_s`.

    `load` is arrivals per second x service_s. A slack of 0 or less allows no wait.
    """
    if load <= 0:
        return 0
    blocked = 1.0  # Erlang B
    for servers in range(1, _MAX_PODS):
        blocked = load * blocked / (servers + load * blocked)
        if servers <= load:
            continue
        waits = servers * blocked / (servers - load * (1 - blocked))  # Erlang C
        late = waits * math.exp(-(servers - load) * max(slack_s, 0.0) / service_s)
        if late <= miss:
            return servers
    return _MAX_PODS
