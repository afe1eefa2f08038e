"""The receipt in HTTP answers."""

from __future__ import annotations

import json

from tandem_gateway.dialects.openai_render import message_json
from tandem_proto.v1 import common_pb2


def test_a_receipt_in_json_has_the_messages_names_and_values() -> None:
    receipt = common_pb2.Receipt(
        request_id="r",
        transfer_bytes=2**60,
        accepted_by_source={"prompt": 3, "output": 2},
        accepted_at=[4, 1],
        slo=common_pb2.SloTarget(name="chat", ttft_ns=10**9),
        slo_met=True,
    )
    shown = json.loads(json.dumps(message_json(receipt)))
    assert list(shown) == [field.name for field in common_pb2.Receipt.DESCRIPTOR.fields]
    assert (shown["request_id"], shown["transfer_bytes"], shown["slo_met"]) == ("r", 2**60, True)
    assert (shown["prefill_retries"], shown["slo_miss_reason"]) == (0, "")
    assert shown["accepted_by_source"] == {"prompt": 3, "output": 2}
    assert shown["accepted_at"] == [4, 1]
    assert shown["hit_steps_by_source"] == {}
    assert shown["slo"] == {
        "name": "chat", "ttft_ns": 10**9, "tpot_ns": 0, "e2e_ns": 0, "strict": False, "ttft_slowdown": 0.0,
        "tpot_slowdown": 0.0, "e2e_slowdown": 0.0,
    }  # fmt: skip
