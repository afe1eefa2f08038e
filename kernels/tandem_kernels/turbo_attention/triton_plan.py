"""The Triton kernel's work list and workspace: made once, refilled on the device once a step, for all layers.

    sequence       rows of BLOCK_ROWS         keys
    chunk          tile, tile, tile, ...      all that a tile sees, by one program
    tree, decode   tile (or two)              splits, one program each

    item           sequence, first row, begin, end, split, num_splits, tile, first partial row

Splits are of about as many slots as let all of a step run at the same time, but of SPLIT_SIZE at least and
MAX_SPLIT_SIZE at most: few sequences occupy the GPU with small splits, and many need none. They are larger
where a sequence would leave more partial results than its share of the memory for them, partials_bytes /
max_seqs. Chunks come first in the list, because their items take longest.

So the batch may change the last bits of a result, as it does in cuBLAS's products.
"""

# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tandem_kernels.turbo_attention.interface import MAX_TREE_NODES
from tandem_kernels.turbo_attention.triton_kernel import ITEM_FIELDS
from tandem_kernels.turbo_attention.triton_tiles import (
    MAX_SPLIT_SIZE,
    PARTIALS_BYTES,
    SPLIT_SIZE,
    Tiles,
    choose_tiles,
)

#: Tiles of rows that the planning kernel handles at a time.
PLAN_LANES = 256


