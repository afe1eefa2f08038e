"""The cause of a miss is the stage in which the time was lost."""

import random
from types import SimpleNamespace

import pytest
from tandem_gateway.admission.miss_cause import CAUSES, miss_cause
from tandem_proto.v1 import common_pb2


def forecast_of(*, wait_s: float, prefill_s: float, token_s: float, num_output: int) -> SimpleNamespace:
    first_s = wait_s + prefill_s
    route = SimpleNamespace(first_s=first_s, prefill_s=prefill_s, token_s=token_s, num_output=num_output)
    return SimpleNamespace(route=route, queue_s=0.0)


def receipt_of(seconds: dict[str, float], **fields: int) -> common_pb2.Receipt:
    receipt = common_pb2.Receipt(**fields)
    for stage in ("queue", "prefill", "transfer", "decode"):
        setattr(receipt, f"{stage}_ns", round(seconds[stage] * 1e9))
    receipt.e2e_ns = round(sum(seconds.values()) * 1e9)
    return receipt


@pytest.mark.parametrize("stage", CAUSES)
def test_the_stage_with_the_delay_is_the_cause(stage):
    """Each stage deviates by up to a third from its prediction; one is delayed."""
    rng, right = random.Random(5), 0
    for _ in range(200):
        predicted = {
            "queue": rng.uniform(0, 1),
            "prefill": rng.uniform(0.1, 2),
            "decode": rng.uniform(0.2, 3),
        }
        num_output = rng.randint(10, 200)
        token_s = predicted["decode"] / num_output
        seconds = {name: value * rng.uniform(0.7, 1.3) for name, value in predicted.items()}
        seconds |= {"transfer": rng.uniform(0, 0.05), "other": rng.uniform(0, 0.05)}
        delay = rng.uniform(1.5, 5)
        fields = {"output_tokens": num_output}
        if stage == "length":
            extra = round(delay / token_s)
            fields["output_tokens"] += extra
            seconds["decode"] += extra * token_s
        else:
            seconds[{"failover": "other", "preemption": "decode"}.get(stage, stage)] += delay
        fields |= {"failover": {"decode_retries": 1}, "preemption": {"preemptions": 2}}.get(stage, {})
        forecast = forecast_of(
            wait_s=predicted["queue"], prefill_s=predicted["prefill"], token_s=token_s, num_output=num_output
        )
        right += (
            miss_cause(receipt_of(seconds, **fields), forecast, is_late_start=False, is_late_end=True)
            == stage
        )
    assert right >= 190


def test_later_stages_are_not_the_cause_of_a_late_first_token():
    seconds = {"queue": 0.2, "prefill": 2.0, "transfer": 0.0, "decode": 9.0, "other": 0.0}
    receipt = receipt_of(seconds, output_tokens=10)
    assert miss_cause(receipt, None, is_late_start=True, is_late_end=True) == "prefill"
    assert miss_cause(receipt, None, is_late_start=False, is_late_end=True) == "decode"


def test_earlier_stages_are_not_the_cause_of_late_tokens():
    seconds = {"queue": 2.0, "prefill": 3.0, "transfer": 1.0, "decode": 0.5, "other": 0.1}
    receipt = receipt_of(seconds, output_tokens=10)
    assert miss_cause(receipt, None, is_late_start=False, is_late_end=False) == "decode"
    assert miss_cause(receipt, None, is_late_start=False, is_late_end=True) == "prefill"
    forecast = forecast_of(wait_s=0.0, prefill_s=3.0, token_s=0.01, num_output=1)
    longer = receipt_of(seconds, output_tokens=40)  # than expected
    assert miss_cause(longer, forecast, is_late_start=False, is_late_end=False) == "decode"


def test_a_long_stage_within_its_prediction_is_not_the_cause():
    seconds = {"queue": 8.0, "prefill": 2.0, "transfer": 0.0, "decode": 1.0, "other": 0.0}
    forecast = forecast_of(wait_s=7.5, prefill_s=0.5, token_s=0.1, num_output=10)
    assert (
        miss_cause(receipt_of(seconds, output_tokens=10), forecast, is_late_start=True, is_late_end=True)
        == "prefill"
    )
