"""The answers of one gateway that can be resumed, in its memory."""

from __future__ import annotations

import time

from tandem_gateway.answers.answer import Answer


class KeptAnswers:
    """Keeps answers by name for `ttl_s` seconds after their last use and within `max_bytes`; 0 s keeps none.

    The cost of a request does not depend on their number: bytes are counted incrementally. All answers are
    scanned only to find expired ones, at intervals, and while there are too many bytes.
    """

    def __init__(self, *, ttl_s: float, max_bytes: int) -> None:
        self.ttl_s = ttl_s
        self._max_bytes = max_bytes
        #: By name, the oldest first.
        self._answers: dict[str, Answer] = {}
        #: Each answer's part of `num_bytes`.
        self._counted: dict[Answer, int] = {}
        self.num_bytes = 0

    def get(self, name: str) -> Answer | None:
        return self._answers.get(name)

    def add(self, answer: Answer) -> None:
        self._answers[answer.name] = answer
        self._counted[answer] = 0
        self.count(answer)

    def count(self, answer: Answer) -> None:
        """Call it after events were added."""
        if answer in self._counted:
            self.num_bytes += answer.num_bytes - self._counted[answer]
            self._counted[answer] = answer.num_bytes

    def remove(self, answer: Answer) -> None:
        """Removes it here; it must leave the store too."""
        answer.is_forgotten = True
        self.num_bytes -= self._counted.pop(answer, 0)
        if self._answers.get(answer.name) is answer:
            del self._answers[answer.name]

    def has_room(self) -> bool:
        """Whether another one can be kept."""
        return self.ttl_s > 0 and self.num_bytes < self._max_bytes

    def remove_expired(self) -> None:
        oldest = time.monotonic() - self.ttl_s
        for answer in list(self._answers.values()):
            if answer.is_idle and answer.last_used <= oldest:
                self.remove(answer)

    def remove_excess(self) -> list[Answer]:
        """Removes the oldest idle answers while there are too many bytes; returns them."""
        removed: list[Answer] = []
        if self.num_bytes <= self._max_bytes:
            return removed
        for answer in list(self._answers.values()):
            if self.num_bytes <= self._max_bytes:
                break
            if answer.is_idle:
                self.remove(answer)
                removed.append(answer)
        return removed
