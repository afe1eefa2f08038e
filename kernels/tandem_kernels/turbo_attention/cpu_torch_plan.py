"""How the torch backend computes a step: which cache rows to copy, which keys each row sees.

All of it follows from the step's metadata and the layers' geometry, so layers share a plan.

    group     sequences computed together, padded to the same number of rows and key blocks
      context   keys that all its rows see, attended without a mask
      tiles     ranges of rows with their range of keys, masked where not all is visible

A group's keys are slots [first_slot, first_slot + num_keys) of each of its sequences, copied out of the
paged cache in one go; ranges of keys count from first_slot. A group's rows are folded: the query heads that
share a K/V head are rows of one matrix, row = token * group_size + head within the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem_kernels.turbo_attention.interface import MAX_TREE_NODES, AttentionMetadata

#: New tokens per tile of a prefill chunk; keys after a tile's last token are skipped.
TILE_TOKENS = 128
#: A group's cost is modelled in key slots x rows (11 ns for three K/V heads of 64 on Zen 3), copying a slot
#: as so many rows, and a group's torch calls as so many slot-rows.
COPY_ROWS = 12
GROUP_OVERHEAD = 4000
#: A larger copy of K and V leaves the cache before it is used; sequences then go one by one.
MAX_GROUP_BYTES = 8 << 20
#: Slot-rows of mask above which reading the mask costs more than a separate call for the context.
LARGE_MASK = 1 << 17


@dataclass(frozen=True)
class Geometry:
    """What a plan depends on besides the step's metadata."""

    num_kv_heads: int
    group_size: int
    block_size: int
    head_size: int
    window: int | None
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Size of one block's K and V, as computed with."""
        return 2 * self.num_kv_heads * self.block_size * self.head_size * self.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Tile:
    """Folded rows and the keys they are multiplied with; mask [B, 1, rows, keys] is added to the logits."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class Group:
    #: Rows of the query, sequence by sequence: a slice, or [B * num_tokens] indices with padding.
    token_rows: slice | torch.Tensor
    #: Without the padding: which of these rows to keep (None: all), and their rows of the output.
    kept_rows: torch.Tensor | None
    output_rows: slice | torch.Tensor
    #: [B, blocks] ids of the blocks to copy.
    block_ids: torch.Tensor
    #: The same as rows of the cache seen as [num_blocks * 2 * Hkv, block_size * D], in order
    #: [2, B, Hkv, blocks].
    cache_rows: torch.Tensor
    batch: int
    num_tokens: int
    #: (sequence, end of its keys) where padding must be cleared: it may hold NaN, and 0 * NaN is NaN.
    cleared: tuple[tuple[int, int], ...]
    context: slice | None
    tiles: tuple[Tile, ...]

    def covers(self, num_rows: int) -> bool:
        """Whether the group is all rows of the query in their order."""
        return self.kept_rows is None and self.batch * self.num_tokens == num_rows


@dataclass(frozen=True, eq=False)
class _Sequence:
    start: int
    num_new: int
    context_len: int
    blocks: list[int]
    #: None: causal.
    bits: list[int] | None
    #: The first slot any row sees, rounded down to a block.
    first_slot: int

    @property
    def num_keys(self) -> int:
        return self.context_len + self.num_new - self.first_slot


def plan(metadata: AttentionMetadata, geometry: Geometry) -> tuple[Group, ...]:
    """The groups of a step whose values have been checked."""
    starts = metadata.query_start_loc.tolist()
    sequences = []
    for b, seq_len in enumerate(metadata.seq_lens.tolist()):
        num_new = starts[b + 1] - starts[b]
        if num_new == 0:
            continue
        first_slot = 0
        if geometry.window is not None:
            first_slot = max(0, seq_len - num_new - geometry.window + 1)
            first_slot -= first_slot % geometry.block_size
        used = slice(first_slot // geometry.block_size, -(-seq_len // geometry.block_size))
        blocks = metadata.block_table[b, used].tolist()
        bits = metadata.tree_bits(starts[b], starts[b + 1])
        sequences.append(_Sequence(starts[b], num_new, seq_len - num_new, blocks, bits, first_slot))
    return tuple(_group(members, geometry) for members in _partition(sequences, geometry))


def _partition(sequences: Sequence[_Sequence], geometry: Geometry) -> list[list[_Sequence]]:
    """Join sequences of similar size while padding costs less than another round of torch calls."""

    def cost(size: int, tokens: int, blocks: int) -> int:
        rows = COPY_ROWS + tokens * geometry.group_size
        return GROUP_OVERHEAD + size * blocks * geometry.block_size * rows

    partition: list[list[_Sequence]] = []
    open_cost = open_tokens = open_blocks = 0
    for seq in sorted(sequences, key=lambda s: (s.num_new, len(s.blocks), s.start)):
        alone = cost(1, seq.num_new, len(seq.blocks))
        if partition and seq.num_new <= MAX_TREE_NODES:
            tokens, blocks = max(open_tokens, seq.num_new), max(open_blocks, len(seq.blocks))
            joined = cost(len(partition[-1]) + 1, tokens, blocks)
            fits = (len(partition[-1]) + 1) * blocks * geometry.block_bytes <= MAX_GROUP_BYTES
            if fits and joined <= open_cost + alone:
                partition[-1].append(seq)
                open_cost, open_tokens, open_blocks = joined, tokens, blocks
                continue
        partition.append([seq])
        open_cost, open_tokens, open_blocks = alone, seq.num_new, len(seq.blocks)
    for members in partition:
        members.sort(key=lambda s: s.start)
    return partition


def _group(members: Sequence[_Sequence], geometry: Geometry) -> Group:
    num_tokens = max(s.num_new for s in members)
    num_blocks = max(len(s.blocks) for s in members)
    # Padding reads the sequence's own last block again, and its own last row.
    blocks = torch.tensor([s.blocks + s.blocks[-1:] * (num_blocks - len(s.blocks)) for s in members])
    heads = torch.arange(2 * geometry.num_kv_heads).view(2, 1, geometry.num_kv_heads, 1)
    cache_rows = (blocks[None, :, None, :] * (2 * geometry.num_kv_heads) + heads).flatten()

    token_rows: slice | torch.Tensor
    output_rows: slice | torch.Tensor
    first, last = members[0], members[-1]
    kept_rows = None
    if last.start + last.num_new - first.start == len(members) * num_tokens and all(
        s.num_new == num_tokens for s in members
    ):
        token_rows = output_rows = slice(first.start, last.start + last.num_new)
    else:
        token_rows = torch.tensor(
            [s.start + min(i, s.num_new - 1) for s in members for i in range(num_tokens)]
        )
        kept_rows = torch.tensor(
            [b * num_tokens + i for b, s in enumerate(members) for i in range(s.num_new)]
        )
        output_rows = token_rows[kept_rows]
    # Keys past the longest sequence's end are in no tile.
    num_keys = max(s.num_keys for s in members)
    cleared = tuple((b, s.num_keys) for b, s in enumerate(members) if s.num_keys < num_keys)
    context, tiles = _tiles(members, num_tokens, geometry)
    return Group(
        token_rows, kept_rows, output_rows, blocks, cache_rows, len(members), num_tokens, cleared, context,
        tiles,
    )  # fmt: skip


def _tiles(
    members: Sequence[_Sequence], num_tokens: int, geometry: Geometry
) -> tuple[slice | None, tuple[Tile, ...]]:
    """Cut a group's rows into tiles and find the keys that need no mask."""
    num_keys = max(s.num_keys for s in members)
    rows = num_tokens * geometry.group_size
    if num_tokens == 1 and geometry.window is None and all(s.num_keys == num_keys for s in members):
        return None, (Tile(slice(0, rows), slice(0, num_keys), None),)
    context_len = 0
    if geometry.window is None:
        context_len = min(s.context_len for s in members)
        if num_tokens <= MAX_TREE_NODES and rows * context_len < LARGE_MASK:
            context_len = 0
    tiles = []
    for start in range(0, num_tokens, TILE_TOKENS):
        stop = min(start + TILE_TOKENS, num_tokens)
        # A tree's rows fit one tile, so that causal bounds are right for every tile.
        keys = slice(context_len, max(s.num_keys - s.num_new + min(stop, s.num_new) for s in members))
        if geometry.window is not None and len(members) == 1:
            seq = members[0]
            if seq.bits is None:
                keys = slice(
                    max(0, seq.context_len + start - geometry.window + 1 - seq.first_slot), keys.stop
                )
        mask = torch.cat([_mask(s, start, stop, keys, geometry) for s in members])
        tiles.append(Tile(slice(start * geometry.group_size, stop * geometry.group_size), keys, mask))
    return (slice(0, context_len) if context_len else None), tuple(tiles)


