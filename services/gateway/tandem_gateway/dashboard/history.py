"""The samples of the last half hour, stored as the JSON that readers get."""

from __future__ import annotations

import json
from collections import deque

from tandem_gateway.dashboard.rows import Sample

#: One a second: 30 minutes.
MAX_SAMPLES = 1800
#: A sample has 0.5 kB without load and 3 kB at ten requests a second, plus 70 bytes per pod: 1 to 6 MB in
#: all. Larger fleets under load (a hundred pods) keep less than half an hour.
MAX_BYTES = 16 << 20


class History:
    """Belongs to one event loop."""

    def __init__(self, *, max_samples: int = MAX_SAMPLES, max_bytes: int = MAX_BYTES) -> None:
        self._max_samples = max_samples
        self._max_bytes = max_bytes
        self._samples: deque[bytes] = deque()
        self.num_bytes = 0
        #: Number of the next sample.
        self.next_number = 0

    @property
    def first_number(self) -> int:
        """Number of the oldest sample that is kept."""
        return self.next_number - len(self._samples)

    def append(self, sample: Sample) -> None:
        text = json.dumps(sample, separators=(",", ":"), allow_nan=False).encode()
        self._samples.append(text)
        self.next_number += 1
        self.num_bytes += len(text)
        while len(self._samples) > self._max_samples or self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._samples.popleft())

    def since(self, number: int, limit: int) -> tuple[int, bytes]:
        """Returns the number after the last returned sample, and a JSON array of at most `limit` samples that
        begins with sample `number`."""
        first = min(max(number, self.first_number), self.next_number)
        stop = min(first + limit, self.next_number)
        found = [self._samples[index - self.first_number] for index in range(first, stop)]
        return stop, b"[" + b",".join(found) + b"]"
