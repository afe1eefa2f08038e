"""The answers of one gateway that can be resumed, in its memory."""

from __future__ import annotations

import time
from collections import Counter, defaultdict

from tandem_gateway.answers.answer import Answer


class KeptAnswers:
    """Keeps answers by name for `ttl_s` seconds after their last use and within `max_bytes`, of which one
    tenant gets at most `tenant_bytes`; 0 s keeps none.

    An answer with an idempotency key stays for its time: where it leaves no room, new ones are not kept.

    The cost of a request does not depend on the number of answers: bytes are counted incrementally. All
    answers are scanned only to find expired ones, at intervals.
    """

    def __init__(self, *, ttl_s: float, max_bytes: int, tenant_bytes: int | None = None) -> None:
        """`tenant_bytes`: None for `max_bytes`."""
        self.ttl_s = ttl_s
        self._max_bytes = max_bytes
        self.tenant_bytes = max_bytes if tenant_bytes is None else tenant_bytes
        #: By name, the oldest first.
        self._answers: dict[str, Answer] = {}
        #: Those that may be removed before their time, by tenant, the oldest first.
        self._removable: defaultdict[str, dict[str, Answer]] = defaultdict(dict)
        #: Each answer's part of `num_bytes`.
        self._counted: dict[Answer, int] = {}
        self._of_tenants: Counter[str] = Counter()
        self.num_bytes = 0

    def get(self, name: str) -> Answer | None:
        return self._answers.get(name)

    def add(self, answer: Answer) -> None:
        self._answers[answer.name] = answer
        if answer.is_copy or not answer.has_key:
            self._removable[answer.tenant][answer.name] = answer
        self._counted[answer] = 0
        self.count(answer)

    def count(self, answer: Answer) -> None:
        """Call it after events were added."""
        if answer in self._counted:
            self._change(answer.tenant, answer.num_bytes - self._counted[answer])
            self._counted[answer] = answer.num_bytes

    def remove(self, answer: Answer) -> None:
        """Removes it here; it must leave the store too."""
        answer.is_forgotten = True
        if self._answers.get(answer.name) is answer:
            del self._answers[answer.name]
            self._removable[answer.tenant].pop(answer.name, None)
        self._change(answer.tenant, -self._counted.pop(answer, 0))

    def has_room(self, tenant: str) -> bool:
        """Whether the tenant can have another one kept."""
        is_full = self.num_bytes >= self._max_bytes or self._of_tenants[tenant] >= self.tenant_bytes
        return self.ttl_s > 0 and not is_full

    def room_in_s(self) -> float:
        """Seconds until the oldest answer expires."""
        first = next(iter(self._answers.values()), None)
        return 1.0 if first is None else max(1.0, first.last_used + self.ttl_s - time.monotonic())

    def remove_expired(self) -> None:
        oldest = time.monotonic() - self.ttl_s
        for answer in list(self._answers.values()):
            if answer.is_idle and answer.last_used <= oldest:
                self.remove(answer)

    def remove_excess(self) -> list[Answer]:
        """Removes idle answers while there are too many bytes, the oldest of the tenant with the most bytes
        first; returns them."""
        removed: list[Answer] = []
        while (answer := self._excess()) is not None:
            self.remove(answer)
            removed.append(answer)
        return removed

    def _excess(self) -> Answer | None:
        if (
            self.num_bytes <= self._max_bytes
            and max(self._of_tenants.values(), default=0) <= self.tenant_bytes
        ):
            return None
        for tenant, num_bytes in self._of_tenants.most_common():
            if self.num_bytes <= self._max_bytes and num_bytes <= self.tenant_bytes:
                return None
            for answer in self._removable[tenant].values():
                if answer.is_idle:
                    return answer
        return None

    def _change(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._of_tenants[tenant] += num_bytes
        if not self._of_tenants[tenant]:
            del self._of_tenants[tenant]
            self._removable.pop(tenant, None)
