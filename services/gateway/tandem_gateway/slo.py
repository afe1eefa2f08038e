"""Which SLO class a caller gets."""

from __future__ import annotations

from tandem_core.errors import InvalidRequestError
from tandem_core.slo import SLO_CLASSES, SloTarget

from tandem_gateway.auth import Caller
from tandem_gateway.errors import ForbiddenError

#: A request without a TTFT objective waits as if it had this one, so that it is not starved.
UNBOUND_TTFT_S = 60.0


def choose_slo(name: str, caller: Caller) -> SloTarget:
    """The class called `name`; "" takes the caller's first. Raises for unknown and for forbidden ones."""
    chosen = name or caller.slo_classes[0]
    if chosen not in SLO_CLASSES:
        raise InvalidRequestError("slo_class", f"{chosen!r} is unknown; use one of {', '.join(SLO_CLASSES)}")
    if chosen not in caller.slo_classes:
        raise ForbiddenError(f"slo_class: this key may use {', '.join(caller.slo_classes)}, not {chosen!r}")
    return SLO_CLASSES[chosen]
