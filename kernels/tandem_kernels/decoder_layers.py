"""A decoder's step in one compiled call, instead of 300 calls from Python.

    run     some or all sublayers, on a residual stream that the caller keeps
    step    token ids -> logits: embedding, all sublayers, and norm, head and argmax of the rows that sample

The sublayers are those of `tandem_core.model.spec`, with weights: this package's operators in the order of
csrc/decoder.cpp. The results have the same bits as the operators called one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from tandem_kernels import native
from tandem_kernels.checks import KVCache, is_dense_cache, keys_and_values
from tandem_kernels.elementwise import ACTIVATIONS, NormWeights, native_norm
from tandem_kernels.moe import MoeWeights
from tandem_kernels.packed_linear import PackedWeight, native_weight
from tandem_kernels.rope_store import native_heads
from tandem_kernels.turbo_attention import AttentionMetadata
from tandem_kernels.turbo_attention.cpu_native import NativeAttention, point_to


@dataclass(frozen=True)
class PackedProjection:
    """A weight and its bias [N] float32, or None."""

    weight: PackedWeight
    bias: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """Softmax attention; norms and rotations as of `rope_store`, the other values as of `AttentionLayer`.

    Tensors are dense, and norms and sinks float32.
    """

    #: Queries, keys and values, one after the other.
    qkv: PackedProjection
    o: PackedProjection
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    rotations: torch.Tensor | None
    window: int | None = None
    softcap: float | None = None
    #: [Hq]
    sinks: torch.Tensor | None = None
    #: [Hq * v_dim] or [Hq] columns: the output is multiplied by their sigmoid.
    gate: PackedProjection | None = None
    q_norm: NormWeights | None = None
    k_norm: NormWeights | None = None
    v_norm: NormWeights | None = None
    norm_whole: bool = False
    norm_after_rope: bool = False
    #: Which of `StepInputs.tables` is for its cache, where there are several.
    group: int = 0


@dataclass(frozen=True, eq=False)
class MlpWeights:
    """`activate` between two projections; up holds the gate's rows, if there is one, before its own."""

    up: PackedProjection
    down: PackedProjection
    act: str
    gated: bool = True
    limit: float | None = None


@dataclass(frozen=True, eq=False)
class BranchWeights:
    """post(mixer(pre(x))); norms are float32."""

    mixer: AttentionWeights | MlpWeights | MoeWeights
    pre: NormWeights | None = None
    post: NormWeights | None = None


@dataclass(frozen=True, eq=False)
class SublayerWeights:
    """x + scale * post(sum of one or two branches), which both read x."""

    branches: tuple[BranchWeights, ...]
    post: NormWeights | None = None
    scale: float = 1.0


@dataclass(frozen=True, eq=False)
class DecoderEnds:
    """What comes before and after the sublayers.

    The head has V columns and no bias or one; its result is multiplied by logit_scale and capped
    (`finish_logits`).
    """

    #: [V, H] of the weights' dtype, dense; multiplied by embed_scale.
    embedding: torch.Tensor
    norm: NormWeights
    head: PackedProjection
    embed_scale: float = 1.0
    #: [P, H] of the weights' dtype, dense, or None: position p adds row p + position_offset.
    learned_positions: torch.Tensor | None = None
    position_offset: int = 0
    logit_scale: float = 1.0
    logit_cap: float | None = None


@dataclass(frozen=True)
class StepTable:
    """Where the keys and values of a step are, in the caches of one group of layers."""

    #: [T]
    slot_mapping: list[int]
    #: As in `AttentionMetadata`, but row after row: [B * max_blocks].
    block_table: list[int]


