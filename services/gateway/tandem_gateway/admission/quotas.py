"""Quotas that hold before anything is predicted: open calls, and tokens per minute of a tenant."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from tandem_core.contracts import RefusalReason

from tandem_gateway.auth import Caller
from tandem_gateway.errors import OverloadedError
from tandem_gateway.settings import GatewaySettings

_OTHER_CALLS, _OTHER_CALLS_OF_TENANT = 64, 16
_CALLS_RETRY_S = 1.0
_S_PER_MINUTE = 60.0


class OpenCalls:
    """Limits calls before anything of them but their key is read. Belongs to one event loop.

    A few more than requests have places: they may ask for a status, or are on their way to a refusal.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self._settings = settings
        self._of_tenant: Counter[str] = Counter()

    @contextmanager
    def hold(self, caller: Caller) -> Iterator[None]:
        """Held while the call is open. Raises OverloadedError."""
        tenant = caller.tenant
        places = self._settings.tenant_limits(caller).places
        if places is not None and self._of_tenant[tenant] >= places + _OTHER_CALLS_OF_TENANT:
            raise OverloadedError(
                f"tenant {tenant} has {self._of_tenant[tenant]} calls open here, limit "
                f"{places + _OTHER_CALLS_OF_TENANT}; send the next one when one has ended",
                _CALLS_RETRY_S,
                RefusalReason.TENANT_CALLS,
            )
        num_open, limit = self._of_tenant.total(), self._settings.num_places() + _OTHER_CALLS
        if num_open >= limit:
            raise OverloadedError(
                f"{num_open} calls are open here, limit {limit}; try again later",
                _CALLS_RETRY_S,
                RefusalReason.OPEN_CALLS,
            )
        self._of_tenant[tenant] += 1
        try:
            yield
        finally:
            self._of_tenant[tenant] -= 1


class TokenRates:
    """Token buckets of tenants: at most a minute's tokens, refilled steadily. Belongs to one event loop.

    A request may begin while there is a token, and then holds all that it may use: a bucket may become
    negative, by the tokens of one request. What it did not use is given back at its end.
    """

    def __init__(self) -> None:
        #: Tokens left, and when that was.
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, tenant: str, per_minute: int | None, num_tokens: int) -> None:
        """For a request that begins. `per_minute` None: no limit. Raises OverloadedError."""
        if per_minute is None:
            return
        left = self._refilled(tenant, per_minute)
        if left < 1:
            after_s = (1 - left) * _S_PER_MINUTE / per_minute
            raise OverloadedError(
                f"tenant {tenant} has used its {per_minute} tokens per minute; try again in {after_s:.1f} s",
                after_s,
                RefusalReason.TENANT_TOKENS,
            )
        self.charge(tenant, per_minute, num_tokens)

    def charge(self, tenant: str, per_minute: int | None, num_tokens: int) -> None:
        """For tokens that were computed; negative for those taken and not used."""
        if per_minute is not None:
            self._left[tenant] = self._refilled(tenant, per_minute) - num_tokens, time.monotonic()

    def _refilled(self, tenant: str, per_minute: int) -> float:
        now = time.monotonic()
        left, since = self._left.get(tenant, (float(per_minute), now))
        return min(float(per_minute), left + (now - since) * per_minute / _S_PER_MINUTE)
