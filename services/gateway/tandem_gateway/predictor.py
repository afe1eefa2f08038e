"""Online estimates from receipts: how long a request holds its place, how fast prompts are computed.

Exponentially weighted means: the fleet's speed changes with load and with pods, and the last few dozen
requests say most about the next.
"""

from __future__ import annotations

from tandem_proto.v1 import common_pb2

from tandem_gateway.request import NS_PER_S

#: Weight of the newest request; about the last twenty count.
_ALPHA = 0.1
#: Before any receipt: a second a request, 1000 prompt tokens a second.
_FIRST_SERVICE_S = 1.0
_FIRST_S_PER_TOKEN = 0.001
#: Prompts with fewer uncached tokens say more about overhead than about speed.
_MIN_TOKENS = 32


class Predictor:
    def __init__(self) -> None:
        self._service_s = _FIRST_SERVICE_S
        self._s_per_token = _FIRST_S_PER_TOKEN

    @property
    def service_s(self) -> float:
        """Mean seconds from admission to the end of a request."""
        return self._service_s

    def prefill_s(self, num_tokens: int) -> float:
        """Seconds from admission to the first token for a prompt of so many uncached tokens."""
        return self._s_per_token * num_tokens

    def observe(self, receipt: common_pb2.Receipt, *, queued_s: float) -> None:
        """Learn from a finished request; `queued_s` is its wait at the gateway, not part of either rate."""
        self._service_s += _ALPHA * (receipt.e2e_ns / NS_PER_S - queued_s - self._service_s)
        uncached = receipt.prompt_tokens - receipt.cached_tokens
        if uncached >= _MIN_TOKENS:
            seconds = max(0.0, receipt.ttft_ns / NS_PER_S - queued_s)
            self._s_per_token += _ALPHA * (seconds / uncached - self._s_per_token)