@dataclass(frozen=True)
class StepInputs:
    """The B sequences of a step, with T new tokens in total; lists, which cost less than small tensors."""

    #: [T], as are positions, slots and bits.
    token_ids: list[int]
    positions: list[int]
    #: These two of the first group of layers, or of all layers; as in `StepTable`.
    slot_mapping: list[int]
    block_table: list[int]
    seq_lens: list[int]
    query_start_loc: list[int]
    ancestor_bits: list[int] | None
    #: For the other groups, if layers have pools and block tables by group.
    more_tables: tuple[StepTable, ...] = ()

    @property
    def tables(self) -> tuple[StepTable, ...]:
        return StepTable(self.slot_mapping, self.block_table), *self.more_tables

    def metadata(self) -> AttentionMetadata:
        """With the first table."""

        def int32(values: list[int]) -> torch.Tensor:
            return torch.from_numpy(np.array(values, dtype=np.int32))

        bits = self.ancestor_bits
        return AttentionMetadata(
            int32(self.block_table).view(len(self.seq_lens), -1),
            int32(self.seq_lens),
            int32(self.query_start_loc),
            None if bits is None else torch.from_numpy(np.array(bits, dtype=np.int64)),
        )

    def all_metadata(self) -> list[AttentionMetadata]:
        """One for each table."""
        return [
            replace(self, slot_mapping=table.slot_mapping, block_table=table.block_table).metadata()
            for table in self.tables
        ]


