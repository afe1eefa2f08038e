"""Computes which objectives an idle system meets, from the step costs that its pods report.

The gateway logs the result at start, so that an operator can set objectives before the first request.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tandem_core.slo import SloTarget

from tandem_gateway.fleet.load import PodLoad
from tandem_gateway.fleet.pods import Fleet, Role

#: Prompt tokens of the request for which TPOT and E2E are computed.
_PROMPT_TOKENS = 256


def kept_unloaded(
    fleet: Fleet, slo_classes: Mapping[str, SloTarget], max_tokens: int
) -> dict[str, dict[str, str]] | None:
    """The longest prompt or answer that meets each objective, by class; None: no pod has reported step costs
    yet. `max_tokens`: the model's context."""
    decode = [pod.load for pod in fleet.healthy(Role.DECODE) if pod.load.knows_texts]
    prefill = [
        pod.load
        for pod in fleet.healthy(Role.PREFILL) or fleet.healthy(Role.DECODE)
        if pod.load.knows_prompts
    ]
    if not decode or not prefill:
        return None
    fastest = FastestPods(prefill, decode)
    return {name: _kept(slo, fastest, max_tokens) for name, slo in slo_classes.items()}


@dataclass(frozen=True)
class FastestPods:
    """The times of a request alone on the fastest of these pods, whose step costs are known."""

    prefill: Sequence[PodLoad]
    decode: Sequence[PodLoad]

    def prompt_s(self, num_tokens: int) -> float:
        return min(
            load.model.prompt_seconds(0, num_tokens) * load.model.prefill.unloaded for load in self.prefill
        )

    def token_s(self, context: int) -> float:
        return min(load.model.token_seconds(1, context) * load.model.decode.unloaded for load in self.decode)

    def end_s(self, num_output: int, prompt_tokens: int = _PROMPT_TOKENS) -> float:
        return self.prompt_s(prompt_tokens) + num_output * self.token_s(prompt_tokens + num_output // 2)


def _kept(slo: SloTarget, fastest: FastestPods, max_tokens: int) -> dict[str, str]:
    kept = {}
    if slo.ttft_s:
        longest = _longest(fastest.prompt_s, slo.ttft_s, max_tokens)
        kept["ttft"] = f"{slo.ttft_s:g} s for prompts up to {longest:,} tokens"
    if slo.tpot_s:
        milliseconds = fastest.token_s(_PROMPT_TOKENS) * 1000
        kept["tpot"] = f"{slo.tpot_s * 1000:g} ms, takes {milliseconds:.3g} ms"
    if slo.e2e_s:
        longest = _longest(fastest.end_s, slo.e2e_s, max_tokens - _PROMPT_TOKENS)
        kept["e2e"] = f"{slo.e2e_s:g} s for answers up to {longest:,} tokens to prompts of {_PROMPT_TOKENS}"
    for name in ("ttft", "tpot", "e2e"):
        if slowdown := getattr(slo, f"{name}_slowdown"):
            relative = f"{slowdown:g} times as long as without load"
            kept[name] = f"{kept[name]}; or {relative}, if that is longer" if name in kept else relative
    return kept


def _longest(seconds: Callable[[int], float], limit_s: float, most: int) -> int:
    """The largest number of tokens, at most `most`, that takes at most `limit_s`."""
    return bisect_left(range(1, most + 1), True, key=lambda num_tokens: seconds(num_tokens) > limit_s)
