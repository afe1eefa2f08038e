"""The calls that benchmarks/tracing.py repeats are those of a request through all three processes."""

import os
from collections.abc import Iterator

import pytest
import tracing
from otlp_collector import collecting


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    """What the benchmark changes of it comes back."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


async def test_each_request_sends_a_trace_with_an_answer() -> None:
    with collecting() as collector:
        settings = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_TRACES_SAMPLER": "always_on"}
        assert await tracing.cost_us(settings, 20) > 0
        spans = collector.spans()
    answered = [span for span in spans if span.attributes.get("gen_ai.response.id")]
    # 50 requests before those that count.
    assert len(answered) == len({span.trace_id for span in spans}) == 70
    assert {span.service for span in spans} >= {"tandem-gateway", "tandem-decode", "tandem-prefill"}
