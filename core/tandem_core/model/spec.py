"""What a decoder computes, as values: executors, the weight file and the KV cache read this one description.

    ids -> embedding -> sublayer ... sublayer -> norm -> head -> logits
    sublayer:  x + residual_scale * post(sum over branches of post(mixer(pre(x))))

A block of a llama is two sublayers of one branch: attention, then an MLP. Models that run both beside each
other have one sublayer of two branches, models with one mixer per layer have one sublayer of one. A family
(tandem_engine.models.families) turns a config into a spec; whoever computes refuses what it does not cover.
Nothing here knows a family's name.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, TypeAlias


class NormKind(StrEnum):
    RMS = "rms"
    LAYER = "layer"


class Activation(StrEnum):
    SILU = "silu"
    GELU = "gelu"
    #: The approximation by tanh.
    GELU_TANH = "gelu_tanh"
    RELU = "relu"
    #: The square of relu.
    RELU2 = "relu2"


@dataclass(frozen=True)
class Norm:
    """A weight that the family stores as 1 + w is one where the weights are read."""

    kind: NormKind
    eps: float
    weight: bool = True
    bias: bool = False


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of the first `dims` elements of a head; the rest is copied.

    `kind` is one of default, linear, llama3, yarn, table, longrope. The other values are read by the kinds
    that name them. Equal values are one table in memory.
    """

    dims: int
    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_len: int = 0
    #: llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    #: yarn; truncate: whether its correction range is rounded to whole dimensions.
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    #: Multiplies cos and sin.
    attention_factor: float = 1.0
    #: table: each of the dims / 2 frequencies is divided by its number here and by factor; infinity: that
    #: pair is not rotated. longrope: for texts of at most original_max_len tokens.
    table: tuple[float, ...] = ()
    #: longrope: for longer texts.
    long_table: tuple[float, ...] = ()

    def limited_to(self, max_len: int) -> Rope:
        """For a server of texts up to `max_len`: longrope becomes one of its tables, because cached keys
        cannot be rotated again when a text grows."""
        if self.kind != "longrope":
            return self
        table = self.long_table if max_len > self.original_max_len else self.table
        return replace(self, kind="table", factor=1.0, table=table, long_table=())


@dataclass(frozen=True)
class QueryGrowth:
    """A query at position p is multiplied by 1 + beta * log(1 + floor(p / original_max_len))."""

    beta: float
    original_max_len: int


@dataclass(frozen=True)
class Attention:
    """Softmax attention over a paged cache of keys and values."""

    heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    #: Multiplies the products of queries and keys.
    scale: float
    #: None: positions do not enter.
    rope: Rope | None
    #: A query sees this many latest keys, itself included; None: all of them.
    window: int | None = None
    #: Logits become cap * tanh(logits / cap).
    cap: float | None = None
    #: One more logit per head in the softmax's sum, without a value.
    sinks: bool = False
    #: The output is multiplied by the sigmoid of a further projection, per element or per head.
    gate: str | None = None
    qk_norm: Norm | None = None
    #: Whether qk_norm normalises all heads together rather than each.
    norm_whole: bool = False
    #: Whether qk_norm follows the rotation.
    norm_after_rope: bool = False
    v_norm: Norm | None = None
    query_growth: QueryGrowth | None = None
    #: Projections with a bias: q, k, v, o.
    biases: frozenset[str] = frozenset()


