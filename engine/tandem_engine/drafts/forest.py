"""The global n-gram forest as immutable arrays: one trie per namespace, shared by every replica.

    node      0 (root)  1 .. children of 0 ..  |  .. children of 1 .. children of 2 ..  |  level 3 ..
    tokens    -         sorted within each parent, so that a child is found by bisection
    counts    tokens    how often the n-gram from the root to this node was accepted
    starts    1         first child of each node; children of i are [starts[i], starts[i + 1])

Nodes are numbered breadth first, so a parent's children lie together, a level is one interval, and two
forests merge level by level with sorting alone. Arrays rather than objects: 16 bytes a node, built and
sent as they are, read by many threads without locks.

Life cycle: frozen from a builder or merged from several, pruned to a bound, sent as bytes (`to_bytes`),
checked on arrival (`from_bytes`), and replaced as a whole by the next one.

Wire layout, little endian: magic (8 bytes), version u32, depth u32, nodes u64, xxh3-128 of what follows
(16 bytes); then tokens i32[nodes], counts i32[nodes], starts i32[nodes + 1].
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash
from numpy.typing import NDArray

MAGIC = b"TNDMFRST"
VERSION = 1
MAX_COUNT = 2**31 - 1
_HEADER = struct.Struct("<8sIIQ16s")

Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ForestSnapshot:
    """See the module. The fields are read-only views of int32, which index faster than numpy's scalars."""

    #: Longest n-gram.
    depth: int
    tokens: memoryview
    counts: memoryview
    #: nodes + 1 entries.
    starts: memoryview
    #: Nodes, those of one parent together and the most frequent first; same intervals as `starts`.
    by_count: memoryview

    @staticmethod
    def empty(depth: int) -> ForestSnapshot:
        """A forest that has seen nothing."""
        zero = np.zeros(1, dtype=np.int64)
        return ForestSnapshot.from_arrays(depth, zero, zero, zero)

    @staticmethod
    def from_arrays(depth: int, tokens: Ints, counts: Ints, num_children: Ints) -> ForestSnapshot:
        """From per-node arrays in breadth-first order, siblings sorted by token."""
        starts = np.empty(len(tokens) + 1, dtype=np.int64)
        starts[0] = 1
        np.cumsum(num_children, out=starts[1:])
        starts[1:] += 1
        return _freeze(depth, tokens, np.minimum(counts, MAX_COUNT), starts)

    @property
    def num_nodes(self) -> int:
        """Root included."""
        return len(self.tokens)

    @property
    def memory_bytes(self) -> int:
        return 16 * self.num_nodes

    @property
    def max_token(self) -> int:
        """Largest token id; 0 in an empty forest."""
        return int(np.asarray(self.tokens).max())

    def child(self, node: int, token: int) -> int | None:
        """The node one token further, by bisection."""
        stop = self.starts[node + 1]
        found = bisect_left(self.tokens, token, self.starts[node], stop)
        return found if found < stop and self.tokens[found] == token else None

    def count(self, path: Sequence[int]) -> int:
        """How often the n-gram was accepted."""
        node: int | None = 0
        for token in path:
            node = self.child(node, token) if node is not None else None
        return self.counts[node] if node is not None else 0

    def to_bytes(self) -> bytes:
        """The wire layout of the module's docstring."""
        body = b"".join((self.tokens.tobytes(), self.counts.tobytes(), self.starts.tobytes()))
        digest = xxhash.xxh3_128_digest(body)
        return _HEADER.pack(MAGIC, VERSION, self.depth, self.num_nodes, digest) + body

    @staticmethod
    def from_bytes(payload: bytes) -> ForestSnapshot:
        """Reads `to_bytes`' layout. Raises ValueError that says what is wrong with a damaged one."""
        if len(payload) < _HEADER.size:
            raise ValueError(f"forest snapshot is cut short: {len(payload)} bytes")
        magic, version, depth, num_nodes, digest = _HEADER.unpack_from(payload)
        if magic != MAGIC:
            raise ValueError("not a forest snapshot")
        if version != VERSION:
            raise ValueError(f"forest snapshot version {version}; this program reads {VERSION}")
        body = memoryview(payload)[_HEADER.size :]
        if num_nodes < 1 or len(body) != 4 * (3 * num_nodes + 1):
            raise ValueError(f"forest snapshot of {num_nodes} nodes has {len(body)} bytes")
        if xxhash.xxh3_128_digest(body) != digest:
            raise ValueError("forest snapshot is damaged: its checksum does not match")
        numbers = np.frombuffer(body, dtype="<i4").astype(np.int64)
        tokens, counts, starts = np.split(numbers, [num_nodes, 2 * num_nodes])
        if starts[0] != 1 or starts[-1] != num_nodes or (np.diff(starts) < 0).any() or depth < 1:
            raise ValueError("forest snapshot is damaged: its child ranges are not in order")
        if tokens.min() < 0 or counts.min() < 0:
            raise ValueError("forest snapshot is damaged: it holds a negative token or count")
        return _freeze(depth, tokens, counts, starts)

    def levels(self) -> list[tuple[int, int]]:
        """Half-open node interval of each level, root first."""
        levels = [(0, 1)]
        while levels[-1][1] < self.num_nodes:
            start, stop = levels[-1]
            levels.append((self.starts[start], self.starts[stop]))
        return levels

    def pruned(self, max_nodes: int) -> ForestSnapshot:
        """The `max_nodes` most frequent nodes, of equally frequent ones the shorter n-grams."""
        if self.num_nodes <= max_nodes:
            return self
        counts = np.asarray(self.counts, dtype=np.int64)
        starts = np.asarray(self.starts, dtype=np.int64)
        levels = np.zeros(self.num_nodes, dtype=np.int64)
        for level, (start, stop) in enumerate(self.levels()):
            levels[start:stop] = level
        counts[0] = MAX_COUNT  # the root stays
        # A child is never more frequent than its parent, so what is kept is a tree.
        kept = np.sort(np.lexsort((levels, -counts))[: max(1, max_nodes)])
        parents = np.repeat(np.arange(self.num_nodes), np.diff(starts))
        new_ids = np.full(self.num_nodes, -1, dtype=np.int64)
        new_ids[kept] = np.arange(len(kept))
        num_children = np.bincount(new_ids[parents[kept[1:] - 1]], minlength=len(kept))
        return ForestSnapshot.from_arrays(
            self.depth,
            np.asarray(self.tokens, dtype=np.int64)[kept],
            np.asarray(self.counts, dtype=np.int64)[kept],
            num_children,
        )


