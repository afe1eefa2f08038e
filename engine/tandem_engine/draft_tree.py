"""A draft: a small tree of guesses for one sequence, verified in one forward pass.

    node 0   the last accepted token (the root); not a guess, not listed in `token_ids`
    node i   token_ids[i - 1], child of node parents[i - 1] < i

Nodes are in topological order. Node i's KV goes to slot num_computed_tokens + i. The attention mask is one
int64 per node: bit j is set when node j is i itself or an ancestor of i.
"""

from __future__ import annotations

import itertools
import operator
from dataclasses import dataclass

from tandem_core.errors import InvariantError

#: Root included: one bit of an int64 each.
MAX_TREE_NODES = 64


@dataclass(frozen=True)
class DraftTree:
    """Guessed tokens with their parents and sources ("prompt", "output", "global", "recycled" or "guide")."""

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.parents) == len(self.sources):
            raise InvariantError("a draft needs one parent and one source per token")
        if len(self.token_ids) >= MAX_TREE_NODES:
            raise InvariantError(f"a draft holds at most {MAX_TREE_NODES - 1} tokens")
        # In C, because this runs for every sequence in every step.
        if self.parents and (min(self.parents) < 0 or any(map(operator.gt, self.parents, itertools.count()))):
            raise InvariantError("a draft's nodes must come after their parents")

    def __len__(self) -> int:
        return len(self.token_ids)

    def ancestor_bits(self) -> list[int]:
        """One mask per node, root first; length len(self) + 1, as signed int64 (node 63 is the sign bit)."""
        bits = [1]
        for i, parent in enumerate(self.parents, start=1):
            bits.append(bits[parent] | (1 << i))
        return [b - (1 << 64) if b >> 63 else b for b in bits]

    def depths(self) -> list[int]:
        """Distance from the root per node, root first; added to the root's position for RoPE."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def children(self) -> list[dict[int, int]]:
        """Per node, root first: token id -> child node. Duplicate guesses keep the first."""
        children: list[dict[int, int]] = [{} for _ in range(len(self.token_ids) + 1)]
        for i, (token, parent) in enumerate(zip(self.token_ids, self.parents, strict=True), start=1):
            children[parent].setdefault(token, i)
        return children

    def truncated(self, num_nodes: int) -> DraftTree:
        """The first num_nodes guesses; a prefix in topological order is a tree again."""
        return DraftTree(self.token_ids[:num_nodes], self.parents[:num_nodes], self.sources[:num_nodes])