class AttentionPlan:
    """Which program of the kernel attends to what in the current step.

    All layers of a step, and the steps after it, may use one plan, but not two launches at the same time: the
    plan's workspace holds the partial results. The CUDA stream orders `update` and the launches, and a CUDA
    graph can capture them. Layers with another window need another plan.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_seqs: int,
        max_seq_len: int,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype,
        device: torch.device | str,
        window: int | None = None,
        max_new_tokens: int | None = None,
        draft_tokens: int = 1,
        split_size: int = SPLIT_SIZE,
        partials_bytes: int = PARTIALS_BYTES,
        beside: AttentionPlan | None = None,
    ) -> None:
        """Allocate for steps of at most max_tokens new tokens of max_seqs sequences.

        Args:
            max_seq_len: longest sequence in tokens, new ones included; the workspace grows with it, up to
                partials_bytes.
            dtype, cache_dtype: the query's and the KV cache's.
            window: the layers' sliding window in tokens.
            max_new_tokens: new tokens that most sequences of a step stay within, for example the draft's
                nodes; None suits prompt chunks and all sizes of drafts. It changes the last bits of results.
            draft_tokens: new tokens up to which the share of the memory does not depend on their number, for
                example the largest draft's nodes. With more of them a sequence gets fewer splits.
            split_size: fewest keys per split; a multiple of the kernel's tile of keys. Splits of other sizes
                are of multiples of it.
            partials_bytes: most memory for partial results.
            beside: a plan whose memory for partial results this one uses too, and whose share of it for each
                sequence; the two must not run at the same time.

        Raises:
            ValueError: split_size is not a positive multiple of the tile, or `beside` has too little memory.
        """
        device = torch.device(device)
        self.group_size = num_heads // num_kv_heads
        self.num_kv_heads = num_kv_heads
        self.head_size = head_size
        self.dtype, self.cache_dtype = dtype, cache_dtype
        self.window = window
        self.max_tokens, self.max_seqs, self.max_seq_len = max_tokens, max_seqs, max_seq_len
        self.split_size = split_size
        self.tiles: Tiles = choose_tiles(
            head_size, self.group_size, dtype.itemsize, cache_dtype.itemsize, max_new_tokens
        )
        if split_size <= 0 or split_size % self.tiles.block_keys:
            raise ValueError(
                f"split_size is {split_size}, wanted a positive multiple of {self.tiles.block_keys} keys"
            )
        block_rows = self.tiles.block_rows
        row_bytes = num_kv_heads * (head_size + 2) * 4
        self.draft_tokens = draft_tokens
        #: A sequence's share of the partial results: most of its new tokens times its splits.
        self.max_token_splits = partials_bytes // (row_bytes * self.group_size * max_seqs)
        if beside is not None:
            self.max_token_splits = beside.max_token_splits
        max_splits = max(1, min(-(-max_seq_len // split_size), self.max_token_splits // draft_tokens))
        num_tiles = max_tokens * self.group_size // block_rows + max_seqs
        split_tokens = min(max_tokens, MAX_TREE_NODES * max_seqs)
        num_items = (split_tokens * self.group_size // block_rows + max_seqs) * max_splits + num_tiles
        #: Rows of partial results for each K/V head; a tile without splits leaves none.
        self.num_partial_rows = 1
        if max_splits > 1:
            token_splits = min(split_tokens * max_splits, max_seqs * self.max_token_splits)
            self.num_partial_rows = token_splits * self.group_size
        rows = num_kv_heads * self.num_partial_rows
        self.items = torch.empty(num_items, ITEM_FIELDS, dtype=torch.int32, device=device)
        self.num_items = torch.zeros(1, dtype=torch.int32, device=device)
        #: Items that programs have taken beside their first, and programs that have ended: zero before and
        #: after each launch, as are the counters.
        self.schedule = torch.zeros(2, dtype=torch.int32, device=device)
        #: Splits that have arrived, for each tile of rows and K/V head: zero before and after each launch.
        self.counters = torch.zeros(num_tiles * num_kv_heads, dtype=torch.int32, device=device)
        if beside is None:
            self.partials = torch.empty(rows, head_size, dtype=torch.float32, device=device)
            self.maxima = torch.empty(rows, dtype=torch.float32, device=device)
            self.sums = torch.empty(rows, dtype=torch.float32, device=device)
        elif len(beside.partials) < rows or beside.head_size != head_size:
            raise ValueError(
                f"beside has room for {len(beside.partials)} partial results of {beside.head_size} numbers, "
                f"wanted {rows} of {head_size}"
            )
        else:
            self.partials, self.maxima, self.sums = beside.partials, beside.maxima, beside.sums
        self.num_programs = 4
        if device.type == "cuda":
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            self.num_programs = multiprocessors * self.tiles.programs_per_multiprocessor
        #: Items of each K/V head that run at the same time.
        self.num_places = max(1, self.num_programs // num_kv_heads)

    def update(self, seq_lens: torch.Tensor, query_start_loc: torch.Tensor) -> None:
        """Fill the work list for a step; seq_lens [B] and query_start_loc [B + 1] as in `AttentionMetadata`.

        No sequence may be longer than max_seq_len (keys past it are left out), nor may the step exceed
        max_tokens; neither can be checked without waiting for the device.

        Raises:
            ValueError: more sequences than max_seqs.
        """
        num_seqs = seq_lens.shape[0]
        if num_seqs > self.max_seqs:
            raise ValueError(f"seq_lens has {num_seqs} sequences, wanted at most max_seqs = {self.max_seqs}")
        if num_seqs == 0:
            self.num_items.zero_()
            return
        plan_kernel[(1,)](
            seq_lens, query_start_loc, self.items, self.num_items,
            num_seqs, num_seqs.bit_length(),
            self.max_tokens * self.group_size // self.tiles.block_rows + num_seqs,
            self.max_seq_len, self.window or 0, self.max_token_splits, self.draft_tokens,
            self.num_places, max(1, MAX_SPLIT_SIZE // self.split_size),
            GROUP_SIZE=self.group_size, BLOCK_ROWS=self.tiles.block_rows, BLOCK_KEYS=self.tiles.block_keys,
            SPLIT_SIZE=self.split_size, MAX_NODES=MAX_TREE_NODES, HAS_WINDOW=self.window is not None,
            LANES=PLAN_LANES, num_warps=4,
        )  # fmt: skip


@triton.jit(
    do_not_specialize=(
        "num_seqs", "num_halvings", "num_tiles", "max_seq_len", "window", "max_token_splits", "draft_tokens",
        "num_places", "max_units",
    )
)  # fmt: skip
def plan_kernel(
    seq_lens_ptr, query_start_loc_ptr, items_ptr, num_items_ptr,
    num_seqs, num_halvings, num_tiles, max_seq_len, window, max_token_splits, draft_tokens,
    num_places, max_units,
    GROUP_SIZE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    MAX_NODES: tl.constexpr, HAS_WINDOW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """List the items of a step. One program: a step has few tiles, and prefix sums then need no second pass.

    Sequence b owns tiles from query_start_loc[b] * GROUP_SIZE // BLOCK_ROWS + b, enough of them whatever its
    length; a lane finds its tile's sequence by bisection.
    """
    all_units = 0
    for first_seq in tl.range(0, num_seqs, LANES):
        seqs = first_seq + tl.arange(0, LANES)
        is_seq = seqs < num_seqs
        num_new = tl.load(query_start_loc_ptr + seqs + 1, mask=is_seq, other=0)
        num_new -= tl.load(query_start_loc_ptr + seqs, mask=is_seq, other=0)
        ends = tl.minimum(tl.load(seq_lens_ptr + seqs, mask=is_seq, other=0), max_seq_len)
        begins = tl.zeros([LANES], dtype=tl.int32)
        if HAS_WINDOW:
            begins = tl.maximum(ends - num_new - window + 1, 0)
        units = tl.cdiv(ends, SPLIT_SIZE) - begins // SPLIT_SIZE
        tiles_each = tl.cdiv(num_new * GROUP_SIZE, BLOCK_ROWS)
        all_units += tl.sum(tl.where(num_new <= MAX_NODES, units * tiles_each, 0), 0)
    least_units = tl.minimum(tl.maximum(tl.cdiv(all_units, num_places), 1), max_units)
    num_items = 0
    num_partial_rows = 0
    for chunks in tl.static_range(2):
        for first_tile in tl.range(0, num_tiles, LANES):
            tiles = first_tile + tl.arange(0, LANES)
            seqs = tl.zeros([LANES], dtype=tl.int32)
            beyond = seqs + num_seqs
            for _ in tl.range(0, num_halvings):
                middle = (seqs + beyond) // 2
                starts = tl.load(query_start_loc_ptr + middle) * GROUP_SIZE // BLOCK_ROWS + middle
                beyond = tl.where(starts <= tiles, beyond, middle)
                seqs = tl.where(starts <= tiles, middle, seqs)
            row_starts = tl.load(query_start_loc_ptr + seqs)
            num_new = tl.load(query_start_loc_ptr + seqs + 1) - row_starts
            first_rows = (tiles - row_starts * GROUP_SIZE // BLOCK_ROWS - seqs) * BLOCK_ROWS
            num_rows = tl.minimum(num_new * GROUP_SIZE - first_rows, BLOCK_ROWS)
            seq_lens = tl.load(seq_lens_ptr + seqs)
            context_lens = seq_lens - num_new

            if chunks == 0:
                listed = (num_rows > 0) & (num_new > MAX_NODES)
                first_tokens = first_rows // GROUP_SIZE
                ends = context_lens + (first_rows + num_rows - 1) // GROUP_SIZE + 1
            else:
                listed = (num_rows > 0) & (num_new <= MAX_NODES)
                first_tokens = tl.zeros([LANES], dtype=tl.int32)
                ends = seq_lens
            ends = tl.minimum(ends, max_seq_len)
            begins = tl.zeros([LANES], dtype=tl.int32)
            if HAS_WINDOW:
                begins = tl.maximum(context_lens + first_tokens - window + 1, 0) // BLOCK_KEYS * BLOCK_KEYS
            if chunks == 0:
                first_units = tl.zeros([LANES], dtype=tl.int32)
                units_each = first_units
                num_splits = tl.where(listed, 1, 0)
            else:
                first_units = begins // SPLIT_SIZE
                num_units = tl.maximum(tl.cdiv(ends, SPLIT_SIZE) - first_units, 0)
                share = tl.maximum(max_token_splits // tl.maximum(num_new, draft_tokens), 1)
                units_each = tl.maximum(tl.cdiv(num_units, share), least_units)
                # Rounded, so that few keys past a multiple do not take a program of their own.
                num_splits = tl.maximum((num_units + units_each // 2) // units_each, tl.minimum(num_units, 1))
                units_each = tl.cdiv(num_units, tl.maximum(num_splits, 1))
                num_splits = tl.where(listed, tl.cdiv(num_units, tl.maximum(units_each, 1)), 0)
            partial_rows = tl.where(num_splits > 1, num_splits * num_rows, 0)
            first_items = num_items + tl.cumsum(num_splits, 0) - num_splits
            first_partial_rows = num_partial_rows + tl.cumsum(partial_rows, 0) - partial_rows
            for split in tl.range(0, tl.max(num_splits, 0)):
                is_item = split < num_splits
                item_ptrs = items_ptr + (first_items + split).to(tl.int64) * 8
                split_begins = begins
                split_ends = ends
                if chunks == 1:
                    first_unit = first_units + split * units_each
                    split_begins = tl.maximum(begins, first_unit * SPLIT_SIZE)
                    split_ends = tl.minimum(ends, (first_unit + units_each) * SPLIT_SIZE)
                tl.store(item_ptrs, seqs, mask=is_item)
                tl.store(item_ptrs + 1, first_rows, mask=is_item)
                tl.store(item_ptrs + 2, split_begins, mask=is_item)
                tl.store(item_ptrs + 3, split_ends, mask=is_item)
                tl.store(item_ptrs + 4, tl.zeros([LANES], dtype=tl.int32) + split, mask=is_item)
                tl.store(item_ptrs + 5, num_splits, mask=is_item)
                tl.store(item_ptrs + 6, tiles, mask=is_item)
                tl.store(item_ptrs + 7, first_partial_rows, mask=is_item)
            num_items += tl.sum(num_splits, 0)
            num_partial_rows += tl.sum(partial_rows, 0)
    tl.store(num_items_ptr, num_items)
