"""Finds why a request missed its SLO: the stage that exceeded its prediction most."""

from __future__ import annotations

from tandem_proto.v1 import common_pb2

from tandem_gateway.admission.forecast import Forecast
from tandem_gateway.request import NS_PER_S

_UNTIL_FIRST_TOKEN = ("queue", "prefill", "transfer", "failover", "other")
_AFTER_IT = ("decode", "failover", "other")
#: All causes.
CAUSES = (*_UNTIL_FIRST_TOKEN, "decode", "length", "preemption")


def miss_cause(
    receipt: common_pb2.Receipt, forecast: Forecast | None, *, is_late_start: bool, is_late_end: bool
) -> str:
    """Returns the cause of a miss in a complete receipt.

    After a late first token (`is_late_start`) only the stages before it count. If neither the first token nor
    the end was late (`is_late_end`), TPOT was missed, and only the stages after the first token count.
    Without a forecast a stage counts with its whole time.
    """
    took = {
        stage: getattr(receipt, f"{stage}_ns") / NS_PER_S
        for stage in ("queue", "prefill", "transfer", "decode", "failover")
    }
    # Time on prefill pods that were lost is in no stage.
    unaccounted = receipt.e2e_ns / NS_PER_S - sum(took.values())
    beyond = {**took, "other": 0.0}
    beyond["failover" if receipt.decode_retries or receipt.prefill_retries else "other"] += unaccounted
    if forecast is not None:
        route = forecast.route
        extra = max(receipt.output_tokens - route.num_output, 0)
        expected = min(receipt.output_tokens, route.num_output)
        beyond["queue"] -= forecast.queue_s + max(route.first_s - route.prefill_s, 0.0)
        beyond["prefill"] -= route.prefill_s
        beyond["decode"] -= (expected + extra) * route.token_s
        beyond["length"] = extra * route.token_s
    if is_late_start:
        beyond = {stage: seconds for stage, seconds in beyond.items() if stage in _UNTIL_FIRST_TOKEN}
    elif not is_late_end:
        beyond = {stage: seconds for stage, seconds in beyond.items() if stage in _AFTER_IT}
    cause = max(beyond, key=lambda stage: beyond[stage])
    return "preemption" if cause == "decode" and receipt.preemptions else cause
