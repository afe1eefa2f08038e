"""The mutable n-gram tree: what has been accepted since the last snapshot.

Node 0 is the root; a node's path from the root is an n-gram and its count how often that was accepted.
Made empty, grown by `insert`, read at any time, and at last frozen into arrays (`to_snapshot`) and
merged with the snapshot it lay over. Never shrinks: its owner bounds it by starting a new one.

One thread writes, any number read without locks: a node is linked into its parent only once complete,
and readers copy a node's children in one step (`dict.copy`), which the interpreter does not interrupt.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tandem_engine.drafts.forest import ForestSnapshot

#: Estimated bytes per node: four list slots, a share of the integers, most nodes with a dict.
BYTES_PER_NODE = 320


class ForestBuilder:
    """A trie of n-grams up to `depth` tokens with counts, in parallel lists indexed by node."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        #: Node -> {token id: child node}.
        self.children: list[dict[int, int]] = [{}]
        #: Node -> occurrences inserted here; a path through older text may have 0.
        self.counts: list[int] = [0]
        self._parents: list[int] = [0]
        self._tokens: list[int] = [0]
        self._levels: list[int] = [0]

    @property
    def num_nodes(self) -> int:
        return len(self.counts)

    @property
    def memory_bytes(self) -> int:
        return self.num_nodes * BYTES_PER_NODE

    def insert(self, token_ids: Sequence[int], num_context: int = 0) -> None:
        """Counts every n-gram (n <= depth) that ends after the first `num_context` tokens.

        Inserting a text in pieces, each with the depth - 1 tokens before it as context, gives the same
        counts as inserting it whole.
        """
        children, counts = self.children, self.counts
        num_tokens = len(token_ids)
        counts[0] += num_tokens - num_context
        for start in range(max(0, num_context - self.depth + 1), num_tokens):
            node = 0
            for i in range(start, min(start + self.depth, num_tokens)):
                token = token_ids[i]
                child = children[node].get(token)
                if child is None:
                    child = self._add(node, token, i - start + 1)
                if i >= num_context:
                    counts[child] += 1
                node = child

    def count(self, path: Sequence[int]) -> int:
        """How often the n-gram was inserted."""
        node = 0
        for token in path:
            child = self.children[node].get(token)
            if child is None:
                return 0
            node = child
        return self.counts[node]

    def to_snapshot(self) -> ForestSnapshot:
        """The same tree as immutable arrays."""
        num_nodes = len(self.counts)
        parents = np.array(self._parents[:num_nodes], dtype=np.int64)
        tokens = np.array(self._tokens[:num_nodes], dtype=np.int64)
        levels = np.array(self._levels[:num_nodes], dtype=np.int64)
        counts = np.array(self.counts, dtype=np.int64)
        # Breadth first, siblings by token: the order of the new ids follows from the parents' new ids.
        new_ids = np.zeros(num_nodes, dtype=np.int64)
        order = [np.zeros(1, dtype=np.int64)]
        num_placed = 1
        for level in range(1, self.depth + 1):
            nodes = np.flatnonzero(levels == level)
            nodes = nodes[np.argsort((new_ids[parents[nodes]] << 32) | tokens[nodes])]
            new_ids[nodes] = num_placed + np.arange(len(nodes))
            num_placed += len(nodes)
            order.append(nodes)
        by_id = np.concatenate(order)
        num_children = np.bincount(new_ids[parents[by_id[1:]]], minlength=num_nodes)
        return ForestSnapshot.from_arrays(self.depth, tokens[by_id], counts[by_id], num_children)

    def _add(self, parent: int, token: int, level: int) -> int:
        node = len(self.counts)
        self._parents.append(parent)
        self._tokens.append(token)
        self._levels.append(level)
        self.children.append({})
        self.counts.append(0)
        self.children[parent][token] = node
        return node
