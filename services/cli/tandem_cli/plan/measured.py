"""A fleet as the pods of a running system report it."""

from __future__ import annotations

from collections.abc import Sequence

from tandem_core.codec import step_cost_from_proto, tokens_per_step_from_proto
from tandem_proto.v1 import common_pb2

from tandem_cli.plan.costs import PodCosts
from tandem_cli.plan.fleet_plan import FleetPlan


def measured_fleet(pods: Sequence[common_pb2.PodStatus], per_hour: float = 0.0) -> FleetPlan:
    """A fleet of the first decode pod and, if there is one, the first prefill pod. Raises ValueError if no
    decode pod has decoded anything."""
    decoders = [
        pod for pod in pods if pod.role == "decode" and step_cost_from_proto(pod.decode_cost).is_known
    ]
    if not decoders:
        raise ValueError("no decode pod has reported step costs; send it requests first")
    decode = decoders[0]
    prefill = next((pod for pod in pods if pod.role == "prefill"), decode)
    costs = PodCosts(
        prefill=step_cost_from_proto(prefill.prefill_cost),
        decode=step_cost_from_proto(decode.decode_cost),
        kv_tokens=decode.usage.blocks_total * decode.block_size,
        kv_bytes_per_token=0.0,
        per_hour=per_hour,
        own_prefill=step_cost_from_proto(decode.prefill_cost),
    )
    return FleetPlan(
        costs,
        num_prefill=1,
        num_decode=1,
        chunk_size=prefill.chunk_size,
        max_batch=decode.max_batch,
        tokens_per_step=tokens_per_step_from_proto(decode),
        local_prefill_tokens=decode.local_prefill_tokens,
        idle_prefill_tokens=decode.idle_prefill_tokens,
        enough_prompt_tokens=decode.enough_prompt_tokens,
    )
