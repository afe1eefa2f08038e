"""Finds the request that crashes decode pods among those that were on them.

    1st crash  every request on the pod is a suspect until its next token; all go on at once
    2nd crash  a suspect that shared no pod with other suspects is the cause, and ends;
               the others go on one at a time, each until its next token
    3rd crash  the request is the cause, and ends

So one request ends at most three pods. The suspects of other gateways are not known here.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection

from tandem_core.contracts import MAX_CRASHES


class Suspects:
    """The suspects of one gateway. Belongs to one event loop."""

    def __init__(self) -> None:
        self.on_pod: defaultdict[str, set[Suspect]] = defaultdict(set)
        #: Held by the suspect that goes on after its second crash.
        self.turn = asyncio.Lock()


class Suspect:
    """One request, which may become a suspect."""

    def __init__(self, all_suspects: Suspects) -> None:
        self._all = all_suspects
        self._targets: Collection[str] = ()
        self._is_alone = True
        self._has_turn = False

    async def wait_for_turn(self, timeout_s: float) -> None:
        """Waits until no other request goes on after its second crash. Raises TimeoutError."""
        if not self._has_turn:
            async with asyncio.timeout(timeout_s):
                await self._all.turn.acquire()
            self._has_turn = True

    def enter(self, *targets: str) -> None:
        """The suspect goes on at these pods, and has left those before."""
        self._leave()
        self._targets, self._is_alone = set(targets), True
        for target in self._targets:
            for other in self._all.on_pod[target]:
                other._is_alone = self._is_alone = False
            self._all.on_pod[target].add(self)

    def is_the_cause(self, num_crashed: float) -> bool:
        """num_crashed: crashes since its last token."""
        return num_crashed >= MAX_CRASHES + (not self._is_alone)

    def clear(self) -> None:
        """The request has a new token, or has ended."""
        self._leave()
        self._is_alone = True
        if self._has_turn:
            self._has_turn = False
            self._all.turn.release()

    def _leave(self) -> None:
        for target in self._targets:
            suspects = self._all.on_pod[target]
            suspects.discard(self)
            if not suspects:
                del self._all.on_pod[target]
        self._targets = ()
