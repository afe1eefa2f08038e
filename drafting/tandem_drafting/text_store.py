"""A namespace's shared text, as the service sends it and a pod keeps it.

Named runs of tokens, in the order in which they were first heard of; when there is too much, the first go. As
bytes (little-endian):

    magic "TLKT" | version u32 | runs u32 | tokens u64 | digest, xxh3-128 of the rest
    per run: bytes of its name u32, first offset u32, tokens u32
    the names, as UTF-8 | the tokens, i32
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xxhash

from tandem_drafting.spans import AcceptedSpan

MAGIC = b"TLKT"
VERSION = 1
_HEADER = struct.Struct("<4sIIQ16s")
_RUN = struct.Struct("<III")
#: Of a run in memory, besides its tokens.
_RUN_BYTES = 400


@dataclass
class Run:
    """Consecutive tokens that go by one name, the first at `offset`."""

    number: int
    name: str
    offset: int
    tokens: array[int] = field(default_factory=lambda: array("i"))

    @property
    def end(self) -> int:
        """Offset behind the last token."""
        return self.offset + len(self.tokens)


class TextStore:
    """At most `max_tokens`, the latest run excepted; not safe for several threads."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._runs: OrderedDict[str, Run] = OrderedDict()
        self._next_number = 0
        #: Tokens held.
        self.num_tokens = 0

    @property
    def num_runs(self) -> int:
        return len(self._runs)

    @property
    def max_token(self) -> int:
        """Largest token id held; -1 when empty."""
        return max((max(run.tokens) for run in self._runs.values()), default=-1)

    @property
    def memory_bytes(self) -> int:
        return 4 * self.num_tokens + _RUN_BYTES * len(self._runs)

    def runs(self) -> Iterator[Run]:
        """All runs, the oldest first."""
        return iter(self._runs.values())

    def run(self, name: str) -> Run | None:
        """The run of that name, if it is held."""
        return self._runs.get(name)

    def add(self, span: AcceptedSpan) -> tuple[Run, int] | None:
        """Joins a piece to its run: the run, and how many of its last tokens are new.

        None for a repetition. Behind a gap the run begins anew.
        """
        if not span.token_ids:
            return None
        run = self._runs.get(span.run)
        if run is None or span.offset > run.end:
            if run is not None:
                self._set_aside(run)
            run = self._runs[span.run] = self._new_run(span.run, span.offset)
        new = span.token_ids[run.end - span.offset :]
        if not new:
            return None
        run.tokens.extend(new)
        self.num_tokens += len(new)
        while self.num_tokens > self._max_tokens and len(self._runs) > 1:
            oldest = next(iter(self._runs))
            if oldest == span.run:
                self._runs.move_to_end(oldest)
            else:
                self._drop(oldest)
        return run, len(new)

    def count(self, ngram: Sequence[int]) -> int:
        """How often an n-gram occurs within runs; reads everything."""
        wanted = np.array(ngram, dtype=np.int32)
        total = 0
        for run in self._runs.values():
            if len(run.tokens) >= len(wanted):
                windows = np.lib.stride_tricks.sliding_window_view(
                    np.frombuffer(run.tokens, np.int32), len(wanted)
                )
                total += int((windows == wanted).all(axis=1).sum())
        return total

    def to_bytes(self) -> bytes:
        """The layout of the module's docstring."""
        names = [name.encode() for name in self._runs]
        runs = list(self._runs.values())
        body = b"".join(
            (
                *(
                    _RUN.pack(len(name), run.offset, len(run.tokens))
                    for name, run in zip(names, runs, strict=True)
                ),
                *names,
                *(np.frombuffer(run.tokens, np.int32).astype("<i4").tobytes() for run in runs),
            )
        )
        num_tokens = sum(len(run.tokens) for run in runs)
        return _HEADER.pack(MAGIC, VERSION, len(runs), num_tokens, xxhash.xxh3_128_digest(body)) + body

    @staticmethod
    def from_bytes(payload: bytes, max_tokens: int) -> TextStore:
        """Reads `to_bytes`' layout, the latest `max_tokens`. Raises ValueError saying what is wrong."""
        if len(payload) < _HEADER.size:
            raise ValueError(f"snapshot is cut short: {len(payload)} bytes")
        magic, version, num_runs, num_tokens, digest = _HEADER.unpack_from(payload)
        if magic != MAGIC:
            raise ValueError("not a snapshot of generated text")
        if version != VERSION:
            raise ValueError(f"snapshot version {version}; this program reads {VERSION}")
        body = memoryview(payload)[_HEADER.size :]
        if xxhash.xxh3_128_digest(body) != digest:
            raise ValueError("snapshot is damaged: its checksum does not match")
        heads = [_RUN.unpack_from(body, at * _RUN.size) for at in range(num_runs)]
        name_at = num_runs * _RUN.size
        token_at = name_at + sum(head[0] for head in heads)
        if sum(head[2] for head in heads) != num_tokens or len(body) != token_at + 4 * num_tokens:
            raise ValueError("snapshot is damaged: its runs do not fill it")
        tokens = np.frombuffer(body, "<i4", offset=token_at).astype(np.int32)
        if num_tokens and int(tokens.min()) < 0:
            raise ValueError("snapshot is damaged: it holds a negative token")
        store = TextStore(max_tokens)
        at = 0
        for name_bytes, offset, count in heads:
            name = bytes(body[name_at : name_at + name_bytes]).decode(errors="replace")
            store.add(AcceptedSpan(name, offset, tuple(tokens[at : at + count].tolist())))
            name_at += name_bytes
            at += count
        return store

    def _new_run(self, name: str, offset: int) -> Run:
        self._next_number += 1
        return Run(self._next_number - 1, name, offset)

    def _set_aside(self, run: Run) -> None:
        """Keeps a run that begins anew under a name that no further piece has."""
        name = f"{run.name}\0{run.offset}"
        if name in self._runs:
            self._drop(name)
        self._runs[name] = self._runs.pop(run.name)

    def _drop(self, name: str) -> None:
        self.num_tokens -= len(self._runs.pop(name).tokens)