def merge(parts: Sequence[ForestSnapshot]) -> ForestSnapshot:
    """The forest that has seen what all parts have seen; they must have one depth."""
    depth = parts[0].depth
    if any(part.depth != depth for part in parts):
        raise ValueError(f"forests of depths {sorted({part.depth for part in parts})} cannot be merged")
    tokens = [np.asarray(p.tokens, dtype=np.int64) for p in parts]
    counts = [np.asarray(p.counts, dtype=np.int64) for p in parts]
    starts = [np.asarray(p.starts, dtype=np.int64) for p in parts]
    out_tokens = [np.zeros(1, dtype=np.int64)]
    out_counts = [np.array([sum(int(c[0]) for c in counts)], dtype=np.int64)]
    out_parents = [np.zeros(0, dtype=np.int64)]
    # Per part: the interval of its nodes on this level, and their ids in the result.
    intervals = [(0, 1)] * len(parts)
    ids = [np.zeros(1, dtype=np.int64)] * len(parts)
    num_nodes = 1
    for _ in range(depth):
        keys, weights = [], []
        for i, (start, stop) in enumerate(intervals):
            parents = np.repeat(ids[i], np.diff(starts[i][start : stop + 1]))
            intervals[i] = (int(starts[i][start]), int(starts[i][stop]))
            level = slice(*intervals[i])
            keys.append((parents << 32) | tokens[i][level])
            weights.append(counts[i][level])
        merged, inverse = np.unique(np.concatenate(keys), return_inverse=True)
        out_tokens.append(merged & 0xFFFFFFFF)
        out_parents.append(merged >> 32)
        out_counts.append(
            np.bincount(inverse, weights=np.concatenate(weights), minlength=len(merged)).astype(np.int64)
        )
        ends = np.cumsum([len(k) for k in keys])
        ids = [num_nodes + part for part in np.split(inverse, ends[:-1])]
        num_nodes += len(merged)
    parents = np.concatenate(out_parents)
    _restore_pruned_counts(out_counts, out_parents)
    num_children = np.bincount(parents, minlength=num_nodes)
    return ForestSnapshot.from_arrays(
        depth, np.concatenate(out_tokens), np.concatenate(out_counts), num_children
    )


def _restore_pruned_counts(counts: list[Ints], parents: list[Ints]) -> None:
    """Raises each count to the sum of its children's, level by level from the leaves.

    A part may count an n-gram whose beginning another part counted and has since pruned.
    """
    first_ids = np.cumsum([0] + [len(c) for c in counts])
    for level in range(len(counts) - 1, 0, -1):
        sums = np.bincount(
            parents[level] - first_ids[level - 1], weights=counts[level], minlength=len(counts[level - 1])
        ).astype(np.int64)
        np.maximum(counts[level - 1], sums, out=counts[level - 1])


def _freeze(depth: int, tokens: Ints, counts: Ints, starts: Ints) -> ForestSnapshot:
    parents = np.repeat(np.arange(len(tokens)), np.diff(starts))
    by_count = np.zeros(len(tokens), dtype=np.int64)
    by_count[1:] = np.lexsort((-counts[1:], parents)) + 1
    return ForestSnapshot(depth, *(_readonly(a) for a in (tokens, counts, starts, by_count)))


def _readonly(array: Ints) -> memoryview:
    return array.astype("<i4").data.toreadonly()
