"""How many calls may be open, how many tokens a tenant may use, and how many requests may run blindly."""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from tandem_gateway.auth import Caller
from tandem_gateway.errors import OverloadedError, RefusalReason
from tandem_gateway.settings import GatewaySettings

_OTHER_CALLS, _OTHER_CALLS_OF_TENANT = 64, 16
_CALLS_RETRY_S = 1.0
_S_PER_MINUTE = 60.0
#: Of the adaptive limit: by what factor it is lowered, and how often at most.
_LOWER_BY, _LOWER_EVERY_S = 0.7, 1.0
#: A limit that recovers begins to do so after that, since overloads come in bursts, and has done so after so
#: much longer.
_RECOVERS_AFTER_S, _LONGEST_RECOVERY_S = 10.0, 60.0
#: Of the time between turns: at first, and the weight of the newest.
_FIRST_TURN_S, _NEWEST_TURN = 1.0, 0.1
#: Seconds and values of a recent mean.
_RECENT_S, _MAX_RECENT = 10.0, 1024
#: If nobody waited for so long, what was measured before is forgotten.
_TURNS_MEMORY_S = 30.0


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

    A request may begin while there is a token, and then uses what it needs: a bucket may become negative.
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
            raise OverloadedError(
                f"tenant {tenant} has used its {per_minute} tokens per minute; try again later",
                (1 - left) * _S_PER_MINUTE / per_minute,
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


class RecentMean:
    """Of the values of the last ten seconds; 0 without any. Another thread may read it."""

    def __init__(self) -> None:
        #: Monotonic seconds and value.
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)

    def add(self, value: float) -> None:
        self._recent.append((time.monotonic(), value))

    @property
    def value(self) -> float:
        oldest = time.monotonic() - _RECENT_S
        # A copy in one step.
        values = [value for at, value in self._recent.copy() if at >= oldest]
        return sum(values) / len(values) if values else 0.0


class AdaptiveLimit:
    """How many requests may run: more after each that went well, fewer after one that did not (additive
    increase, multiplicative decrease; Chiu and Jain 1989)."""

    def __init__(self, highest: int, *, recovery: float = 1.0) -> None:
        """recovery: the factor by which it grows in each second, ten seconds after it was last lowered."""
        self._value = float(highest)
        self._highest = highest
        self._recovery = recovery
        self._lowered_at = -math.inf
        #: Monotonic seconds until which it has grown.
        self._grown_at = 0.0

    @property
    def value(self) -> float:
        now = time.monotonic()
        if now > self._grown_at:
            growth = self._recovery ** min(now - self._grown_at, _LONGEST_RECOVERY_S)
            self._value, self._grown_at = min(self._value * growth, self._highest), now
        return self._value

    def lower_to(self, most: float) -> None:
        self._value = min(self.value, most)

    def ended(self, *, met: bool) -> None:
        value, now = self.value, time.monotonic()
        if met:
            self._value = min(value + 1 / value, self._highest)
        elif now - self._lowered_at > _LOWER_EVERY_S:
            self._lowered_at, self._grown_at = now, now + _RECOVERS_AFTER_S
            self._value = max(1.0, _LOWER_BY * value)


class Overload:
    """How long an overload has lasted. That tells how long the rest of it takes: with a probability of one
    half at most as long again, and with nine tenths at most nine times as long (Gott, "Implications of the
    Copernican principle for our future prospects", 1993)."""

    #: Multiples of `lasted_s` that the rest takes at most, in half of all overloads and in nine tenths.
    HALF, NINE_TENTHS = 1.0, 9.0

    def __init__(self) -> None:
        self._began, self._refused_at = 0.0, -math.inf

    def refused(self) -> None:
        """A request was, for want of time."""
        now = time.monotonic()
        if not self.lasted_s:
            self._began = now
        self._refused_at = now

    def was_since(self, at: float) -> bool:
        """Whether a request was refused since these monotonic seconds."""
        return self._refused_at >= at

    @property
    def lasted_s(self) -> float:
        """0: there is none."""
        now = time.monotonic()
        return now - self._began if now - self._refused_at < _RECOVERS_AFTER_S else 0.0


class Turns:
    """How long requests wait for their turns, from how long it took lately until the next one began."""

    def __init__(self) -> None:
        self._mean_s = _FIRST_TURN_S
        #: Monotonic seconds at which the last one began, or the first one began to wait.
        self._last = -math.inf

    def first_waits(self) -> None:
        """One begins to wait, and no other one does."""
        now = time.monotonic()
        if now - self._last > _TURNS_MEMORY_S:
            self._mean_s = _FIRST_TURN_S
        self._last = now

    def began(self) -> None:
        """One that waited."""
        now = time.monotonic()
        self._mean_s += _NEWEST_TURN * (now - self._last - self._mean_s)
        self._last = now

    def wait_s(self, num_earlier: int) -> float:
        """Of one that comes after so many that wait."""
        return (num_earlier + 1) * max(self._mean_s, self.since_last_s if num_earlier else 0.0)

    @property
    def since_last_s(self) -> float:
        """Since the last turn, or since the first one began to wait."""
        return time.monotonic() - self._last