def _mask(seq: _Sequence, start: int, stop: int, keys: slice, geometry: Geometry) -> torch.Tensor:
    """[1, 1, rows, keys] of 0 and -inf: what tokens [start, stop) of the sequence see of keys."""
    # Padding tokens repeat the last one.
    tokens = torch.arange(start, stop).clamp(max=seq.num_new - 1)
    slots = torch.arange(keys.start, keys.stop) + seq.first_slot
    nodes = slots - seq.context_len
    if seq.bits is None:
        visible = nodes[None, :] <= tokens[:, None]
        depths = torch.arange(seq.num_new)
    else:
        bits = torch.tensor(seq.bits)
        shifts = nodes.clamp(0, MAX_TREE_NODES - 1)
        in_tree = (bits[tokens][:, None] >> shifts[None, :] & 1).bool()
        visible = (nodes < 0) | (in_tree & (nodes < seq.num_new))
        depths = torch.tensor([(b & (2**64 - 1)).bit_count() - 1 for b in seq.bits])
    if geometry.window is not None:
        positions = torch.where(nodes < 0, slots, seq.context_len + depths[nodes.clamp(0, seq.num_new - 1)])
        distance = (seq.context_len + depths[tokens])[:, None] - positions[None, :]
        visible = visible & (distance < geometry.window)
    mask = torch.zeros(visible.shape, dtype=geometry.dtype).masked_fill_(~visible, -torch.inf)
    return mask.repeat_interleave(geometry.group_size, 0)[None, None]