class DecoderLayers:
    """Sublayers of one dtype, float32 or bfloat16, ready to run.

    Caches are checked once: do not change a list of caches in place.

    Args:
        sublayers: their weights; see `supports`.
        dtype: of activations and caches, and of weights that are not quantized.
        ends: what `step` needs besides.

    Raises:
        ValueError: the shape or dtype of a weight does not fit.
    """

    def __init__(
        self, sublayers: Sequence[SublayerWeights], dtype: torch.dtype, *, ends: DecoderEnds | None = None
    ) -> None:
        self._sublayers = tuple(sublayers)
        self.dtype = dtype
        self._hidden_size = _hidden_size(self._sublayers)
        #: What the arrays below point to; ctypes keeps only the tensors' addresses.
        self._held: list[object] = [self._sublayers, ends]
        self._attention: list[tuple[AttentionWeights, native.AttentionMixer]] = []
        self._array = (native.Sublayer * len(sublayers))(*map(self._native_sublayer, sublayers))
        self._num_groups = 1 + max([a.group for a in self._all_attention()], default=0)
        self._groups = (native.Group * self._num_groups)()
        #: Whether layers have tables by group, not one for all.
        self._has_groups = False
        #: The caches of the last call, and what it was.
        self._caches: Sequence[KVCache] = ()
        self._call = native.LayersCall()
        self._num_positions = min(
            [len(a.rotations) for a in self._all_attention() if a.rotations is not None] or [2**63 - 1]
        )
        if ends is not None:
            self._make_ends(ends)

    def _make_ends(self, ends: DecoderEnds) -> None:
        self._vocab_size, size = ends.head.weight.columns, self._hidden_size
        _check("embedding", ends.embedding, self.dtype, (self._vocab_size, size))
        _check_norm("norm", ends.norm, size)
        positions = ends.learned_positions
        if positions is not None:
            _check("learned_positions", positions, self.dtype, (len(positions), size))
            self._num_positions = min(self._num_positions, len(positions) - ends.position_offset)
        if ends.head.weight.depth != size:
            raise ValueError(f"head has depth {ends.head.weight.depth}, wanted {size}")
        self._logits = self._used_logits = torch.empty(0, self._vocab_size)
        self._native_ends = native.Ends(
            embedding=ends.embedding.data_ptr(),
            learned_positions=None if positions is None else positions.data_ptr(),
            norm=native_norm(ends.norm),
            head=self._linear("head", ends.head, self._vocab_size, size),
            vocab_size=self._vocab_size,
            num_learned=0 if positions is None else len(positions),
            position_offset=ends.position_offset,
            embed_scale=ends.embed_scale,
            logit_scale=ends.logit_scale,
            logit_cap=ends.logit_cap or 0.0,
        )

    @staticmethod
    def supports(sublayers: Sequence[SublayerWeights], dtype: torch.dtype) -> bool:
        """Whether the compiled call covers these weights here: widths and head sizes are multiples of 16, and
        heads are no larger than MAX_HEAD_SIZE."""
        widths = [_hidden_size(sublayers)]
        for branch in _branches(sublayers):
            if isinstance(branch.mixer, MlpWeights):
                widths.append(branch.mixer.down.weight.depth)
            elif isinstance(branch.mixer, MoeWeights):
                if not branch.mixer.runs_natively(dtype):
                    return False
            elif not all(
                NativeAttention.covers(dtype, dim) for dim in (branch.mixer.k_dim, branch.mixer.v_dim)
            ):
                return False
        return (
            native.LIBRARY is not None
            and dtype in (torch.float32, torch.bfloat16)
            and not any(width % 16 for width in widths)
            and all(len(sublayer.branches) in (1, 2) for sublayer in sublayers)
        )

    def _all_attention(self) -> Iterator[AttentionWeights]:
        return (weights for weights, _ in self._attention)

    def _native_sublayer(self, sublayer: SublayerWeights) -> native.Sublayer:
        branches = [self._native_branch(branch) for branch in sublayer.branches]
        _check_norm("post", sublayer.post, self._hidden_size)
        return native.Sublayer(
            branches=(native.Branch * 2)(*branches),
            num_branches=len(branches),
            scale=sublayer.scale,
            post=native_norm(sublayer.post),
        )

    def _native_branch(self, branch: BranchWeights) -> native.Branch:
        for name, norm in (("pre", branch.pre), ("post", branch.post)):
            _check_norm(name, norm, self._hidden_size)
        mixed = native.Branch(pre=native_norm(branch.pre), post=native_norm(branch.post))
        if isinstance(branch.mixer, AttentionWeights):
            attention = self._native_attention(branch.mixer)
            self._attention.append((branch.mixer, attention))
            mixed.attention = ctypes.pointer(attention)
        elif isinstance(branch.mixer, MoeWeights):
            if branch.mixer.router.shape[1] != self._hidden_size:
                raise ValueError(
                    f"router has depth {branch.mixer.router.shape[1]}, wanted {self._hidden_size}"
                )
            mixed.moe = ctypes.pointer(branch.mixer.described)
        else:
            mlp = self._native_mlp(branch.mixer)
            self._held.append(mlp)
            mixed.mlp = ctypes.pointer(mlp)
        return mixed

    def _native_attention(self, a: AttentionWeights) -> native.AttentionMixer:
        size, out_size = self._hidden_size, a.num_heads * a.v_dim
        for name, norm, width in (
            ("q_norm", a.q_norm, a.k_dim * (a.num_heads if a.norm_whole else 1)),
            ("k_norm", a.k_norm, a.k_dim * (a.num_kv_heads if a.norm_whole else 1)),
            ("v_norm", a.v_norm, a.v_dim),
        ):
            _check_norm(name, norm, width)
        if a.rotations is not None:
            columns = a.rotations.shape[-1]
            if not 0 < columns <= a.k_dim // 2:
                raise ValueError(f"rotations has {columns} columns, wanted at most {a.k_dim // 2}")
            _check("rotations", a.rotations, torch.complex64, (len(a.rotations), columns))
        if a.sinks is not None:
            _check("sinks", a.sinks, torch.float32, (a.num_heads,))
        if a.num_heads % a.num_kv_heads:
            raise ValueError(f"there are {a.num_heads} heads, wanted a multiple of Hkv = {a.num_kv_heads}")
        gate = None
        if a.gate is not None:
            columns = a.num_heads if a.gate.weight.columns == a.num_heads else out_size
            gate = self._linear("gate", a.gate, columns, size)
        qkv_size = (a.num_heads + a.num_kv_heads) * a.k_dim + a.num_kv_heads * a.v_dim
        return native.AttentionMixer(
            qkv=self._linear("qkv", a.qkv, qkv_size, size),
            o=self._linear("o", a.o, size, out_size),
            gate=gate,
            heads=native_heads(
                [a.q_norm, a.k_norm, a.v_norm],
                a.rotations,
                (a.num_heads, a.num_kv_heads, a.k_dim, a.v_dim),
                a.norm_whole,
                a.norm_after_rope,
            ),
            sinks=None if a.sinks is None else a.sinks.data_ptr(),
            scale=a.scale,
            softcap=a.softcap or 0.0,
            window=a.window or 0,
        )

    def _native_mlp(self, mlp: MlpWeights) -> native.MlpMixer:
        size, inner = self._hidden_size, mlp.down.weight.depth
        return native.MlpMixer(
            up=self._linear("up", mlp.up, inner * (2 if mlp.gated else 1), size),
            down=self._linear("down", mlp.down, size, inner),
            act=native.Activation(ACTIVATIONS[mlp.act], mlp.gated, mlp.limit or 0.0),
        )

    def _linear(self, name: str, projection: PackedProjection, columns: int, depth: int) -> object:
        """The kernels' description, kept alive."""
        weight = projection.weight
        if (weight.columns, weight.depth) != (columns, depth):
            raise ValueError(f"{name} is [{weight.columns}, {weight.depth}], wanted [{columns}, {depth}]")
        pieces = native_weight(weight, projection.bias)
        self._held.append(pieces)
        return ctypes.cast(pieces, ctypes.POINTER(native.LinearWeight))

    def run(
        self,
        first: int,
        end: int,
        hidden: torch.Tensor,
        delta: torch.Tensor,
        positions: torch.Tensor,
        kv_caches: Sequence[KVCache],
        slot_mapping: torch.Tensor,
        metadata: AttentionMetadata,
        *,
        more_groups: Sequence[tuple[torch.Tensor, AttentionMetadata]] = (),
        interleaved: bool = False,
    ) -> None:
        """Run T new tokens through sublayers first to end - 1.

        Args:
            hidden: [T, H] float32, dense: the residual stream; changed.
            delta: [T, H] of the weights' dtype, dense: the last sublayer's contribution, which the next norm
                adds to hidden, times that sublayer's scale; read unless first is 0, and written.
            positions, slot_mapping: as of `rope_store`.
            kv_caches: one for each attention layer (of all), dense, of the weights' dtype.
            metadata: the step's sequences.
            more_groups: slot_mapping and metadata, of which the block table is read, of the groups after the
                first, if layers have pools and block tables by group.
            interleaved: the caches lie as `interleave` says; blocks are then multiples of 64 tokens.

        Raises:
            ValueError: a shape or dtype does not fit, or the metadata is inconsistent.
            IndexError: a position or a slot is out of range.
        """
        num_tokens = len(hidden)
        _check("hidden", hidden, torch.float32, (num_tokens, self._hidden_size))
        _check("delta", delta, self.dtype, (num_tokens, self._hidden_size))
        _check("positions", positions, torch.int64, (num_tokens,))
        groups = [(slot_mapping, metadata), *more_groups]
        for slots, _ in groups:
            _check("slot_mapping", slots, torch.int64, (num_tokens,))
        if metadata.ancestor_bits is not None and len(metadata.ancestor_bits) != num_tokens:
            raise ValueError(
                f"ancestor_bits has shape {list(metadata.ancestor_bits.shape)}, wanted [{num_tokens}]"
            )
        if not 0 <= first <= end <= len(self._array):
            raise ValueError(f"sublayers are {first} to {end}, wanted them in 0 to {len(self._array)}")
        call = self._bind(kv_caches, len(groups), interleaved=interleaved)
        call.ends = None
        call.hidden, call.delta, call.positions = hidden.data_ptr(), delta.data_ptr(), positions.data_ptr()
        call.first, call.end = first, end
        point_to(call.attention, metadata, num_tokens)
        for group, (slots, of_group) in zip(self._groups, groups, strict=False):
            if len(of_group.block_table) != len(metadata.seq_lens):
                raise ValueError(
                    f"block_table has {len(of_group.block_table)} rows, wanted {len(metadata.seq_lens)}"
                )
            group.slots, group.block_table = slots.data_ptr(), of_group.block_table.data_ptr()
            group.max_blocks = of_group.block_table.shape[1]
        if (wrong := self._run_call(lambda: [of_group for _, of_group in groups])) >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]} and slot {slot_mapping[wrong]}, wanted them "
                f"below {self._num_positions} and {self._num_slots}"
            )

    def step(
        self,
        inputs: StepInputs,
        kv_caches: Sequence[KVCache],
        rows: Sequence[int],
        *,
        interleaved: bool = False,
    ) -> tuple[torch.Tensor, list[int]]:
        """Run T new tokens from their ids to logits; needs `ends`.

        Args:
            kv_caches, interleaved: as of `run`.
            rows: of the T tokens those whose logits are wanted, each once.

        Returns:
            logits [len(rows), V] float32, valid until the next call, and of each row the token with the
            largest one: the lowest of equals, the first NaN if there is one.

        Raises:
            ValueError, IndexError: as `run`; a token id or a row is out of range.
        """
        token_ids, positions, slots, bits = (
            inputs.token_ids, inputs.positions, inputs.slot_mapping, inputs.ancestor_bits
        )  # fmt: skip
        num_tokens, num_rows, num_seqs = len(token_ids), len(rows), len(inputs.seq_lens)
        tables = inputs.tables
        per_token = len(positions), len(slots), num_tokens if bits is None else len(bits)
        if (
            per_token != (num_tokens,) * 3
            or len(inputs.query_start_loc) != num_seqs + 1
            or any(len(table.slot_mapping) != num_tokens for table in tables)
        ):
            raise ValueError(
                f"there are {num_tokens} token ids, {per_token} positions, slots and bits, {num_seqs} "
                f"sequence lengths and {len(inputs.query_start_loc)} starts"
            )
        if num_rows and not 0 <= min(rows) <= max(rows) < num_tokens:
            raise IndexError(f"rows are {list(rows)}, wanted rows of {num_tokens} tokens")
        # A row's last product is added to the residual stream in place, once for each mention.
        if len(set(rows)) != num_rows:
            raise ValueError(f"rows are {list(rows)}, wanted each row once")
        ends = self._native_ends
        if num_rows > len(self._logits):
            self._logits = self._used_logits = torch.empty(num_rows, self._vocab_size)
            ends.logits = self._logits.data_ptr()
        # The call points into these.
        wide = (ctypes.c_int64 * ((3 + len(tables)) * num_tokens + 2 * num_rows))(
            *token_ids, *positions, *(bits or [0] * num_tokens),
            *chain.from_iterable([table.slot_mapping for table in tables]), *rows,
        )  # fmt: skip
        narrow = (ctypes.c_int32 * (sum([len(t.block_table) for t in tables]) + 2 * num_seqs + 1))(
            *inputs.seq_lens, *inputs.query_start_loc,
            *chain.from_iterable([table.block_table for table in tables]),
        )  # fmt: skip
        at, at_narrow, bytes_per_token = ctypes.addressof(wide), ctypes.addressof(narrow), 8 * num_tokens
        call = self._bind(kv_caches, len(tables), interleaved=interleaved)
        call.positions = at + bytes_per_token
        call.first, call.end = 0, len(self._array)
        attention = call.attention
        attention.ancestor_bits = None if bits is None else at + 2 * bytes_per_token
        attention.seq_lens, attention.query_start_loc = at_narrow, at_narrow + 4 * num_seqs
        attention.num_seqs, attention.num_tokens = num_seqs, num_tokens
        attention.num_threads = torch.get_num_threads()
        at_slots, at_table = at + 3 * bytes_per_token, at_narrow + 4 * (2 * num_seqs + 1)
        for group, table in zip(self._groups, tables, strict=False):
            group.slots, group.block_table = at_slots, at_table
            group.max_blocks = len(table.block_table) // num_seqs
            at_slots, at_table = at_slots + bytes_per_token, at_table + 4 * len(table.block_table)
        ends.token_ids, ends.rows, ends.num_rows = at, at_slots, num_rows
        ends.likeliest = at_slots + 8 * num_rows
        call.ends = ctypes.addressof(ends)
        if (wrong := self._run_call(inputs.all_metadata)) >= 0:
            raise IndexError(
                f"token {wrong} has position {positions[wrong]}, slot {slots[wrong]} and id "
                f"{token_ids[wrong]}, wanted them below {self._num_positions}, {self._num_slots} and "
                f"{self._vocab_size}"
            )
        if len(self._used_logits) != num_rows:
            # Not in each step: with torch's code evicted from the caches, a view takes 0.07 ms.
            self._used_logits = self._logits[:num_rows]
        return self._used_logits, wide[len(wide) - num_rows :]

    def _bind(self, kv_caches: Sequence[KVCache], num_tables: int, *, interleaved: bool) -> native.LayersCall:
        """The call, with all that does not change from step to step."""
        if num_tables not in (1, self._num_groups):
            raise ValueError(f"there are {num_tables} block tables, wanted 1 or {self._num_groups}")
        has_groups = num_tables > 1
        if kv_caches is not self._caches or has_groups != self._has_groups:
            self._caches = ()
            shapes = self._check_caches(kv_caches, has_groups)
            for (attention, mixer), cache in zip(self._attention, kv_caches, strict=True):
                mixer.cache = keys_and_values(cache)[0].data_ptr()
                mixer.group = attention.group if has_groups else 0
            for g, (num_blocks, block_size) in shapes.items():
                self._groups[g].num_blocks, self._groups[g].block_size = num_blocks, block_size
            dtype = native.DTYPE[self.dtype]
            self._call = native.LayersCall(
                sublayers=ctypes.addressof(self._array),
                groups=ctypes.addressof(self._groups),
                attention=native.AttentionCall(query_dtype=dtype, cache_dtype=dtype),
                num_groups=len(shapes),
                hidden_size=self._hidden_size,
            )
            self._caches, self._has_groups = kv_caches, has_groups
        for group in self._groups[: self._call.num_groups]:
            if interleaved and group.block_size % 64:
                raise ValueError(
                    f"kv_caches have blocks of {group.block_size} tokens, interleaved they want a multiple "
                    "of 64"
                )
        self._call.attention.interleaved = interleaved
        return self._call

    def _check_caches(self, kv_caches: Sequence[KVCache], has_groups: bool) -> dict[int, tuple[int, int]]:
        """The number of blocks and their tokens, the same in all layers of a group."""
        if len(kv_caches) != len(self._attention):
            raise ValueError(f"there are {len(kv_caches)} kv_caches for {len(self._attention)} layers")
        shapes: dict[int, tuple[int, int]] = {}
        for n, (cache, attention) in enumerate(zip(kv_caches, self._all_attention(), strict=True)):
            keys, values = keys_and_values(cache)
            group = attention.group if has_groups else 0
            num_blocks, block_size = shapes.setdefault(group, (keys.shape[0], keys.shape[2]))
            wanted = [
                (num_blocks, attention.num_kv_heads, block_size, dim)
                for dim in (attention.k_dim, attention.v_dim)
            ]
            if [keys.shape, values.shape] != wanted or keys.dtype != self.dtype or not is_dense_cache(cache):
                raise ValueError(
                    f"kv_caches[{n}] has K {list(keys.shape)} and V {list(values.shape)} with strides "
                    f"{list(keys.stride())} and {list(values.stride())} and dtype {keys.dtype}, wanted a "
                    f"contiguous K {list(wanted[0])} and V {list(wanted[1])} of {self.dtype}"
                )
        return shapes

    @property
    def _num_slots(self) -> int:
        """The first group's."""
        return int(self._groups[0].num_blocks * self._groups[0].block_size)

    def _run_call(self, metadata: Callable[[], Sequence[AttentionMetadata]]) -> int:
        """Runs the call: -1, or the first token that is out of range. Raises ValueError for the metadata."""
        assert native.LIBRARY is not None
        wrong: int = native.LIBRARY.tandem_decoder_layers(ctypes.byref(self._call))
        if wrong == -2:
            for group, of_group in zip(self._groups, metadata(), strict=False):
                # Says what is wrong.
                of_group.check_values(self._call.attention.num_tokens, group.block_size, group.num_blocks)
            raise AssertionError("the compiled kernels refused consistent metadata")
        return wrong


def _branches(sublayers: Sequence[SublayerWeights]) -> Iterator[BranchWeights]:
    return (branch for sublayer in sublayers for branch in sublayer.branches)


def _hidden_size(sublayers: Sequence[SublayerWeights]) -> int:
    mixer = next(_branches(sublayers)).mixer
    if isinstance(mixer, MoeWeights):
        return mixer.router.shape[1]
    return (mixer.qkv if isinstance(mixer, AttentionWeights) else mixer.up).weight.depth


def _check(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    if tensor.dtype != dtype or tensor.shape != shape or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {list(tensor.shape)} and dtype {tensor.dtype}, wanted a dense "
            f"{list(shape)} of {dtype}"
        )


def _check_norm(name: str, norm: NormWeights | None, width: int) -> None:
    for tensor in () if norm is None else (norm.weight, norm.bias):
        if tensor is not None:
            _check(name, tensor, torch.float32, (width,))
