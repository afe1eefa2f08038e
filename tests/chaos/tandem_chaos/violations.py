"""What a run found to be wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Violations:
    """One sentence for each violation; may be added to from any thread."""

    def __init__(self, show: Callable[[str], None] = lambda _: None) -> None:
        self._show = show
        self._lock = threading.Lock()
        self._sentences: list[str] = []

    def add(self, sentence: str) -> None:
        with self._lock:
            self._sentences.append(sentence)
        self._show(sentence)

    @property
    def sentences(self) -> tuple[str, ...]:
        with self._lock:
            return tuple(self._sentences)
