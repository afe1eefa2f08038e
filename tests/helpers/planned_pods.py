"""Pods with known costs and works, for tests of routing and prediction."""

from __future__ import annotations

import math

from tandem_core.pod_model import PodModel
from tandem_core.sampling import SamplingParams
from tandem_core.slo import DEFAULT_SLO_CLASSES, SloTarget
from tandem_core.step_cost import StepCost
from tandem_gateway.fleet.load import PodLoad, Work
from tandem_gateway.fleet.output_lengths import OutputLengths
from tandem_gateway.fleet.pods import Fleet, Pod, Role
from tandem_gateway.fleet.routing import Router
from tandem_gateway.request import TokenizedRequest

#: A millisecond per prompt token, and per output token and sequence of the batch.
MODEL = PodModel(StepCost(per_token=0.001), StepCost(per_token=0.001), 32, 512, 512)
LOAD = PodLoad(MODEL, True, True, free_blocks=100, total_blocks=100, block_size=64)


class FixedFleet(Fleet):
    """A fleet that never changes by itself."""

    def __init__(self, *pods: Pod) -> None:
        super().__init__({}, model_revision="", poll_interval_s=1.0)
        self.members = list(pods)

    def healthy(self, role: Role) -> list[Pod]:
        return [pod for pod in self.members if pod.role is role and pod.healthy]


def router_over(*pods: Pod) -> Router:
    return Router(FixedFleet(*pods), OutputLengths())


def request_of(
    tokens: range,
    tenant: str = "default",
    *,
    request_id: str = "r",
    max_tokens: int = 100,
    min_tokens: int = 0,
    arrived: float = 1000.0,
    slo: SloTarget = DEFAULT_SLO_CLASSES["batch"],
) -> TokenizedRequest:
    """A request that arrives when a `still_clock.Clock` begins. The expected answer has `max_tokens` tokens,
    at most 128."""
    sampling = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens)
    return TokenizedRequest(request_id, tenant, tuple(tokens), sampling, slo, arrived, arrived + 600)


def prompt(num_tokens: int, due: float = 0.0) -> Work:
    """A prompt that a pod has yet to compute; its answer has one token."""
    return Work(due, 0, num_tokens, 1, num_tokens)


def answer(num_tokens: int) -> Work:
    """An answer in progress, with this many tokens left."""
    return Work(-math.inf, 0, 0, num_tokens, 0)
