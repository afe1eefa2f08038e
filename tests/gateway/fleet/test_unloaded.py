"""The objectives that the gateway can meet without load, as it logs them at its start."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from tandem_core.slo import DEFAULT_SLO_CLASSES, SloTarget
from tandem_core.step_cost import StepCost
from tandem_gateway.fleet.load import PodLoad
from tandem_gateway.fleet.pods import Role
from tandem_gateway.fleet.unloaded import kept_unloaded


def load(prefill: StepCost, decode: StepCost) -> PodLoad:
    return PodLoad(replace(PodLoad.model, prefill=prefill, decode=decode), True, True)


SLOW = load(StepCost(per_token=0.004), StepCost(per_step=0.1))
#: Measured next to other work, which doubled its times.
FAST = load(StepCost(per_token=0.002, unloaded=0.5), StepCost(per_step=0.05, unloaded=0.5))


def fleet(prefill: list[PodLoad], decode: list[PodLoad]) -> SimpleNamespace:
    pods = {Role.PREFILL: prefill, Role.DECODE: decode}
    return SimpleNamespace(healthy=lambda role: [SimpleNamespace(load=load) for load in pods[role]])


def test_the_fastest_pods_decide_without_their_load() -> None:
    for pods in (fleet([SLOW, FAST], [FAST, SLOW]), fleet([], [FAST])):
        kept = kept_unloaded(pods, DEFAULT_SLO_CLASSES, 8192)
        within_5_s = {
            "ttft": "2.5 s for prompts up to 2,500 tokens",
            # 256 tokens take .256 s, and each output token .025 s.
            "e2e": "5 s for answers up to 189 tokens to prompts of 256",
        }
        assert kept == {
            "standard": within_5_s,
            "interactive": within_5_s,
            "chat": {"ttft": "1 s for prompts up to 1,000 tokens", "tpot": "150 ms, takes 25 ms"},
            "batch": {},
        }


def test_lengths_fit_the_context_and_are_absent_without_answers() -> None:
    classes = {"a": SloTarget("a", ttft_s=100.0, e2e_s=1000.0), "b": SloTarget("b", ttft_s=1e-4, e2e_s=0.1)}
    kept = kept_unloaded(fleet([FAST], [FAST]), classes, 1024)
    assert kept == {
        "a": {
            "ttft": "100 s for prompts up to 1,024 tokens",
            "e2e": "1000 s for answers up to 768 tokens to prompts of 256",
        },
        "b": {
            "ttft": "0.0001 s for prompts up to 0 tokens",
            "e2e": "0.1 s for answers up to 0 tokens to prompts of 256",
        },
    }


def test_relative_objectives_are_shown_as_multiples() -> None:
    classes = {"a": SloTarget("a", ttft_s=1.0, ttft_slowdown=3.0, e2e_slowdown=10.0)}
    assert kept_unloaded(fleet([FAST], [FAST]), classes, 1024) == {
        "a": {
            "ttft": "1 s for prompts up to 1,000 tokens; or 3 times as long as without load, if that is "
            "longer",
            "e2e": "10 times as long as without load",
        }
    }


def test_nothing_is_shown_before_the_pods_know_their_costs() -> None:
    assert kept_unloaded(fleet([PodLoad()], [FAST]), DEFAULT_SLO_CLASSES, 1024) is None
    assert kept_unloaded(fleet([FAST], []), DEFAULT_SLO_CLASSES, 1024) is None
