"""What the drafter has learnt of one tenant, as the lookahead service carries it from pod to pod."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tandem_drafting.drafter import Drafter
from tandem_drafting.native import AcceptanceModel

#: Runs a function between two steps of the engine, whose thread alone may touch a learner.
OnEngine = Callable[[Callable[[], Any]], "asyncio.Future[Any]"]
#: Of a learner's bytes: their mark and the version of their layout, which tell who can read them.
_HEADER_BYTES = 8


class DrafterTables:
    """A tenant's learner behind the interface `lookahead_client.LearntTables`."""

    def __init__(self, drafter: Drafter, tenant: str, on_engine: OnEngine) -> None:
        self._drafter = drafter
        self._tenant = tenant
        self._on_engine = on_engine
        self.format = AcceptanceModel().to_bytes()[:_HEADER_BYTES].hex()

    async def read(self) -> tuple[int, bytes]:
        """The number of verified nodes that have taught the learner, and its bytes."""

        def read() -> tuple[int, bytes]:
            learner = self._drafter.learner(self._tenant)
            return learner.num_taught, learner.to_bytes()

        taught: tuple[int, bytes] = await self._on_engine(read)
        return taught

    async def load(self, payload: bytes) -> None:
        """Replaces what was learnt here. Raises ValueError, with nothing changed, for other bytes."""
        await self._on_engine(lambda: self._drafter.learner(self._tenant).load_bytes(payload))

    async def forget(self) -> None:
        """Drops what was learnt here, and which tokens the model thought likely."""
        await self._on_engine(lambda: self._drafter.forget_tenant(self._tenant))
