"""The SLO classes and who may use which."""

from __future__ import annotations

from types import MappingProxyType

from tandem_gateway.auth import Caller
from tandem_gateway.errors import ForbiddenError, InvalidRequestError
from tandem_gateway.request import SloTarget

SLO_CLASSES = MappingProxyType(
    {
        "interactive": SloTarget("interactive", ttft_s=2.5, e2e_s=5.0),
        "chat": SloTarget("chat", ttft_s=1.0, tpot_s=0.150),
        "batch": SloTarget("batch"),
    }
)

#: A request without a TTFT objective waits as if it had this one, so that it is not starved for ever.
UNBOUND_TTFT_S = 60.0


def choose_slo(name: str, caller: Caller) -> SloTarget:
    """The class called `name`; "" takes the caller's first. Raises for unknown and for forbidden ones."""
    chosen = name or caller.slo_classes[0]
    if chosen not in SLO_CLASSES:
        raise InvalidRequestError("slo_class", f"{chosen!r} is unknown; use one of {', '.join(SLO_CLASSES)}")
    if chosen not in caller.slo_classes:
        raise ForbiddenError(f"slo_class: this key may use {', '.join(caller.slo_classes)}, not {chosen!r}")
    return SLO_CLASSES[chosen]
