"""Checks guides before their requests are admitted: compiles them once, in threads."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from tandem_core.errors import InvalidRequestError
from tandem_core.guide import Guide
from tandem_core.model.guides import check_guide

from tandem_gateway.auth import Caller
from tandem_gateway.call.tenant_threads import TenantThreads

_NUM_THREADS = 2
#: Results that are kept; each has a digest and at most 1,000 characters.
_MAX_KEPT = 1024


class GuideChecks:
    """Each tenant finds only results of its own guides, so that the duration of a check does not reveal what
    others have sent."""

    def __init__(self) -> None:
        self._threads = TenantThreads(_NUM_THREADS, "guides")
        #: By digest of tenant and guide, the most recently used last.
        self._faults: OrderedDict[bytes, str] = OrderedDict()

    async def check(self, caller: Caller, guide: Guide) -> None:
        """Raises InvalidRequestError, naming the unsupported part, if the guide cannot be used."""
        if fault := await self.fault(caller, guide):
            raise InvalidRequestError(guide.field, fault)

    async def fault(self, caller: Caller, guide: Guide) -> str:
        """Why the guide cannot be used; "" if it can."""
        name = "\0".join((caller.tenant, guide.kind.value, guide.source))
        key = hashlib.sha256(name.encode()).digest()
        # Another request of the tenant may have the same guide checked while this one waits.
        fault = self._faults.get(key)
        if fault is None:
            fault = await self._threads.run(
                caller, lambda: found if (found := self._faults.get(key)) is not None else _fault(guide)
            )
            self._faults[key] = fault
            if len(self._faults) > _MAX_KEPT:
                self._faults.popitem(last=False)
        self._faults.move_to_end(key)
        return fault


def _fault(guide: Guide) -> str:
    try:
        check_guide(guide)
    except InvalidRequestError as error:
        return error.message
    return ""
