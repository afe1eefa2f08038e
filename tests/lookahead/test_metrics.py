"""What the lookahead service serves at /metrics."""

from metric_names import differences
from prometheus_client import generate_latest
from tandem_lookahead.metrics import LookaheadMetrics
from tandem_service.interceptors import CallInterceptor
from tandem_service.metric_rows import Process
from tandem_service.metrics import new_registry


def test_the_service_has_the_tables_names_and_no_other() -> None:
    registry = new_registry()
    CallInterceptor({}, registry)
    LookaheadMetrics(registry)
    assert differences(generate_latest(registry).decode(), Process.LOOKAHEAD) == []
