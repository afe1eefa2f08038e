"""A candidate fleet: its pods, their costs and limits, and the effect of pods on each other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tandem_core.pod_model import PodModel
from tandem_core.step_cost import UNKNOWN_COST, StepCost

from tandem_cli.plan.costs import PodCosts

#: Quantities that FleetPlan.scaled changes.
LIMITS = ("compute", "memory bandwidth", "KV memory", "link")


@dataclass(frozen=True)
class Contention:
    """Factors by which a role's pods are slower while pods of the other role compute on the same machine."""

    prefill: float = 1.0
    decode: float = 1.0


@dataclass(frozen=True)
class FleetPlan:
    """With `num_prefill` 0 each pod computes prompts and decodes."""

    costs: PodCosts
    num_prefill: int
    num_decode: int
    chunk_size: int = 2048
    max_batch: int = 128
    #: Bandwidth between pods.
    link_bytes_per_s: float = 12.5e9
    #: Tokens that a sequence gains in a decode step, see tokens_gained.
    tokens_per_step: tuple[float, ...] = (1.0,)
    #: A decode pod computes a prompt itself if fewer of its tokens are uncached; the second limit counts
    #: while it is idle.
    local_prefill_tokens: int = 0
    idle_prefill_tokens: int = 0
    #: A step with this many prompt tokens takes no further prompt, and a step that decodes takes at most
    #: this many; 0: no such limit.
    enough_prompt_tokens: int = 0
    contention: Contention = Contention()
    #: Duration of a step that decodes and computes prompts, as a multiple of the sum of both.
    mixed_steps: float = 1.0

    @property
    def prefill_model(self) -> PodModel:
        """A prefill pod, which computes one prompt at a time."""
        return PodModel(self.costs.prefill, UNKNOWN_COST, 1, self.chunk_size, self.chunk_size)

    @property
    def decode_model(self) -> PodModel:
        return PodModel(
            self.costs.local_prefill,
            self.costs.decode,
            self.max_batch,
            self.chunk_size,
            self.enough_prompt_tokens or self.chunk_size,
            self.tokens_per_step,
            self.costs.kv_tokens,
            self.mixed_steps,
        )

    @property
    def num_devices(self) -> int:
        return (self.num_prefill + self.num_decode) * self.costs.num_devices

    def scaled(self, what: str, factor: float) -> FleetPlan:
        """This fleet with one of LIMITS multiplied by `factor`."""
        costs = self.costs
        prefill, decode = costs.prefill, costs.decode

        def faster(cost: StepCost) -> StepCost:
            return replace(cost, per_token=cost.per_token / factor, per_pair=cost.per_pair / factor)

        if what == "compute":
            costs = replace(
                costs,
                prefill=faster(prefill),
                own_prefill=faster(costs.local_prefill),
                decode=replace(decode, per_token=decode.per_token / factor),
            )
        elif what == "memory bandwidth":
            costs = replace(
                costs,
                decode=replace(decode, per_step=decode.per_step / factor, per_pair=decode.per_pair / factor),
            )
        elif what == "KV memory":
            costs = replace(costs, kv_tokens=int(costs.kv_tokens * factor))
        elif what == "link":
            return replace(self, link_bytes_per_s=self.link_bytes_per_s * factor)
        else:
            raise ValueError(what)
        return replace(self, costs=costs)
