"""Reads a Hugging Face config.json: each value is checked where a family asks for it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tandem_core.errors import ModelLoadError, quoted
from tandem_core.model.spec import (
    Activation,
    Attention,
    Branch,
    Head,
    Mixer,
    Mlp,
    ModelSpec,
    Norm,
    NormKind,
    Rope,
    Sublayer,
)

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
    "relu2": Activation.RELU2,
}
_LONGEST = 1 << 30


class Config:
    """A config, or the text_config in it, over the family's defaults.

    Files leave out what equals the defaults of transformers' class.
    """

    def __init__(
        self, raw: Mapping[str, Any], defaults: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> None:
        """aliases: our name of a value -> the file's."""
        text = raw.get("text_config")
        #: Whether the config describes other modalities besides.
        self.nested = isinstance(text, Mapping)
        tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        found = dict(text) | tied if isinstance(text, Mapping) else dict(raw)
        found |= {ours: found[theirs] for ours, theirs in aliases.items() if theirs in found}
        self._values = {**defaults, **found}

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def count(self, name: str, default: Any = None, limit: int = 1 << 24) -> int:
        """An integer from 1 to `limit`; none of today's models is near it."""
        value = self.get(name, default)
        if value is None:
            raise KeyError(name)
        return _whole(name, value, limit)

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        value = self.get(name, default)
        if value is None:
            raise KeyError(name)
        return _positive(name, value)

    def flag(self, name: str, default: bool = False) -> bool:
        return bool(self.get(name, default))

    def refuse(self, name: str, value: Any, why: str) -> None:
        """Raises ModelLoadError unless the config has no `name`, or this value of it."""
        if self.get(name, value) != value:
            raise ModelLoadError(
                f"config.json: {name} is {quoted(str(self.get(name)))}, but {why}; use another model"
            )

    @property
    def hidden(self) -> int:
        return self.count("hidden_size")

    @property
    def inner(self) -> int:
        return self.count("intermediate_size")

    @property
    def layers(self) -> int:
        return self.count("num_hidden_layers", limit=10_000)

    @property
    def heads(self) -> int:
        return self.count("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        return self.count("num_key_value_heads", self.heads)

    @property
    def head_dim(self) -> int:
        return self.count("head_dim", self.hidden // self.heads)

    @property
    def max_len(self) -> int:
        return self.count("max_position_embeddings", limit=_LONGEST)

    def rms(self, eps: str = "rms_norm_eps") -> Norm:
        return Norm(NormKind.RMS, self.number(eps))

    def layer_norm(
        self, eps: str = "layer_norm_eps", *, bias: bool = True, default: float | None = None
    ) -> Norm:
        return Norm(NormKind.LAYER, self.number(eps, default), bias=bias)

    def act(self, name: str = "hidden_act", default: str = "silu") -> Activation:
        act = str(self.get(name, default))
        if act not in _ACTIVATIONS:
            known = ", ".join(_ACTIVATIONS)
            raise ModelLoadError(f"activation {quoted(act)} is not supported; only {known} are")
        return _ACTIVATIONS[act]

    def mlp(self, **changes: Any) -> Mlp:
        usual: dict[str, Any] = {"inner": self.inner, "act": self.act()}
        return Mlp(**usual | changes)

    def attention(self, rope: Rope | None, **changes: Any) -> Attention:
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        if heads % kv_heads:
            raise ModelLoadError(
                f"the config has {heads} heads over {kv_heads} KV heads, which does not divide; the model's "
                "config.json is damaged, pull it again"
            )
        if head_dim % 2 or (rope is not None and rope.dims % 2):
            raise ModelLoadError(f"head size {head_dim} is odd, but RoPE rotates pairs; use another model")
        usual: dict[str, Any] = {
            "heads": heads,
            "kv_heads": kv_heads,
            "k_dim": head_dim,
            "v_dim": head_dim,
            "scale": head_dim**-0.5,
        }
        return Attention(rope=rope, **usual | changes)

    def cap(self, name: str) -> float | None:
        cap = self.get(name)
        if cap is not None and not float(cap) > 0:
            raise ModelLoadError(
                f"{name} is {cap}, which is not positive; the model's config.json is damaged, pull it again"
            )
        return None if cap is None else float(cap)

    def per_layer(self, name: str, default: Sequence[Any]) -> Sequence[Any]:
        """A list with an item per layer."""
        items = self.get(name, default)
        if not isinstance(items, Sequence) or len(items) != self.layers:
            raise ModelLoadError(
                f"the config lists {len(items)} layer types for {self.layers} layers in {name}; "
                "the model's config.json is damaged, pull it again"
            )
        return items

    def windows(self, default_types: Sequence[str]) -> tuple[int | None, ...]:
        """Each layer's window, by layer_types; default_types: for configs without them."""
        types = self.per_layer("layer_types", default_types)
        if "sliding_attention" not in types:
            return (None,) * self.layers
        size = self.count("sliding_window", limit=_LONGEST)
        return tuple(size if kind == "sliding_attention" else None for kind in types)

    def rope(self, layer_type: str | None = None, *, partial: float | None = None, **old: Any) -> Rope:
        """As transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters) writes it.

        layer_type: for families that rotate differently per type of layer; partial: the rotated share of a
        head where the config does not say; old: what transformers 4 had for this layer_type.

        `dynamic` (NTK) is read as `default` with the context held to the trained length, where the two agree:
        beyond it the rotation of keys already cached would have to change with every token.
        """
        scaling: Mapping[str, Any] = self.get("rope_parameters") or self.get("rope_scaling") or {}
        if layer_type is not None and layer_type in scaling:
            scaling = scaling[layer_type]
        elif old and not (scaling and layer_type is None):
            scaling = old
        kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
        theta = _positive("rope_theta", scaling.get("rope_theta") or self.get("rope_theta", 10000.0))
        share = scaling.get("partial_rotary_factor") or self.get("partial_rotary_factor") or partial or 1.0
        dims = int(self.head_dim * _positive("partial_rotary_factor", share))
        name = "original_max_position_embeddings"
        original = _whole(name, scaling.get(name) or self.get(name) or self.max_len, _LONGEST)
        match kind:
            # mrope: the three positions of a token of text are equal.
            case "default" | "dynamic" | "mrope":
                return Rope(dims, theta=theta)
            case "longrope" | "su":
                return self._longrope(scaling, dims, theta, original)
            case "linear":
                return Rope(dims, kind, theta, _positive("factor", scaling["factor"]))
            case "table":
                factor = _positive("factor", scaling["factor"])
                table = tuple(_positive("table", f) for f in scaling["table"])
                return Rope(dims, kind, theta, factor, table=table)
            case "llama3":
                low, high = (_positive(n, scaling[n]) for n in ("low_freq_factor", "high_freq_factor"))
                return Rope(dims, kind, theta, _positive("factor", scaling["factor"]), original, low, high)
            case "yarn":
                factor = _positive("factor", scaling.get("factor") or self.max_len / original)
                return Rope(
                    dims,
                    kind,
                    theta,
                    factor,
                    original,
                    beta_fast=float(scaling.get("beta_fast") or 32.0),
                    beta_slow=float(scaling.get("beta_slow") or 1.0),
                    attention_factor=_yarn_attention_factor(scaling, factor),
                    truncate=bool(scaling.get("truncate", True)),
                )
        raise ModelLoadError(
            f"RoPE scaling {kind!r} is not supported; use default, linear, dynamic, llama3, yarn or longrope"
        )

    def _longrope(self, scaling: Mapping[str, Any], dims: int, theta: float, original: int) -> Rope:
        short, long = (
            tuple(_positive(name, f) for f in scaling[name]) for name in ("short_factor", "long_factor")
        )
        if len(short) != dims // 2 or len(long) != dims // 2:
            raise ModelLoadError(
                f"config.json: longrope has {len(short)} and {len(long)} factors for {dims // 2} rotated "
                "pairs; pull the model again"
            )
        factor = self.max_len / original
        attention_factor = scaling.get("attention_factor")
        if attention_factor is None:
            attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
        return Rope(
            dims,
            "longrope",
            theta,
            original_max_len=original,
            attention_factor=float(attention_factor),
            table=short,
            long_table=long,
        )

    def model(
        self, layers: Iterable[Iterable[Sublayer]], norm: Norm, head: Head | None = None, **changes: Any
    ) -> ModelSpec:
        """The sublayers of each layer, and what stands around them."""
        return ModelSpec(
            vocab_size=self.count("vocab_size"),
            hidden_size=self.hidden,
            max_len=self.max_len,
            sublayers=tuple(sublayer for layer in layers for sublayer in layer),
            norm=norm,
            head=head or Head(tied=self.flag("tie_word_embeddings")),
            **changes,
        )


def sub(mixer: Mixer, pre: Norm | None, post: Norm | None = None, residual_scale: float = 1.0) -> Sublayer:
    """A sublayer of one branch."""
    return Sublayer((Branch(mixer, pre, post),), residual_scale=residual_scale)


def _whole(name: str, value: Any, limit: int) -> int:
    number = int(value)
    if not 1 <= number <= limit:
        raise ModelLoadError(
            f"config.json: {name} is {quoted(str(value))}, but must be from 1 to {limit}; "
            "pull the model again"
        )
    return number


def _positive(name: str, value: Any) -> float:
    number = float(value)
    if not 0 < number < math.inf:
        raise ModelLoadError(
            f"config.json: {name} is {quoted(str(value))}, but must be a positive number; "
            "pull the model again"
        )
    return number


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    """The temperature on cos and sin as Hugging Face computes it (yarn, section 3.4)."""

    def magnitude(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return magnitude(float(scaling["mscale"])) / magnitude(float(scaling["mscale_all_dim"]))
    return magnitude(1.0)
