"""What pods serve at /metrics after a request whose prompt came from the prefill pod."""

from __future__ import annotations

from pathlib import Path

from metric_names import differences
from pod_fleet import request, run_fleet
from prometheus_client import generate_latest
from tandem_service import metric_table as table
from tandem_service.metric_rows import Process, Row
from toy_models import prompt_of
from waiting import until

#: Served by pods with a GPU alone.
OF_A_GPU = (table.KV_COPIES, table.KV_COPIED_BYTES, table.KV_COPY_WAIT, table.KV_COPIED_OUT)


async def test_pods_serve_the_tables_names_and_count_a_request(tiny_model: Path) -> None:
    async with run_fleet(tiny_model) as fleet:
        decode, prefill = fleet.registries

        def value(row: Row, **labels: str) -> float:
            return sum(
                sample.value
                for family in decode.collect()
                for sample in family.samples
                if sample.name == row.name and labels.items() <= sample.labels.items()
            )

        dead = "127.0.0.1:9"
        targets = [dead, fleet.prefill_target]
        call = fleet.decode.Decode(request("r", prompt_of(90), targets, max_tokens=60))
        receipt = [answer async for answer in call][-1].finished.receipt
        assert receipt.prefill_pod == "p0"
        assert receipt.drafted_tokens > 0, "without drafts nothing below is tested"
        # The pod counts a request after its receipt.
        await until(lambda: value(table.DECODE_OUTPUT_TOKENS) == receipt.output_tokens)
        assert value(table.HANDOFFS, outcome="ok") == 1
        assert value(table.HANDOFFS, outcome="unreachable") == 1
        assert value(table.DECODE_STEPS) == receipt.decode_steps
        assert value(table.DRAFTED_TOKENS) == value(table.DRAFTED_AT) == receipt.drafted_tokens
        assert value(table.ACCEPTED_TOKENS) == value(table.ACCEPTED_AT) == receipt.accepted_tokens
        assert value(table.DRAFTED_AT, position="0") >= value(table.DRAFTS) >= receipt.hit_steps > 0
        assert value(table.ACCEPTED_AT, position="0") == receipt.hit_steps
        assert value(table.DRAFTS) == receipt.drafts
        accepted_at = [value(table.ACCEPTED_AT, position=str(i)) for i in range(len(receipt.accepted_at))]
        assert accepted_at == list(receipt.accepted_at)
        assert sum(accepted_at) == receipt.accepted_tokens
        for registry, process in ((decode, Process.DECODE), (prefill, Process.PREFILL)):
            text = generate_latest(registry).decode()
            assert differences(text, process, without=OF_A_GPU) == []