@dataclass(frozen=True)
class GatedDelta:
    """The gated delta rule over a recurrent state per value head, after a short causal convolution.

    Arxiv 2412.06464. State per value head: [k_dim, v_dim]; every k head serves v_heads / k_heads value heads.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    #: Taps of the convolution.
    conv: int
    #: Normalises the output, before its gate by SiLU.
    norm: Norm


@dataclass(frozen=True)
class Mlp:
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    inner: int
    act: Activation
    gated: bool = True
    #: gpt-oss: gate and up are clamped to this, act is x * sigmoid(1.702 x), and up + 1 multiplies.
    limit: float | None = None
    bias: bool = False


@dataclass(frozen=True)
class Router:
    """Scores of experts, the choice of top_k and their weights."""

    #: softmax or sigmoid of the logits, or top_softmax: softmax over the chosen ones.
    score: str
    top_k: int
    #: Whether the chosen weights are divided by their sum.
    renorm: bool = False
    #: Multiplies the weights.
    scale: float = 1.0
    #: Experts are chosen among the top_groups of `groups` groups, ranked by the sum of their best two scores.
    groups: int = 1
    top_groups: int = 1
    #: Whether a learned number per expert joins the scores for the choice, not for the weights.
    correction: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Moe:
    """A mixture of experts, each of the shape of `expert`."""

    experts: int
    expert: Mlp
    router: Router
    #: An MLP for every token besides.
    shared: Mlp | None = None
    #: Whether the shared MLP is multiplied by the sigmoid of a linear function of its input.
    shared_gate: bool = False


Mixer: TypeAlias = Attention | GatedDelta | Mlp | Moe


@dataclass(frozen=True)
class Branch:
    mixer: Mixer
    pre: Norm | None = None
    post: Norm | None = None


@dataclass(frozen=True)
class Sublayer:
    branches: tuple[Branch, ...]
    #: Normalises the branches' sum.
    post: Norm | None = None
    residual_scale: float = 1.0


@dataclass(frozen=True)
class Head:
    """Logits by the rows of the embedding (tied) or of its own matrix; then bias, scale and cap, in order."""

    tied: bool
    bias: bool = False
    scale: float = 1.0
    cap: float | None = None


class CacheKind(StrEnum):
    """What a group of layers keeps of a text."""

    #: Keys and values of all tokens.
    FULL = "full"
    #: Keys and values of the last tokens.
    WINDOW = "window"
    #: Tensors of a fixed size per sequence.
    STATE = "state"


@dataclass(frozen=True)
class CachePart:
    """One tensor: of a token and layer, or of a sequence and layer in a STATE group.

    dtype: "kv" is the pool's type; otherwise torch's name.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "kv"


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose caches have one shape and one lifetime; they share a block table."""

    kind: CacheKind
    #: Indices into `ModelSpec.cached`.
    layers: tuple[int, ...]
    parts: tuple[CachePart, ...]
    window: int | None = None


@dataclass(frozen=True)
class ModelSpec:
    vocab_size: int
    hidden_size: int
    #: Positions that the model was made for.
    max_len: int
    sublayers: tuple[Sublayer, ...]
    norm: Norm
    head: Head
    #: Multiplies the embedding.
    embed_scale: float = 1.0
    #: Rows of a learned embedding of positions; row p + position_offset belongs to position p. 0: none.
    learned_positions: int = 0
    position_offset: int = 0

    @cached_property
    def cached(self) -> tuple[Attention | GatedDelta, ...]:
        """The mixers that keep something of earlier tokens; "layer n" of the KV cache is the n-th of them."""
        return tuple(
            branch.mixer
            for sublayer in self.sublayers
            for branch in sublayer.branches
            if isinstance(branch.mixer, Attention | GatedDelta)
        )

    @cached_property
    def attentions(self) -> tuple[Attention, ...]:
        return tuple(mixer for mixer in self.cached if isinstance(mixer, Attention))

    def limited_to(self, max_len: int) -> ModelSpec:
        """The model for texts of at most `max_len` tokens."""

        def limited(mixer: Mixer) -> Mixer:
            if isinstance(mixer, Attention) and mixer.rope is not None:
                return replace(mixer, rope=mixer.rope.limited_to(max_len))
            return mixer

        sublayers = tuple(
            replace(sublayer, branches=tuple(replace(b, mixer=limited(b.mixer)) for b in sublayer.branches))
            for sublayer in self.sublayers
        )
        return replace(self, max_len=min(max_len, self.max_len), sublayers=sublayers)

    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """Every cached layer in exactly one group; groups in the order of their first layers."""
        grouped: dict[tuple[CacheKind, tuple[CachePart, ...], int | None], list[int]] = {}
        for n, mixer in enumerate(self.cached):
            grouped.setdefault(_cache_of(mixer), []).append(n)
        return tuple(
            CacheGroup(kind, tuple(layers), parts, window)
            for (kind, parts, window), layers in grouped.items()
        )

    def kv_groups(self) -> tuple[CacheGroup, ...]:
        """The groups that keep keys and values; their layers are indices into `attentions`."""
        groups = self.cache_groups()
        states = {layer for group in groups if group.kind is CacheKind.STATE for layer in group.layers}
        number = {layer: n for n, layer in enumerate(n for n in range(len(self.cached)) if n not in states)}
        return tuple(
            replace(group, layers=tuple(number[layer] for layer in group.layers))
            for group in groups
            if group.kind is not CacheKind.STATE
        )

    @cached_property
    def hash(self) -> str:
        """32 hex digits, equal in every process for specs that are equal except for max_len: that changes
        neither weights nor keys."""
        text = json.dumps(_plain(replace(self, max_len=0)), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _cache_of(mixer: Attention | GatedDelta) -> tuple[CacheKind, tuple[CachePart, ...], int | None]:
    if isinstance(mixer, Attention):
        parts = (CachePart("k", (mixer.kv_heads, mixer.k_dim)), CachePart("v", (mixer.kv_heads, mixer.v_dim)))
        return CacheKind.FULL if mixer.window is None else CacheKind.WINDOW, parts, mixer.window
    channels = 2 * mixer.k_heads * mixer.k_dim + mixer.v_heads * mixer.v_dim
    parts = (
        CachePart("conv", (mixer.conv - 1, channels)),
        CachePart("recurrent", (mixer.v_heads, mixer.k_dim, mixer.v_dim), "float32"),
    )
    return CacheKind.STATE, parts, None


def _plain(value: Any) -> Any:
    """`value` as JSON; a dataclass keeps its name, so that equal fields of two mixers differ."""
    if is_dataclass(value) and not isinstance(value, type):
        return [type(value).__name__, {f.name: _plain(getattr(value, f.name)) for f in fields(value)}]
    if isinstance(value, frozenset):
        return sorted(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
