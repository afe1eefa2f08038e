"""Quotas: open calls, and tokens per minute of a tenant."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from tandem_core.contracts import RefusalReason
from tandem_gateway.admission.quotas import OpenCalls, TokenRates
from tandem_gateway.auth import Caller
from tandem_gateway.errors import OverloadedError
from tandem_gateway.settings import GatewaySettings


def open_calls(**settings: object) -> OpenCalls:
    return OpenCalls(GatewaySettings(model=Path(), decode=("127.0.0.1:1",), **settings))


def hold(calls: OpenCalls, caller: Caller, count: int, held: ExitStack) -> None:
    for _ in range(count):
        held.enter_context(calls.hold(caller))


class TestOpenCalls:
    def test_a_tenant_has_a_few_more_calls_open_than_places(self):
        calls, small, other = open_calls(), Caller("small", max_requests=2), Caller("other")
        with ExitStack() as held:
            hold(calls, small, 2 + 16, held)
            with pytest.raises(
                OverloadedError, match="tenant small has 18 calls open here, limit 18"
            ) as info:
                hold(calls, small, 1, held)
            assert info.value.reason is RefusalReason.TENANT_CALLS
            assert info.value.retry_after_s > 0
            hold(calls, other, 1, held)
        with ExitStack() as held:
            hold(calls, small, 2 + 16, held)

    def test_a_gateway_has_a_few_more_calls_open_than_places(self):
        calls = open_calls(max_in_flight=1, max_queue=0)
        with ExitStack() as held:
            for number in range(65):
                hold(calls, Caller(f"tenant {number}"), 1, held)
            with pytest.raises(OverloadedError, match="65 calls are open here, limit 65") as info:
                hold(calls, Caller("next"), 1, held)
            assert info.value.reason is RefusalReason.OPEN_CALLS


class TestTokenRates:
    def test_a_tenant_without_a_limit_is_not_limited(self, clock):
        rates = TokenRates()
        for _ in range(100):
            rates.take("t", None, 1_000_000)

    def test_the_retry_after_is_the_time_until_the_next_token(self, clock):
        rates = TokenRates()
        rates.take("t", 60, 90)
        with pytest.raises(OverloadedError, match="used its 60 tokens per minute") as info:
            rates.take("t", 60, 1)
        assert info.value.reason is RefusalReason.TENANT_TOKENS
        assert info.value.retry_after_s == pytest.approx(31.0), "it used 30 tokens more than it had"
        rates.take("other", 60, 1)
        clock.now += 30.9
        with pytest.raises(OverloadedError):
            rates.take("t", 60, 1)
        clock.now += 0.2
        rates.take("t", 60, 1)

    def test_at_most_a_minutes_tokens_are_saved(self, clock):
        rates = TokenRates()
        rates.take("t", 60, 1)
        clock.now += 3600
        rates.take("t", 60, 60)
        with pytest.raises(OverloadedError):
            rates.take("t", 60, 1)

    def test_unused_tokens_are_given_back(self, clock):
        rates = TokenRates()
        rates.take("t", 60, 60)
        rates.charge("t", 60, -60)
        rates.take("t", 60, 60)
        rates.charge("t", 60, 30)
        with pytest.raises(OverloadedError) as info:
            rates.take("t", 60, 1)
        assert info.value.retry_after_s == pytest.approx(31.0)
